"""What is no golden, or none that makes sense: one clear message each, never a traceback."""

import gzip

import pytest

from sim.conformance.suite import Result, examine
from tests.conformance import tiny


def complaint(path):
    """The message about one golden, with the folder's name left out."""
    outcome = examine(path)
    assert (outcome.result, outcome.mismatch) == (Result.ERROR, None)
    return str(outcome.error).replace(f"{path.parent}/", "")


def changed(tmp_path, change):
    scenario, lines = tiny.golden()
    change(scenario, lines)
    return complaint(tiny.write(tmp_path, scenario, lines))


CONFIG_KEYS = (
    "block_size, enable_chunked_prefill, enable_prefix_caching, long_prefill_token_threshold,"
    " long_prefill_token_threshold_adaptive, max_model_len, max_num_active_seqs, max_num_batched_tokens,"
    " max_num_scheduled_tokens, max_num_seqs, num_gpu_blocks, num_speculative_tokens, pipeline_parallel_size, policy,"
    " prefill_schedule_interval, scheduler_reserve_full_isl, spec_accept_pattern, use_v2_model_runner, watermark"
)
REQUEST_KEYS = (
    "arrival_step, arrival_time, cancel_step, id, max_tokens, output_stream, output_tokens, prefix, priority,"
    " prompt_tokens"
)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_gpu_block", 4, f": unknown key 'num_gpu_block'; known: {CONFIG_KEYS}. Did you mean 'num_gpu_blocks'?"),
        ("vllm_version", "0.30", f": unknown key 'vllm_version'; known: {CONFIG_KEYS}."),
        ("num_gpu_blocks", None, ".num_gpu_blocks: is None; input should be a valid integer."),
        ("num_gpu_blocks", "auto", ".num_gpu_blocks: is 'auto'; input should be a valid integer."),
        ("block_size", 0, ".block_size: is 0; input should be greater than or equal to 1."),
        ("block_size", 16.0, ".block_size: is 16.0; input should be a valid integer."),
        ("max_num_seqs", -1, ".max_num_seqs: is -1; input should be greater than or equal to 1."),
        ("max_num_seqs", True, ".max_num_seqs: is True; input should be a valid integer."),
        ("max_num_active_seqs", 0, ".max_num_active_seqs: is 0; input should be greater than or equal to 1."),
        ("watermark", 1.5, ".watermark: is 1.5; input should be less than or equal to 1."),
        ("watermark", float("nan"), ".watermark: is nan; input should be a finite number."),
        ("policy", "lifo", ".policy: is 'lifo'; input should be 'fcfs' or 'priority'."),
        ("enable_prefix_caching", "yes", ".enable_prefix_caching: is 'yes'; input should be a valid boolean."),
        ("spec_accept_pattern", 3, ".spec_accept_pattern: is 3; input should be a valid array."),
        ("spec_accept_pattern", [1, -1], ".spec_accept_pattern[1]: is -1; input should be greater than or equal to 0."),
        (
            "spec_accept_pattern",
            [],
            ".spec_accept_pattern: is []; tuple should have at least 1 item after validation, not 0.",
        ),
    ],
)
def test_config(tmp_path, key, value, expected):
    found = changed(tmp_path, lambda scenario, _: scenario["config"].update({key: value}))
    assert found == f"tiny.json: config{expected}"


def test_config_without_a_pool(tmp_path):
    found = changed(tmp_path, lambda scenario, _: scenario["config"].pop("num_gpu_blocks"))
    assert found == "tiny.json: config.num_gpu_blocks: is missing."


def test_options_that_a_version_did_not_have(tmp_path):
    found = changed(
        tmp_path, lambda scenario, _: (scenario.update(version="0.22.1"), scenario["config"].update(watermark=0.1))
    )
    assert found == (
        "tiny.json: config.watermark: vLLM 0.22.1 does not have this option (rules of 0.22.1)."
        " Leave it out or name a newer vllm_version."
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("prompt_tokens", -4, ".prompt_tokens: is -4; input should be greater than or equal to 0."),
        ("prompt_tokens", "4", ".prompt_tokens: is '4'; input should be a valid integer."),
        ("prompt_tokens", None, ".prompt_tokens: is None; input should be a valid integer."),
        ("output_tokens", 0, ".output_tokens: is 0; input should be greater than or equal to 1."),
        ("max_tokens", 1.5, ".max_tokens: is 1.5; input should be a valid integer."),
        ("arrival_step", -1, ".arrival_step: is -1; input should be greater than or equal to 0."),
        ("cancel_step", "never", ".cancel_step: is 'never'; input should be a valid integer."),
        ("id", 7, ".id: is 7; input should be a valid string."),
        ("id", "a", ".id: 'a' is the id of an earlier request, too."),
        ("prefix", [[0]], ".prefix[0][1]: is missing."),
        ("prefix", [[0, -1]], ".prefix[0][1]: is -1; input should be greater than or equal to 0."),
        ("prefix", [[0, 2], [1, 2]], ".prefix: has 4 tokens; the prompt has only 3."),
        ("priorty", 1, f": unknown key 'priorty'; known: {REQUEST_KEYS}. Did you mean 'priority'?"),
    ],
)
def test_request(tmp_path, key, value, expected):
    found = changed(tmp_path, lambda scenario, _: scenario["requests"][1].update({key: value}))
    assert found == f"tiny.json: requests[1]{expected}"


