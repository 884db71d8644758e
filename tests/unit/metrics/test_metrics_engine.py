"""Metrics of real runs: they must agree with what the engine counted and the cost model charged."""

from __future__ import annotations

import jsonschema
import numpy as np
import pytest

from sim.clients import Clients
from sim.clock import NS_PER_MS, Clock
from sim.core import EngineCore
from sim.cost.linear import Linear, LinearOptions
from sim.engine import Engine
from sim.metrics.facts import RunFacts
from sim.metrics.load import step_arrays
from sim.metrics.shares import work_shares
from sim.metrics.summary import summary_schema
from sim.policies.base import POLICIES, EngineLimits
from sim.record import Recorder
from sim.request import NEVER, Outcome
from sim.results import Results
from sim.workload.base import ClientPool, Traffic

NUM_REQUESTS = 80
COST = LinearOptions(
    kind="linear",
    base_ms=1.0,
    per_decode_us=50.0,
    per_prefill_token_us=100.0,
    per_context_token_ns=300.0,
    per_prefill_pair_ns=200.0,
    host_us=20.0,
)


def traffic(max_connections=None):
    """Poisson arrivals of which about every third leaves early."""
    rng = np.random.default_rng(7)
    nobody = np.full(NUM_REQUESTS, NEVER, dtype=np.int64)
    patience_ns = rng.integers(0, 60 * NS_PER_MS, NUM_REQUESTS)
    output_tokens = rng.integers(1, 13, NUM_REQUESTS)
    return Traffic(
        class_names=("all",),
        pools=(ClientPool(max_connections=max_connections),),
        class_index=np.zeros(NUM_REQUESTS, dtype=np.int64),
        arrival_ns=np.cumsum(rng.exponential(5 * NS_PER_MS, NUM_REQUESTS)).astype(np.int64),
        think_ns=np.zeros(NUM_REQUESTS, dtype=np.int64),
        prompt_tokens=rng.integers(1, 26, NUM_REQUESTS),
        output_tokens=output_tokens,
        max_tokens=output_tokens,
        priority=np.zeros(NUM_REQUESTS, dtype=np.int64),
        cancel_after_ns=np.where(rng.random(NUM_REQUESTS) < 0.35, patience_ns, NEVER),
        cancel_after_tokens=nobody,
        leaves_at_deadline=np.zeros(NUM_REQUESTS, dtype=np.bool_),
    )


def simulate(policy_name, options, num_gpu_blocks, aborts=True, max_connections=None):
    cls = POLICIES.load(policy_name)
    limits = EngineLimits(max_model_len=40, block_size=4, num_gpu_blocks=num_gpu_blocks)
    policy = cls.build(cls.Options(policy=policy_name, **options), limits)
    clock, recorder, cost = Clock(), Recorder(), Linear(COST)
    engine = Engine(clock, EngineCore(policy), cost, recorder, aborts=aborts)
    clients = Clients(clock, engine, recorder, traffic(max_connections))
    clients.start()
    clock.run(None)
    clients.stop()
    tables = recorder.tables()
    facts = RunFacts(
        class_names=("all",),
        num_blocks=num_gpu_blocks,
        usable_blocks=policy.usable_blocks,
        block_size=4,
        is_streaming=policy.streams_answers,
        slo={"p99_ttft_ms": 50, "p90_itl_ms": 3},
    )
    return Results(tables, facts, cost.breakdown(step_arrays(tables)), work_shares(tables, cost))


@pytest.mark.parametrize("aborts", [True, False])
@pytest.mark.parametrize(
    ("policy_name", "options"),
    [
        ("vllm-v1", {"max_num_seqs": 4, "max_num_batched_tokens": 32}),
        ("vllm-v1", {"max_num_seqs": 4, "max_num_batched_tokens": 32, "async_scheduling": False}),
        ("static", {"max_batch_size": 4, "release": "streaming"}),
        ("static", {"max_batch_size": 4, "max_queue_delay_ms": 7.0}),
    ],
)
def test_metrics_agree_with_the_engine(policy_name, options, aborts):
    run = simulate(policy_name, options, num_gpu_blocks=14, aborts=aborts)
    iterations, requests = run.tables.iterations, run.tables.requests
    if run.facts.is_streaming:
        assert np.array_equal(run.tokens.num_delivered, requests["output_tokens"])
    priced_ns = iterations["end_ns"] - iterations["start_ns"]
    assert np.abs(sum(run.breakdown.values()) - priced_ns).max() <= 1

    summary = run.summary()
    jsonschema.validate(summary, summary_schema())
    assert sum(summary["limits"]["shares"].values()) == pytest.approx(1, abs=1e-12)
    assert summary["outcomes"]["finished"] == summary["metrics"]["e2e_ms"]["count"]
    assert sum(summary["outcomes"].values()) == NUM_REQUESTS
    departed = np.isin(requests["outcome"], [Outcome.CANCELLED, Outcome.TIMED_OUT])
    assert summary["cancellation"]["num_departed"] == np.count_nonzero(departed) > 0


def test_a_client_with_few_connections_shows_no_more_running_requests_than_it_has():
    free, held = (
        simulate("vllm-v1", {"max_num_seqs": 8, "async_scheduling": False}, 1000, max_connections=n) for n in (None, 1)
    )
    assert held.summary()["iterations"]["peak_num_running"] == 1 < free.summary()["iterations"]["peak_num_running"]
    assert (
        held.summary()["metrics"]["client_queue_ms"]["mean"] > free.summary()["metrics"]["client_queue_ms"]["mean"] == 0
    )
    assert held.limits.binds == "client"
    assert free.limits.binds == "arrivals"


def test_the_mean_number_waiting_obeys_littles_law():
    run = simulate("static", {"max_batch_size": 4}, 1000)
    requests, window = run.tables.requests, run.window
    until_ns = np.where(requests["admitted_ns"] != NEVER, requests["admitted_ns"], requests["cancelled_ns"])
    total_ns = int((until_ns - requests["queued_ns"]).sum())
    assert run.summary()["iterations"]["mean_num_waiting"] == total_ns / window.duration_ns > 0
