"""Replicas that take from one queue, by whole logs with times: a prompt token and a decode take 1 ms."""

import numpy as np
import pytest

from sim.build import run
from sim.clients import Clients
from sim.clock import NS_PER_MS, Clock
from sim.core import EngineCore
from sim.cost.linear import Linear, LinearOptions
from sim.doors.base import build_doors
from sim.doors.queue_limit import QueueLimitOptions
from sim.engine import Engine
from sim.errors import InvariantError, ScenarioError
from sim.metrics.replicas import merge_tables
from sim.planning.explain import explain
from sim.planning.next_change import next_change
from sim.policies.base import EngineLimits
from sim.policies.static import StaticBatching, StaticOptions
from sim.queues.edf import EarliestDeadlineOptions
from sim.reception import Reception
from sim.record import Recorder
from sim.request import NEVER, Outcome
from sim.routing.shared_queue import SharedQueueRouting
from sim.scenario import parse_scenario
from sim.shared_queue import SharedQueue, Taker
from sim.step import BlockedBy
from tests.laws.test_fleets import same
from tests.laws.test_laws import columns

COST = LinearOptions(base_ms=0, per_prefill_token_us=1000, per_decode_us=1000)


def serve(traffic, num_replicas=2, reception=None, aborts=True, until_ns=None, **options):
    """The merged tables of so many instances of a static batcher."""
    clock, takers, reception = Clock(), [], reception or Reception()
    for _ in range(num_replicas):
        policy = StaticBatching.build(StaticOptions(policy="static", **options), EngineLimits(100, 1, 1000, ("all",)))
        recorder = Recorder()
        engine = Engine(
            clock,
            EngineCore(policy),
            Linear(COST),
            recorder,
            aborts=aborts,
            macro_steps=False,
            shares_clock=True,
            reception=reception,
        )
        takers.append(Taker(engine, policy, recorder))
    assert all(taker.policy.share_queue(takers[0].policy) for taker in takers)
    queue = SharedQueue(clock, takers, reception, aborts=aborts)
    clients = Clients(clock, queue, queue, traffic)
    clients.start()
    clock.run(until_ns)
    clients.stop()
    for taker in takers:
        taker.policy.check_integrity()
        assert until_ns or (taker.policy.free_blocks, taker.policy.num_unfinished) == (1000, 0)
    return merge_tables(*queue.tables())


def requests(*rows, **given):
    """Traffic of (arrival in ms, prompt tokens, output tokens)."""
    arrival_ms, prompt_tokens, output_tokens = np.array(rows).T
    return columns(
        len(rows),
        arrival_ns=(arrival_ms * NS_PER_MS).astype(np.int64),
        prompt_tokens=prompt_tokens.astype(np.int64),
        output_tokens=output_tokens.astype(np.int64),
        **given,
    )


def log(tables):
    """Replica, start and end in ms, decodes, prompt tokens, running, waiting and why the head waits, step by step."""
    iterations = tables.iterations
    names = ("replica", "start_ns", "end_ns", "num_decode", "prefill_tokens", "num_running", "num_waiting")
    rows = zip(*(iterations[name].tolist() for name in names), iterations["blocked_by"].tolist(), strict=True)
    return [(a, b / NS_PER_MS, c / NS_PER_MS, *rest, BlockedBy(why).name) for a, b, c, *rest, why in rows]


def lives(tables, *events):
    """Replica, then times in ms, of each request."""
    times = [[t if t == NEVER else t / NS_PER_MS for t in tables.requests[f"{event}_ns"].tolist()] for event in events]
    return list(zip(tables.requests["replica"].tolist(), *times, strict=True))


FIVE = [(0, 4, 3), (1, 3, 1), (2, 2, 2), (3, 2, 1), (3, 5, 1)]


