"""FastServe's MLFQ gives the same tables whether it counts changes or chooses every pass anew."""

from collections import Counter

import numpy as np
import pytest

from sim.clients import Clients
from sim.clock import NS_PER_MS, Clock
from sim.core import EngineCore
from sim.cost.linear import Linear, LinearOptions
from sim.engine import Engine
from sim.policies import fastserve_crowd
from sim.policies.base import EngineLimits
from sim.policies.fastserve import FastServe
from sim.record import Recorder
from sim.request import NEVER
from sim.workload.base import ClientPool, Traffic

NUM_REQUESTS = 90
COST = LinearOptions(
    kind="linear", base_ms=1.0, per_decode_us=150.0, per_prefill_token_us=20.0, per_context_token_ns=300.0
)
EQUAL = LinearOptions(kind="linear", base_ms=1.25)
"""Eight passes use up the time of the highest level, to the bit."""
OPTIONS = {
    "mlfq": {"scheduler": "mlfq"},
    "skip-join": {},
    "few seats": {"max_batch_size": 7},
    "small host": {"num_cpu_blocks": 300},
    "kept free": {"proactive_offloading": True, "num_min_free_blocks_threshold": 9, "max_batch_size": 12},
    "starvation": {"starvation_threshold_s": 0.05, "starvation_period": 7},
    "short passes": {"max_tokens_per_batch": 80},
}


class Plain(FastServe):
    """Chooses every pass from the queues."""

    def __init__(self, options, limits):
        super().__init__(options, limits)
        self._crowd = None

    def _gather(self):
        """Never."""


class Watched(FastServe):
    """Notes which passes it made how."""

    def plan(self, now_ns):
        step = super().plan(now_ns)
        SEEN["crowd" if self._crowd else "queues", "prompts" if step.chunks else "decodes"] += 1
        self.check_integrity()
        return step


SEEN = Counter()


def traffic(seed, gap_ms):
    rng = np.random.default_rng(seed)
    zeros = np.zeros(NUM_REQUESTS, dtype=np.int64)
    leaves = rng.random(NUM_REQUESTS)
    output_tokens = rng.integers(1, 60, NUM_REQUESTS)
    return Traffic(
        class_names=("all",),
        pools=(ClientPool(),),
        class_index=zeros,
        arrival_ns=np.cumsum(rng.exponential(gap_ms * NS_PER_MS, NUM_REQUESTS)).astype(np.int64),
        think_ns=zeros,
        prompt_tokens=rng.integers(1, 66, NUM_REQUESTS),
        output_tokens=output_tokens,
        max_tokens=output_tokens,
        priority=zeros,
        cancel_after_ns=np.where(leaves < 0.1, rng.integers(0, 150 * NS_PER_MS, NUM_REQUESTS), zeros + NEVER),
        cancel_after_tokens=np.where(leaves > 0.85, rng.integers(1, 30, NUM_REQUESTS), zeros + NEVER),
        leaves_at_deadline=zeros.astype(bool),
    )


def simulate(cls, options, num_gpu_blocks, columns, cost=COST):
    """Tables as bytes."""
    limits = EngineLimits(max_model_len=128, block_size=4, num_gpu_blocks=num_gpu_blocks)
    policy = cls(FastServe.Options(policy="fastserve", **options), limits)
    clock, recorder = Clock(), Recorder()
    Clients(clock, Engine(clock, EngineCore(policy), Linear(cost), recorder), recorder, columns).start()
    clock.run()
    tables = recorder.tables()
    policy.kv.check_drained()
    return {
        (name, column): values.tobytes()
        for name in ("iterations", "chunks", "requests", "segments")
        for column, values in getattr(tables, name).items()
    }


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("max_passes", [4096, 5])
def test_tables_are_equal(options, max_passes, monkeypatch):
    monkeypatch.setattr(fastserve_crowd, "MAX_PASSES", max_passes)
    SEEN.clear()
    for seed, (num_gpu_blocks, gap_ms) in enumerate([(1000, 5), (1000, 0), (150, 12), (70, 12)]):
        columns = traffic(seed, gap_ms)
        plain = simulate(Plain, options, num_gpu_blocks, columns)
        assert simulate(Watched, options, num_gpu_blocks, columns) == plain
    kinds = [(how, what) for how in ("crowd", "queues") for what in ("prompts", "decodes")]
    assert min(SEEN[kind] for kind in kinds) > 10, SEEN


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_who_has_used_exactly_the_time_of_its_level_stays_in_it_for_one_more_pass(options):
    columns = traffic(0, 0)
    assert simulate(Watched, options, 1000, columns, EQUAL) == simulate(Plain, options, 1000, columns, EQUAL)
