"""The fast V1 planner gives the tables of the plain one, to the byte, through the whole simulator."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from sim.clients import Clients
from sim.clock import NS_PER_MS, Clock
from sim.core import EngineCore
from sim.cost.linear import Linear, LinearOptions
from sim.engine import Engine
from sim.policies.base import EngineLimits
from sim.policies.vllm_v1 import VllmV1
from sim.policies.vllm_v1_config import V1Config, VllmV1Options
from sim.policies.vllm_v1_reference import VllmV1Reference
from sim.record import Recorder
from sim.request import NEVER, Outcome
from sim.tokens import Run, TokenRuns
from sim.workload.base import ClientPool, Traffic

NUM_REQUESTS = 80
NOBODY = np.full(NUM_REQUESTS, NEVER, dtype=np.int64)
COST = LinearOptions(
    kind="linear",
    base_ms=1.0,
    per_decode_us=50.0,
    per_prefill_token_us=10.0,
    per_context_token_ns=300.0,
    per_prefill_pair_ns=200.0,
    host_us=400.0,
)
POOLS = {"ample": 1000, "tight": 40}
"""Blocks of 4 tokens; the longest request takes 32, eight average ones some 140."""


def tokens(row):
    """Three of four requests begin with the same text."""
    return TokenRuns((Run("text", 17),)) if row % 4 else TokenRuns()


def traffic(seed=0, **given):
    rng = np.random.default_rng(seed)
    output_tokens = rng.integers(1, 60, NUM_REQUESTS)
    columns = Traffic(
        class_names=("all",),
        pools=(ClientPool(),),
        class_index=np.zeros(NUM_REQUESTS, dtype=np.int64),
        arrival_ns=np.cumsum(rng.exponential(9 * NS_PER_MS, NUM_REQUESTS)).astype(np.int64),
        think_ns=np.zeros(NUM_REQUESTS, dtype=np.int64),
        prompt_tokens=rng.integers(18, 66, NUM_REQUESTS),
        output_tokens=output_tokens,
        max_tokens=np.where(rng.random(NUM_REQUESTS) < 0.5, output_tokens, 60),
        priority=np.zeros(NUM_REQUESTS, dtype=np.int64),
        cancel_after_ns=NOBODY,
        cancel_after_tokens=NOBODY,
        leaves_at_deadline=np.zeros(NUM_REQUESTS, dtype=np.bool_),
        tokens=tokens,
    )
    return replace(columns, **given)


PATIENCE_NS = np.random.default_rng(1).integers(0, 150 * NS_PER_MS, NUM_REQUESTS)
TRAFFIC = {
    "poisson": traffic(),
    "all at 0": traffic(arrival_ns=np.zeros(NUM_REQUESTS, dtype=np.int64)),
    "leaves after a time": traffic(cancel_after_ns=PATIENCE_NS),
    "leaves at a deadline": traffic(
        cancel_after_ns=PATIENCE_NS, leaves_at_deadline=np.ones(NUM_REQUESTS, dtype=np.bool_)
    ),
    "leaves after tokens": traffic(cancel_after_tokens=np.arange(NUM_REQUESTS) % 40 + 1),
    "closed loop": traffic(arrival_ns=NOBODY, think_ns=PATIENCE_NS // 10, pools=(ClientPool(num_clients=9),)),
    "few connections": traffic(cancel_after_ns=PATIENCE_NS, pools=(ClientPool(max_connections=5),)),
}


def simulate(planner, options, num_gpu_blocks, columns, *, aborts=True, macro_steps=False):
    """Tables as bytes, and what the run shows."""
    limits = EngineLimits(max_model_len=128, block_size=4, num_gpu_blocks=num_gpu_blocks)
    config = V1Config.resolve(VllmV1Options(policy="vllm-v1", **options), limits)
    clock, recorder = Clock(), Recorder()
    core = EngineCore(planner(config))
    engine = Engine(clock, core, Linear(COST), recorder, aborts=aborts, macro_steps=macro_steps)
    Clients(clock, engine, recorder, columns).start()
    clock.run()
    tables = recorder.tables()
    seen = Counter(Outcome(value).name for value in tables.requests["outcome"])
    seen["preemptions"] = int(tables.requests["num_preemptions"].sum())
    seen["cached tokens"] = int(tables.requests["cached_prompt_tokens"].sum())
    seen["chunks"] = len(tables.chunks["request"]) - np.count_nonzero(tables.requests["admitted_ns"] != NEVER)
    return {
        (name, column): values.tobytes()
        for name in ("iterations", "chunks", "requests", "segments")
        for column, values in getattr(tables, name).items()
    }, seen


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("columns", TRAFFIC.values(), ids=TRAFFIC)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("caches", [False, True], ids=["", "prefix caching"])
def test_tables_are_equal(pool, columns, is_async, caches):
    options = {
        "async_scheduling": is_async,
        "enable_prefix_caching": caches,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
    }
    plain, seen = simulate(VllmV1Reference, options, pool, columns)
    for macro_steps in (False, True):
        fast, _ = simulate(VllmV1, options, pool, columns, macro_steps=macro_steps)
        assert [key for key in plain if plain[key] != fast[key]] == []
    assert seen["chunks"] > 0
    assert (seen["preemptions"] > 0) == (pool == POOLS["tight"])
    assert (seen["cached tokens"] > 0) == caches
    leaves = (columns.cancel_after_ns != NEVER).any() or (columns.cancel_after_tokens != NEVER).any()
    assert (seen["CANCELLED"] + seen["TIMED_OUT"] > 0) == leaves


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_tables_are_equal_when_nobody_is_dropped(is_async):
    options = {"async_scheduling": is_async, "max_num_seqs": 8, "max_num_batched_tokens": 48}
    columns = traffic(cancel_after_tokens=np.arange(NUM_REQUESTS) % 40 + 1, cancel_after_ns=PATIENCE_NS)
    plain, _ = simulate(VllmV1Reference, options, POOLS["tight"], columns, aborts=False)
    fast, seen = simulate(VllmV1, options, POOLS["tight"], columns, aborts=False)
    assert plain == fast
    assert seen["CANCELLED"] > 0
