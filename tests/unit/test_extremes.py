"""Scenarios at the edge of what is accepted: they run, or the message is the user's; never a bug, never for ever."""

import copy

import pytest

from sim.build import run
from sim.errors import UserError
from sim.scenario import parse_scenario

BASE = {
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": {"policy": "vllm-v1", "max_num_seqs": 8, "max_model_len": 1024, "num_gpu_blocks": 200},
    "cost": {"kind": "constant", "step_ms": 10},
    "traffic": [
        {
            "name": "chat",
            "arrivals": {"kind": "poisson", "rate_per_s": 20},
            "prompt_tokens": 100,
            "output_tokens": {"kind": "uniform", "low": 1, "high": 50},
        }
    ],
    "run": {"num_requests": 20},
}
STATIC = {"policy": "static", "max_batch_size": 7, "max_model_len": 1024, "num_gpu_blocks": 200}


def changed(changes: dict[str, object]) -> dict:
    data = copy.deepcopy(BASE)
    for path, value in changes.items():
        here = data
        *parents, last = path.split(".")
        for key in parents:
            here = here[int(key)] if isinstance(here, list) else here[key]
        here[last] = value
    return data


@pytest.mark.parametrize(
    "changes",
    [
        *({"engine.num_gpu_blocks": n, "run.oversized": "reject"} for n in (1, 2)),
        {"engine.max_num_batched_tokens": 1, "engine.max_num_seqs": 1},
        {"engine.block_size": 1, "engine.num_gpu_blocks": 2000},
        {"engine.block_size": 4096},
        {"engine": STATIC | {"max_batch_size": 10**12}},
        {"traffic.0.arrivals": {"kind": "closed_loop", "num_clients": 10**12}},
        {"traffic.0.arrivals": {"kind": "stages", "stages": [{"duration_s": 1e9, "rate_per_s": 1e9}] * 9}},
        {"traffic.0.cancel": {"kind": "after_time", "after_s": 0}},
        {"traffic.0.cancel": {"kind": "deadline", "after_s": 1e-9}, "traffic.0.max_connections": 1},
        {"cost.step_ms": 1e-15},
        {"cost": {"kind": "linear", "base_ms": 0}},
        {"cost.step_ms": 1e6},
        {"run.warmup_s": 1e9},
    ],
    ids=str,
)
def test_it_runs(changes: dict[str, object]):
    summary = run(changed(changes)).summary()
    assert sum(summary["outcomes"].values()) == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine.block_size": 10**12}, "engine.block_size: expected at most 65536"),
        ({"engine.num_gpu_blocks": 10**12}, "engine.num_gpu_blocks: the pool would have 1,000,000,000,000 blocks;"),
        (
            {"traffic.0.arrivals": {"kind": "poisson", "rate_per_s": 1e10}},
            "traffic[0].arrivals.rate_per_s: expected at most 1e+09",
        ),
        ({"run.duration_s": 1e300}, "run.duration_s: expected at most 1e+09"),
        ({"run": {"duration_s": 1e12, "drain": False}}, "run.duration_s: expected at most 1e+09"),
        ({"run.warmup_s": 1e300}, "run.warmup_s: expected at most 1e+09"),
        ({"cost.step_ms": 1e300}, "cost.step_ms: expected a number below 1e+15"),
        ({"cost.step_ms": 1e12}, "run: simulated time would pass 9e+09 s."),
        ({"cost": {"kind": "linear", "base_ms": 1, "per_decode_us": 1e14}}, "run: simulated time would pass"),
        ({"engine": STATIC | {"max_queue_delay_ms": 1e15}}, "engine.max_queue_delay_ms: expected at most 1e+09"),
        (
            {"traffic.0.arrivals": {"kind": "closed_loop", "num_clients": 1, "think_time_s": 1e9}},
            "run: simulated time would pass 9e+09 s.",
        ),
        (
            {"traffic.0.arrivals": {"kind": "closed_loop", "num_clients": 1, "think_time_s": 1e300}},
            "traffic[0].arrivals.think_time_s",
        ),
    ],
    ids=str,
)
def test_it_is_refused(changes: dict[str, object], message: str):
    with pytest.raises(UserError) as caught:
        run(parse_scenario(changed(changes), place="x.yaml"))
    assert str(caught.value).startswith(f"x.yaml: {message}")
