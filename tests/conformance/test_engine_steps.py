"""Logs of the engines beside vLLM V1: a small one by hand, and inputs that make no sense."""

import copy

import pytest

from sim.conformance.suite import Result, examine
from tests.conformance import tiny

VERSION = "sarathi-serve 0.1.8 @96f9911"


def request(name, arrival_step, prompt_tokens, output_tokens):
    lengths = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "max_tokens": output_tokens}
    return {"id": name, "arrival_step": arrival_step, **lengths, "priority": 0, "client": None, "prefix": None}


INPUT = {
    "engine": "sarathi",
    "version": VERSION,
    "mode": "sarathi",
    "name": "by_hand",
    "config": {"num_gpu_blocks": 4, "block_size": 4, "max_model_len": 16, "max_num_seqs": 8, "chunk_size": 4},
    "requests": [request("a", 0, 2, 3), request("b", 1, 5, 1), request("c", 1, 17, 1)],
}


def line(step, kind, scheduled, prefill, running, used_kv, used_kv_fwd, **more):
    empty = {"preempted": [], "finished": [], "ignored": [], "waiting": []}
    own = {"step": step, "kind": kind, "scheduled": scheduled, "prefill": prefill, "running": running}
    return empty | own | {"used_kv": used_kv, "used_kv_fwd": used_kv_fwd} | more


STEPS = [
    line(0, "prefill", [["a", 2]], ["a"], ["a"], 1, 1),
    # a's decode leaves 3 tokens of the chunk to b, whose whole prompt has its blocks; c is longer than the model takes
    line(1, "mixed", [["b", 3], ["a", 1]], ["b"], ["a", "b"], 3, 3, ignored=["c"]),
    line(2, "mixed", [["b", 2], ["a", 1]], ["b"], [], 0, 3, finished=["b", "a"]),
]
HEADER = {
    "format": "engine-steps-v1",
    "engine": "sarathi",
    "version": VERSION,
    "mode": "sarathi",
    "scenario": "by_hand",
    "counters": {
        "steps": 3,
        "prefill_steps": 1,
        "decode_steps": 0,
        "mixed_steps": 2,
        "empty_steps": 0,
        "preemptions": 0,
        "finished": 2,
        "max_tokens_in_step": 4,
        "max_batch": 2,
        "max_running": 2,
        "max_waiting": 0,
        "peak_used_kv": 3,
        "ignored": 1,
    },
}


def golden():
    return copy.deepcopy((INPUT, [HEADER, *STEPS]))


def test_log_that_was_made_by_hand(tmp_path):
    outcome = examine(tiny.write(tmp_path, *golden()))
    assert (outcome.result, outcome.mismatch, outcome.error, outcome.num_steps) == (Result.PASSED, None, None, 3)


@pytest.mark.parametrize("index", range(len(STEPS) + 1))
def test_any_difference_in_any_line_is_found(tmp_path, index):
    for field in golden()[1][index].keys() - {"format"}:
        scenario, lines = golden()
        lines[index][field] = "something else"
        mismatch = examine(tiny.write(tmp_path, scenario, lines)).mismatch
        assert mismatch is not None
        assert mismatch.fields == [field]


def test_rules_of_another_version_are_named(tmp_path):
    scenario, lines = golden()
    scenario["version"] = lines[0]["version"] = "sarathi-serve 0.2"
    outcome = examine(tiny.write(tmp_path, scenario, lines))
    assert (outcome.result, outcome.note) == (Result.PASSED, f"rules of {VERSION}")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda s: s["config"].update(chunk_sise=4), "config: unknown key 'chunk_sise'"),
        (lambda s: s["config"].update(chunk_size=0), "config.chunk_size: is 0"),
        (lambda s: s.update(mode="orca"), "config: 'chunk_size' has no meaning in mode 'orca'"),
        (lambda s: s.update(mode="serathi"), "Did you mean 'sarathi'?"),
        (
            lambda s: s["config"].update(enable_dynamic_chunking_schedule=True),
            "config.low_chunk_size: is missing; enable_dynamic_chunking_schedule needs all of its numbers",
        ),
        (lambda s: s["requests"][0].update(priority="high"), "requests[0].priority: is 'high'"),
        (lambda s: s["requests"][1].update(id="a"), "requests[1].id: 'a' is the id of an earlier request, too"),
    ],
)
def test_inputs_that_make_no_sense(tmp_path, change, complaint):
    scenario, lines = golden()
    change(scenario)
    outcome = examine(tiny.write(tmp_path, scenario, lines))
    assert outcome.result is Result.ERROR
    assert complaint in str(outcome.error)


V0_CONFIG = {
    "max_num_batched_tokens": 8,
    "max_num_seqs": 2,
    "max_model_len": 16,
    "num_gpu_blocks": 4,
    "num_cpu_blocks": 4,
}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"enable_chunked_prefill": True}, "mode: is 'default'; its config says 'chunked'"),
        ({"enable_prefix_caching": True, "preemption_mode": "swap"}, "engine.preemption: swapping shared blocks"),
        ({"preemption_mode": "pause"}, "config.preemption_mode: is 'pause'"),
    ],
)
def test_v0_configs_that_make_no_sense(tmp_path, config, complaint):
    _, lines = golden()
    version = "vllm 0.6.3.post1 (PyPI), V0 scheduler"
    scenario = INPUT | {"engine": "vllm_v0", "version": version, "mode": "default", "config": V0_CONFIG | config}
    outcome = examine(tiny.write(tmp_path, scenario, lines))
    assert outcome.result is Result.ERROR
    assert complaint in str(outcome.error)