def test_each_instance_runs_its_own_batch_and_takes_the_next_when_that_is_over():
    # Instance 0 decodes from 4 to 6 while the other one, free at 4, takes the two that waited longest.
    tables = serve(requests(*FIVE), max_batch_size=2, compute="early_exit")
    assert log(tables) == [
        (0, 0, 4, 0, 4, 1, 0, "NOTHING"),
        (1, 1, 4, 0, 3, 1, 0, "NOTHING"),
        (0, 4, 5, 1, 0, 1, 3, "ADMISSION"),
        (0, 5, 6, 1, 0, 1, 1, "ADMISSION"),
        (1, 4, 8, 0, 4, 2, 1, "SLOTS"),
        (1, 8, 9, 1, 0, 2, 0, "NOTHING"),
        (0, 6, 11, 0, 5, 1, 0, "NOTHING"),
    ]
    assert lives(tables, "admitted", "first_token", "finished", "released") == [
        (0, 0, 4, 6, 6),
        (1, 1, 4, 4, 4),
        (1, 4, 8, 9, 9),
        (1, 4, 8, 8, 9),
        (0, 6, 11, 11, 11),
    ]


TRITON = {"max_batch_size": 8, "preferred_batch_size": (4, 8), "max_queue_delay_ms": 0.1}


@pytest.mark.parametrize(
    ("num_replicas", "starts"),
    [(1, [(0, 0, 16), (0, 16, 20)]), (2, [(1, 0.1, 4.1), (0, 0, 16)])],
)
def test_the_fifth_of_five_waits_for_company_only_where_an_instance_idles(num_replicas, starts):
    """Preferred 4 and 8, delay 100 µs: four leave at once, the fifth after the delay, or when an instance is free."""
    tables = serve(requests(*[(0, 4, 1)] * 5), num_replicas=num_replicas, **TRITON)
    assert [row[:3] for row in log(tables)] == starts


def test_a_delay_has_no_effect_while_all_instances_are_busy():
    # Both are busy when the third and the fourth come, so both leave with the first one that is free, at 5.1.
    tables = serve(requests((0, 5, 1), (0.2, 9, 1), (1, 2, 1), (4.9, 2, 1)), **TRITON)
    assert lives(tables, "admitted") == [(0, 0.1), (1, 0.3), (0, 5.1), (0, 5.1)]


@pytest.mark.parametrize("aborts", [True, False])
def test_who_waits_is_dropped_at_once_and_who_is_in_a_batch_stays(aborts):
    # Both instances are busy until 10. The third request's client leaves at 3, the second's at 5.
    cancel_after_ns = np.array([NEVER, 5, 2, NEVER]) * NS_PER_MS
    cancel_after_ns[cancel_after_ns < 0] = NEVER
    traffic = requests((0, 10, 1), (0, 11, 2), (1, 1, 1), (2, 1, 1), cancel_after_ns=cancel_after_ns)
    tables = serve(traffic, aborts=aborts, max_batch_size=1)
    last = 10 if aborts else 11
    assert lives(tables, "admitted", "cancelled", "released") == [
        (0, 0, NEVER, 10),
        (1, 0, 5, 12),
        (NEVER, NEVER, 3, 3) if aborts else (0, 10, 3, 11),
        (0, last, NEVER, last + 1),
    ]
    kept = [Outcome.FINISHED, Outcome.CANCELLED, Outcome.CANCELLED, Outcome.FINISHED]
    assert tables.requests["outcome"].tolist() == kept


def test_doors_and_time_outs_stand_before_the_one_queue():
    # Two run and two may wait, so the fifth is refused; the fourth waits 4 ms for an instance that is free after 10.
    reception = Reception(build_doors([QueueLimitOptions(kind="queue_limit", max_waiting=2)], ("all",)), 4 * NS_PER_MS)
    traffic = requests((0, 3, 9), (0, 3, 12), (3.5, 1, 1), (4, 1, 1), (5, 1, 1), (5, 200, 1))
    tables = serve(traffic, reception=reception, max_batch_size=1)
    assert lives(tables, "admitted", "released") == [
        (0, 0, 11),
        (1, 0, 14),
        (NEVER, NEVER, 7.5),
        (NEVER, NEVER, 8),
        (NEVER, NEVER, NEVER),
        (NEVER, NEVER, NEVER),
    ]
    assert tables.requests["turned_away_by"].tolist() == [NEVER, NEVER, 2, 2, 1, 0]