@pytest.mark.parametrize("key", ["id", "arrival_step", "prompt_tokens", "output_tokens", "max_tokens"])
def test_request_without(tmp_path, key):
    found = changed(tmp_path, lambda scenario, _: scenario["requests"][2].pop(key))
    assert found == f"tiny.json: requests[2].{key}: is missing."


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"engine": None}, "tiny.json: 'engine' is missing; expected a str."),
        ({"engine": 1}, "tiny.json: 'engine' is 1; expected a str."),
        ({"mode": "fast"}, "tiny.json: mode: is 'fast'; known: sync, async."),
        ({"version": 0.33}, "tiny.json: 'version' is 0.33; expected a str."),
        ({"config": [1]}, "tiny.json: 'config' is [1]; expected a dict."),
        ({"requests": None}, "tiny.json: 'requests' is missing; expected a list."),
        ({"requests": []}, "tiny.json: requests: is empty: such a log shows nothing."),
        ({"requests": ["a"]}, "tiny.json: requests[0]: is 'a'; a JSON object is expected."),
        ({"max_steps": -1}, "tiny.json: max_steps: is -1; expected a whole number or null."),
        ({"max_steps": True}, "tiny.json: max_steps: is True; expected a whole number or null."),
        ({"max_step": 9}, "tiny.json: unknown key 'max_step'. Did you mean 'max_steps'?"),
    ],
)
def test_input(tmp_path, change, expected):
    assert changed(tmp_path, lambda scenario, _: scenario.update(change)) == expected


@pytest.mark.parametrize("version", ["newest", "0.8.5", "0.33.0.1", ""])
def test_version_that_nobody_looked_up(tmp_path, version):
    found = changed(tmp_path, lambda scenario, _: scenario.update(version=version))
    assert found.startswith(f"tiny.json: version: {version!r} is ")
    assert found.endswith("known: 0.33.0, 0.30.0, 0.26.0, 0.22.1, 0.18.0, 0.14.1, 0.11.2, 0.9.2.")


def test_mode_that_a_version_did_not_have(tmp_path):
    found = changed(tmp_path, lambda scenario, _: scenario.update(version="0.9.2", mode="async"))
    assert found.startswith("tiny.json: mode: vLLM 0.9.2 does not have this option")


@pytest.mark.parametrize("found", [2, "1", None, "engine-steps-v1"])
def test_format(tmp_path, found):
    message = changed(tmp_path, lambda _, lines: lines[0].update(format=found))
    assert message == f"tiny.json: its log has format {found!r}; this engine's logs have 1."


def test_engine_without_policy_is_skipped_by_name(tmp_path):
    scenario, lines = tiny.golden()
    outcome = examine(tiny.write(tmp_path, scenario | {"engine": "vlm"}, lines))
    assert (outcome.result, outcome.engine, outcome.error) == (Result.SKIPPED, "vlm 0.33.0", None)
    assert outcome.note == "no policy for engine 'vlm'"


LOG = "tiny.log.jsonl.gz"
REMADE = "Make it again."


def whole_log():
    return b'{"format": 1}\n' * 2000


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", f"{LOG}: is empty."),
        (b"{}", f"{LOG}: is not a complete gzip file (Not a gzipped file (b'{{}}')). {REMADE}"),
        (
            gzip.compress(whole_log())[:-12],
            f"{LOG}: is not a complete gzip file (Compressed file ended before the end-of-stream marker was reached)."
            f" {REMADE}",
        ),
        (
            gzip.compress(b"{}\n")[:10] + b"\xff\xff\xff",
            f"{LOG}: is not a complete gzip file (Error -3 while decompressing data: invalid block type). {REMADE}",
        ),
        (
            gzip.compress(b"\xff\xfe"),
            f"{LOG}: is not a complete gzip file ('utf-8' codec can't decode byte 0xff in position 0:"
            f" invalid start byte). {REMADE}",
        ),
        (gzip.compress(b""), f"{LOG}: is empty."),
        (gzip.compress(b"[]\n"), f"{LOG}:1: holds a list; a JSON object is expected."),
        (gzip.compress(b"{}\n{\n"), f"{LOG}:2: is not JSON (Expecting property name enclosed in double quotes"),
        (gzip.compress(b"{}\n7\n"), f"{LOG}:2: holds a int; a JSON object is expected."),
    ],
    ids=["nothing", "not gzip", "truncated", "corrupt", "not text", "no line", "header", "not JSON", "line"],
)
def test_log(tmp_path, content, expected):
    path = tiny.write(tmp_path, *tiny.golden())
    (tmp_path / LOG).write_bytes(content)
    assert complaint(path).startswith(expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "tiny.json: is not JSON (Expecting value, line 1 column 1)."),
        (b"{]", "tiny.json: is not JSON (Expecting property name enclosed in double quotes, line 1 column 2)."),
        (b"[1, 2]", "tiny.json: holds a list; a JSON object is expected."),
        (
            b"\xff",
            "tiny.json: cannot be read ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte).",
        ),
        (b"[" * 100_000, "tiny.json: is not JSON that can be read (maximum recursion depth exceeded"),
        (b"9" * 10_000, "tiny.json: is not JSON that can be read (Exceeds the limit (4300 digits)"),
    ],
    ids=["nothing", "cut", "list", "not text", "too deep", "too long a number"],
)
def test_file(tmp_path, content, expected):
    path = tiny.write(tmp_path, *tiny.golden())
    path.write_bytes(content)
    assert complaint(path).startswith(expected)


def test_one_of_the_pair_is_missing(tmp_path):
    path = tiny.write(tmp_path, *tiny.golden())
    (tmp_path / LOG).rename(tmp_path / "other.log.jsonl.gz")
    assert complaint(path) == f"tiny.json: has no log {LOG} beside it."
    assert complaint(tmp_path / "other.json") == "other.json: no such file."
