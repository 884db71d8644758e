"""What a scenario may say to the vLLM V1 scheduler, by version."""

import pytest

from sim.errors import ScenarioError
from sim.gpu import load_gpu
from sim.policies.base import EngineLimits
from sim.policies.vllm_v1 import VllmV1
from sim.policies.vllm_v1_config import NOT_MODELLED, VERSIONS, V1Config, VllmV1Options, rules_for
from sim.policies.vllm_v1_reference import VllmV1Reference
from sim.request import Request
from sim.scenario import parse_scenario

LIMITS = EngineLimits(max_model_len=4096, block_size=16, num_gpu_blocks=1000)
SCENARIO = {
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "traffic": [
        {"name": "a", "arrivals": {"kind": "burst", "num_requests": 1}, "prompt_tokens": 9, "output_tokens": 9}
    ],
}


def options(gpu="h100-sxm", **fields):
    return VllmV1Options(policy="vllm-v1", **fields).on_gpu(load_gpu(gpu))


@pytest.mark.parametrize(
    ("gpu", "fields", "tokens", "seqs"),
    [
        ("h100-sxm", {}, 8192, 1024),
        ("h200-sxm", {}, 8192, 1024),
        ("b200", {}, 16384, 1024),
        ("a100-sxm-80gb", {}, 2048, 256),
        ("rtx-4090", {}, 2048, 256),
        ("h100-sxm", {"max_num_batched_tokens": 512}, 512, 512),
        ("h100-sxm", {"max_num_seqs": 7}, 8192, 7),
        ("l4", {"enable_chunked_prefill": False, "max_model_len": 9000}, 9000, 256),
    ],
)
def test_a_server_takes_its_defaults_from_the_gpu(gpu, fields, tokens, seqs):
    config = V1Config.resolve(options(gpu, **fields), LIMITS)
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (tokens, seqs)


@pytest.mark.parametrize(
    ("version", "row"),
    [
        ("0.33.0", "0.33.0"),
        ("0.33", "0.33.0"),
        ("v0.34.2", "0.33.0"),
        ("0.32.9", "0.30.0"),
        ("0.19", "0.18.0"),
        ("0.22.0", "0.18.0"),
        ("0.22", "0.22.1"),
        ("0.9.2", "0.9.2"),
    ],
)
def test_a_version_takes_the_newest_row_not_above_it_and_says_so(version, row):
    rules, taken = rules_for(version)
    assert (taken, rules) == (row, VERSIONS[tuple(map(int, row.split(".")))])
    notes = list(options(vllm_version=version).notes())
    assert [row in note for note in notes] == ([] if version == row else [True])


@pytest.mark.parametrize("version", ["0.9.1", "0.8", "new", "0", "1.2.3.4", ""])
def test_versions_that_are_none_are_refused(version):
    with pytest.raises(ScenarioError) as caught:
        rules_for(version)
    assert "known: 0.33.0, 0.30.0" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"vllm_version": "0.9.2", "async_scheduling": True}, "engine.async_scheduling"),
        ({"vllm_version": "0.18.0", "scheduler_reserve_full_isl": True}, "engine.scheduler_reserve_full_isl"),
        ({"vllm_version": "0.22.1", "watermark": 0.1}, "engine.watermark"),
        ({"vllm_version": "0.30.0", "prefill_schedule_interval": 2}, "engine.prefill_schedule_interval"),
        ({"vllm_version": "0.30.0", "max_num_active_seqs": 2}, "engine.max_num_active_seqs"),
        ({"vllm_version": "0.14.1", "max_num_scheduled_tokens": 99}, "engine.max_num_scheduled_tokens"),
    ],
)
def test_options_that_a_version_lacks_are_refused(fields, place):
    with pytest.raises(ScenarioError) as caught:
        V1Config.resolve(options(**fields), LIMITS)
    assert caught.value.place == place


def test_admission_cannot_fill_up_to_more_than_may_run():
    with pytest.raises(ScenarioError) as caught:
        VllmV1.build(options(max_num_seqs=4, max_num_active_seqs=5), LIMITS)
    assert (caught.value.place, caught.value.found) == ("engine.max_num_active_seqs", "5 is above max_num_seqs 4")


@pytest.mark.parametrize("budget", ["max_num_batched_tokens", "max_num_scheduled_tokens"])
def test_a_prompt_that_may_not_be_split_must_fit_into_a_step(budget):
    whole, split = (
        VllmV1.build(options(enable_chunked_prefill=chunked, **{budget: 9}), LIMITS) for chunked in (False, True)
    )
    assert whole.never_fits(Request(0, 9, 1)) is None
    assert whole.never_fits(Request(0, 10, 1)) == "its prompt of 10 tokens may not be split, and a step has 9"
    assert split.never_fits(Request(0, 10, 1)) is None


def test_defaults_follow_the_version():
    old, new = (V1Config.resolve(options(vllm_version=version), LIMITS) for version in ("0.11.2", "0.33.0"))
    assert (old.async_scheduling, old.scheduler_reserve_full_isl, old.max_in_flight) == (False, False, 1)
    assert (new.async_scheduling, new.scheduler_reserve_full_isl, new.max_in_flight) == (True, True, 2)


@pytest.mark.parametrize(
    ("fields", "planner"),
    [
        ({}, VllmV1),
        ({"async_scheduling": False, "enable_prefix_caching": False}, VllmV1),
        ({"scheduling_policy": "priority"}, VllmV1Reference),
        ({"pipeline_parallel_size": 2}, VllmV1Reference),
    ],
)
def test_the_fast_planner_runs_what_it_covers(fields, planner):
    assert type(VllmV1.build(options(**fields), LIMITS)) is planner


@pytest.mark.parametrize("option", NOT_MODELLED)
def test_options_without_a_model_are_refused_by_name(option):
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(SCENARIO | {"engine": {"policy": "vllm-v1", option: 1}})
    assert f"vLLM's option {option!r} is not modelled; {NOT_MODELLED[option]}" in str(caught.value)