def test_the_deadlines_of_an_order_end_waits_in_the_one_queue():
    # Both instances are taken for 10 ms and more; the third is late after 4 ms, the fourth, by then, has just come.
    order = EarliestDeadlineOptions(kind="edf", ttft_ms=4.0, drop_late=True)
    traffic = requests((0, 3, 9), (0, 3, 12), (3.5, 1, 1), (8, 1, 1))
    tables = serve(traffic, max_batch_size=1, queue_order=order)
    assert lives(tables, "admitted", "released") == [(0, 0, 11), (1, 0, 14), (NEVER, NEVER, 7.5), (0, 11, 12)]
    assert tables.requests["turned_away_by"].tolist() == [NEVER, NEVER, 1, NEVER]


def test_a_run_that_is_cut_counts_who_waits_and_who_runs():
    tables = serve(requests(*FIVE), until_ns=3_500_000, max_batch_size=2, compute="early_exit")
    assert set(tables.requests["outcome"].tolist()) == {Outcome.UNFINISHED}
    assert tables.requests["replica"].tolist() == [0, 1, NEVER, NEVER, NEVER]


SCENARIO = {
    "name": "instances",
    "seed": 1,
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": {"policy": "static", "max_batch_size": 4, "max_queue_delay_ms": 5.0, "max_model_len": 512},
    "traffic": [
        {
            "name": "chat",
            "arrivals": {"kind": "poisson", "rate_per_s": 40.0},
            "prompt_tokens": {"kind": "uniform", "low": 1, "high": 300},
            "output_tokens": {"kind": "uniform", "low": 1, "high": 40},
        }
    ],
    "run": {"num_requests": 100},
    "fleet": {"replicas": 3, "router": {"kind": "shared_queue"}},
}


def test_figures_of_instances_are_those_of_a_fleet():
    results = run(SCENARIO)
    summary = results.summary()
    assert sum(replica["num_requests"] for replica in summary["replicas"]) == 100
    assert summary["kv"]["num_blocks"] == 3 * results.facts.replicas[0].num_blocks
    assert summary["iterations"]["busy_share"] == pytest.approx(
        np.mean([replica["busy_share"] for replica in summary["replicas"]])
    )
    for replica in results.replicas:
        assert np.array_equal(sum(replica.ttft_causes.parts.values()), replica.ttft_causes.values_ns)
    again = run(results.facts.provenance["scenario"])
    assert same(again.tables, results.tables)


def test_what_if_every_instance_had_more():
    found = next_change(parse_scenario(SCENARIO | {"run": {"num_requests": 40}}))
    assert {change.resource: change.factor for change in found.changes}["slots"] == 5 / 4


def test_explain_says_that_each_instance_has_a_pool_of_its_own():
    verdict = explain(parse_scenario(SCENARIO))["at_once"]["verdict"]
    assert verdict.endswith(", on each of 3 replicas with a KV cache of its own")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": {"policy": "vllm-v1"}}, "shared_queue, which policy: vllm-v1 with queue_order: fcfs does not know"),
        (
            {"engine": {"policy": "static", "queue_order": {"kind": "vtc"}}},
            "shared_queue, which policy: static with queue_order: vtc does not know",
        ),
        (
            {"engine": {"policy": "orca", "admission_control": [{"kind": "predicted_ttft", "ttft_ms": 1.0}]}},
            "engine.admission_control: predicted_ttft knows the pace of one engine",
        ),
        (
            {"fleet": {"router": {"kind": "shared_queue"}, "others": [{"engine": {"max_batch_size": 2}}]}},
            "fleet.others: replicas have different engines or KV pools, but one queue for all of them",
        ),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(ScenarioError) as caught:
        run(SCENARIO | changes)
    assert message in str(caught.value)


def test_nobody_is_asked_where_to_send_a_request():
    routing = SharedQueueRouting.build(SharedQueueRouting.Options(), 2, np.random.default_rng())
    with pytest.raises(InvariantError):
        routing.pick(None, 0, 0, ())
