import json

import pytest

from calibration.measured_run import MeasuredRun, read_link, read_run
from calibration.ring import Link
from sim.errors import ArtifactError


def write(folder, **changes):
    meta = {"vllm_version": "0.19.0", "engine_kwargs": {"model": "meta-llama/Llama-3.1-8B"}}
    (folder / "meta.json").write_text(json.dumps(meta | changes))
    return folder


def engine(**changes):
    return {
        "policy": "vllm-v1",
        "vllm_version": "0.19.0",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "block_size": 16,
        "enable_prefix_caching": True,
        "num_gpu_blocks": "auto",
        "gpu_memory_utilization": 0.9,
    } | changes


def test_what_a_run_does_not_say_is_the_default_of_its_engine(tmp_path):
    assert read_run(write(tmp_path)) == MeasuredRun("llama-3.1-8b", 1, engine(), "")


def test_settings_may_be_spelled_as_on_the_command_line_and_what_the_engine_found_goes_first(tmp_path):
    kwargs = {
        "--max-num-seqs": 64,
        "max-num-batched-tokens": "4096",
        "tensor_parallel_size": 2,
        "max_model_len": 8192,
        "block_size": 32,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 70,
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "quantization": None,
    }
    kv_cache = {"num_gpu_blocks": None, "block_size": 16, "gpu_memory_utilization": None, "num_cpu_blocks": None}
    folder = write(
        tmp_path,
        model="/models/Qwen3-32B/",
        vllm_version="v0.19.1rc2.dev3+cu130",
        engine_kwargs=kwargs,
        kv_cache=kv_cache,
        published_sim_summary="TTFT Mean 1 2",
    )
    own = engine(
        vllm_version="0.19.1",
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        max_model_len=8192,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        num_gpu_blocks=70,
        async_scheduling=False,
        scheduling_policy="priority",
    )
    assert read_run(folder) == MeasuredRun("qwen3-32b", 2, own, "TTFT Mean 1 2")


@pytest.mark.parametrize("kwargs", [{"max_model_len": "auto"}, {"max_model_len": -1}, {"max_model_len": None}])
def test_the_models_own_longest_context(tmp_path, kwargs):
    assert read_run(write(tmp_path, engine_kwargs={"model": "llama-3.1-8b"} | kwargs)).engine == engine()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"engine_kwargs": {}, "engine_args": {}},
            "does not say engine_kwargs; expected a measured run. It has vllm_v",
        ),
        ({"vllm_version": None}, "does not say vllm_version; expected a measured run."),
        ({"vllm_version": "nightly"}, "vllm_version is 'nightly'; expected a version such as 0.19.0."),
        ({"engine_kwargs": [1]}, "engine_kwargs is [1]; expected a JSON object."),
        ({"kv_cache": [1]}, "kv_cache is [1]; expected a JSON object."),
        ({"kv_cache": {"num_gpu_blocks": "many"}}, "num_gpu_blocks is 'many'; expected a whole number, at least 1."),
        ({"kv_cache": {"enable_prefix_caching": 1}}, "enable_prefix_caching is 1; expected true or false."),
        ({"kv_cache": {"gpu_memory_utilization": 90}}, "gpu_memory_utilization is 90; expected a number above 0, at m"),
        ({"engine_kwargs": {"seed": 42}}, "model is None; expected a model's name."),
    ],
)
def test_a_description_of_something_else_is_refused(tmp_path, changes, message):
    refused(tmp_path, changes, message)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tensor_parallel_size": "two"}, "tensor_parallel_size is 'two'; expected a whole number, at least 1."),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; expected a whole number, at least 1."),
        ({"tensor_parallel_size": 1.5}, "tensor_parallel_size is 1.5; expected a whole number, at least 1."),
        ({"max_num_seqs": float("inf")}, "max_num_seqs is inf; expected a whole number, at least 1."),
        ({"max_num_seqs": True}, "max_num_seqs is True; expected a whole number, at least 1."),
        ({"scheduling_policy": 1}, "scheduling_policy is 1; expected a value of type str."),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; can be replayed: 1."),
        ({"--quantization": "fp8"}, "quantization is 'fp8'; can be replayed: none."),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; can be replayed: bfloat16 or float16."),
    ],
)
def test_a_setting_that_cannot_be_replayed_is_refused(tmp_path, setting, message):
    refused(tmp_path, {"engine_kwargs": {"model": "llama-3.1-8b"} | setting}, message)


def refused(folder, changes, message):
    with pytest.raises(ArtifactError) as caught:
        read_run(write(folder, **changes))
    assert str(caught.value).startswith(f"{folder / 'meta.json'}: {message}")


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read as JSON ("), ("[1]", "holds a list; expected")])
def test_a_file_without_a_description_is_refused(tmp_path, text, message):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(ArtifactError) as caught:
        read_run(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'meta.json'}: {message}")


def test_a_link_is_read_in_its_units(tmp_path):
    assert read_link(tmp_path) is None
    (tmp_path / "cluster_config.json").write_text('{"link_bw": 16, "link_latency": 20000}')
    assert read_link(tmp_path) == Link(bytes_per_us=16000, latency_us=20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "link_bw is None and link_latency None; expected GB/s above zero and ns, zero or more."),
        ('{"link_bw": "fast", "link_latency": 1}', "link_bw is 'fast' and link_latency 1; expected"),
        ('{"link_bw": 0, "link_latency": 1}', "link_bw is 0 and link_latency 1; expected"),
        ('{"link_bw": 9, "link_latency": -1}', "link_bw is 9 and link_latency -1; expected"),
        ("[]", "holds a list; expected a JSON object."),
    ],
)
def test_what_is_no_link_is_refused(tmp_path, text, message):
    path = tmp_path / "cluster_config.json"
    path.write_text(text)
    with pytest.raises(ArtifactError) as caught:
        read_link(tmp_path)
    assert str(caught.value).startswith(f"{path}: {message}")
