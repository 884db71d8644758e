"""Laws of every routing policy: requests are conserved, runs repeat, and one replica is no router."""

import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from sim.clients import Clients
from sim.clock import NS_PER_MS, NS_PER_US, Clock
from sim.core import EngineCore
from sim.cost.linear import Linear, LinearOptions
from sim.engine import Engine
from sim.metrics.causes import Causes
from sim.metrics.replicas import merge_tables, split_tables
from sim.metrics.shares import work_shares
from sim.policies.base import POLICIES, EngineLimits
from sim.policies.whole_prompt import WholePromptPolicy
from sim.reception import Reception
from sim.record import Recorder
from sim.request import NEVER, Outcome
from sim.rng import stream
from sim.router import Member, Router
from sim.routing.base import ROUTING
from sim.shared_queue import SharedQueue, Taker
from sim.workload.base import ClientPool
from tests.laws.test_laws import (
    BLOCK_SIZE,
    COST,
    MAX_MODEL_LEN,
    NUM_REQUESTS,
    NUM_SLOTS,
    POOLS,
    TOKEN_BUDGET,
    TRAFFIC,
    VARIANTS,
    cases_whose_policy,
    each_of,
    priced,
    simulate,
)

ENGINES = {
    "vllm-v1": {"max_num_seqs": NUM_SLOTS, "max_num_batched_tokens": TOKEN_BUDGET},
    "orca": {"max_batch_size": NUM_SLOTS},
    "static": {"max_batch_size": NUM_SLOTS},
}
EQUAL_STEPS = LinearOptions(kind="linear", base_ms=1.0)
IN_STEP = {
    "few connections, in step": replace(TRAFFIC["all at 0"], pools=(ClientPool(max_connections=5),)),
    "two classes, in step": replace(
        TRAFFIC["two clients"], pools=(ClientPool(max_connections=3), ClientPool(max_connections=2))
    ),
}
"""With equal steps several replicas answer at the same nanosecond, when somebody waits for a connection."""
every_router = pytest.mark.parametrize("kind", [kind for kind in ROUTING if ROUTING.load(kind).sends])
every_traffic = pytest.mark.parametrize("traffic", TRAFFIC)


@functools.cache
def run_fleet(kind, traffic, num_replicas=3, policy="vllm-v1", macro_steps=True, until_ns=None, cost=COST):
    """The policies and the tables of a fleet of equal replicas in the tight pool."""
    clock, requests, replicas, policies = Clock(), (TRAFFIC | IN_STEP)[traffic], [], []
    limits = EngineLimits(max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, num_gpu_blocks=POOLS["tight"])
    cls = POLICIES.load(policy)
    for _ in range(num_replicas):
        policies.append(cls.build(cls.Options(policy=policy, **ENGINES[policy]), limits))
        recorder = Recorder()
        engine = Engine(
            clock, EngineCore(policies[-1]), Linear(cost), recorder, macro_steps=macro_steps, shares_clock=True
        )
        replicas.append(Member(engine, recorder))
    routing = ROUTING.load(kind)
    options = routing.Options(kind=kind)
    router = Router(
        clock, replicas, routing.build(options, num_replicas, stream(1, "router")), requests.sessions().item
    )
    clients = Clients(clock, router, router, requests)
    clients.start()
    clock.run(until_ns)
    clients.stop()
    own, at_clients = router.tables()
    assert all((r.num_requests, r.num_tokens) == (0, 0) for r in replicas) or until_ns
    return policies, own, merge_tables(own, at_clients)


def same(ours, theirs, names=("iterations", "chunks", "requests", "segments")):
    """Whether all columns that the second one has are equal to the byte."""
    return [
        (name, column)
        for name in names
        for column, values in getattr(theirs, name).items()
        if getattr(ours, name)[column].tobytes() != values.tobytes()
    ] == []


@every_router
@every_traffic
def test_one_replica_is_no_router(kind, traffic):
    _, _, fleet = run_fleet(kind, traffic, num_replicas=1)
    alone = simulate("vllm-v1", ENGINES["vllm-v1"], POOLS["tight"], TRAFFIC[traffic]).tables
    assert same(fleet, alone)
    assert (fleet.iterations["replica"] == 0).all()


@every_router
@every_traffic
def test_requests_are_conserved_and_served_where_they_were_sent(kind, traffic):
    policies, own, fleet = run_fleet(kind, traffic)
    requests = fleet.requests
    alone = simulate("vllm-v1", ENGINES["vllm-v1"], POOLS["tight"], TRAFFIC[traffic]).tables
    if TRAFFIC[traffic].has_next_turn is None:
        assert requests["request"].tolist() == alone.requests["request"].tolist()
    assert len(np.unique(requests["request"])) == len(requests["request"])
    assert Outcome.UNFINISHED not in requests["outcome"]
    assert (requests["replica"] != NEVER).tolist() == (requests["queued_ns"] != NEVER).tolist()
    sent = {i: len(tables.requests["request"]) for i, tables in enumerate(own)}
    assert Counter(requests["replica"][requests["replica"] != NEVER].tolist()) == Counter(sent)
    for policy in policies:
        policy.check_integrity()
        assert (policy.free_blocks, policy.num_unfinished) == (policy.usable_blocks, 0)


@every_router
def test_a_fleet_that_is_cut_counts_who_was_in_it(kind):
    until_ns = int(TRAFFIC["few connections"].arrival_ns[30])
    policies, _, fleet = run_fleet(kind, "few connections", until_ns=until_ns)
    assert fleet.requests["request"].tolist() == list(range(31))
    unfinished = int((fleet.requests["outcome"] == Outcome.UNFINISHED).sum())
    assert unfinished >= sum(policy.num_unfinished for policy in policies) > 0


@every_router
@every_traffic
def test_the_same_seed_gives_the_same_bytes_with_and_without_macro_steps(kind, traffic):
    _, _, fleet = run_fleet(kind, traffic)
    for macro_steps in (True, False):
        assert same(run_fleet.__wrapped__(kind, traffic, macro_steps=macro_steps)[2], fleet)


@every_router
@pytest.mark.parametrize("traffic", IN_STEP)
@pytest.mark.parametrize("policy", ["vllm-v1", "orca"])
def test_so_they_are_where_replicas_answer_at_the_same_time(kind, traffic, policy):
    at_once, one_by_one = (
        run_fleet.__wrapped__(kind, traffic, policy=policy, macro_steps=macro_steps, cost=EQUAL_STEPS)[2]
        for macro_steps in (True, False)
    )
    assert same(at_once, one_by_one)


@every_traffic
@pytest.mark.parametrize("policy", ENGINES)
def test_the_tables_of_a_fleet_are_those_of_its_replicas(policy, traffic):
    _, own, fleet = run_fleet("least_requests", traffic, policy=policy)
    assert (np.diff(fleet.iterations["end_ns"]) >= 0).all()
    assert (np.diff(fleet.chunks["iteration"]) >= 0).all()
    for index, tables in enumerate(own):
        assert same(split_tables(fleet, index), tables)


@every_router
def test_a_conversation_stays_together_where_it_should(kind):
    traffic = TRAFFIC["conversations"]
    session = traffic.sessions()
    requests = run_fleet(kind, "conversations")[2].requests
    homes = {(session[r], k) for r, k in zip(requests["request"], requests["replica"], strict=True) if k != NEVER}
    num_sessions = len({s for s, _ in homes})
    assert (len(homes) == num_sessions) == (kind in ("session_sticky", "prefix_affinity"))


every_instance = each_of(
    cases_whose_policy(lambda policy: isinstance(policy, WholePromptPolicy) and not policy.queue.keeps_accounts)
)


@functools.cache
def run_instances(case, traffic, num_replicas=2, until_ns=None):
    """The policies and the tables of equal replicas that take from one queue, each with a tight pool."""
    clock, requests, takers, reception = Clock(), TRAFFIC[traffic], [], Reception()
    cls, options = POLICIES.load(case[0]), VARIANTS[case[0]][case[1]]
    limits = EngineLimits(MAX_MODEL_LEN, BLOCK_SIZE, POOLS["tight"], requests.class_names)
    for _ in range(num_replicas):
        policy = cls.build(cls.Options(policy=case[0], **options), limits)
        model, recorder = priced(policy)
        engine = Engine(
            clock,
            EngineCore(policy),
            model,
            recorder,
            macro_steps=False,
            shares_clock=True,
            reception=reception,
        )
        takers.append(Taker(engine, policy, recorder))
        assert policy.share_queue(takers[0].policy)
    queue = SharedQueue(clock, takers, reception)
    clients = Clients(clock, queue, queue, requests)
    clients.start()
    clock.run(until_ns)
    clients.stop()
    own, at_door = queue.tables()
    return [taker.policy for taker in takers], own, merge_tables(own, at_door)


NOBODY_LEAVES = ["poisson", "all at 0", "closed loop", "stops early", "some never fit"]


@every_instance
@pytest.mark.parametrize("traffic", NOBODY_LEAVES)
def test_one_instance_is_an_engine(case, traffic):
    _, own, _ = run_instances(case, traffic, num_replicas=1)
    alone = simulate(case[0], VARIANTS[case[0]][case[1]], POOLS["tight"], TRAFFIC[traffic]).tables
    assert same(own[0], alone, ("iterations", "chunks", "segments"))


@every_instance
@every_traffic
def test_requests_are_conserved_by_instances(case, traffic):
    policies, own, fleet = run_instances(case, traffic)
    requests = fleet.requests
    alone = simulate(case[0], VARIANTS[case[0]][case[1]], POOLS["tight"], TRAFFIC[traffic]).tables
    if TRAFFIC[traffic].has_next_turn is None:
        assert requests["request"].tolist() == alone.requests["request"].tolist()
    assert len(np.unique(requests["request"])) == len(requests["request"])
    assert Outcome.UNFINISHED not in requests["outcome"]
    assert (requests["replica"][requests["admitted_ns"] != NEVER] != NEVER).all()
    finished = requests["outcome"] == Outcome.FINISHED
    if traffic in NOBODY_LEAVES:
        done = np.zeros(len(requests["request"]), dtype=np.int64)
        np.add.at(done, np.searchsorted(requests["request"], fleet.segments["request"]), fleet.segments["num_ticks"])
        done += np.isin(requests["request"], fleet.segments["request"])
        assert np.array_equal(done[finished], requests["output_tokens"][finished])
    for policy in policies:
        policy.check_integrity()
        assert (policy.free_blocks, policy.num_unfinished) == (policy.usable_blocks, 0)
    for index, tables in enumerate(own):
        iterations = tables.iterations
        if policies[index].num_stages == 1:
            assert (iterations["start_ns"][1:] >= iterations["end_ns"][:-1]).all()
        assert same(split_tables(fleet, index), tables)


@every_instance
@every_traffic
def test_instances_repeat_to_the_byte(case, traffic):
    assert same(run_instances.__wrapped__(case, traffic)[2], run_instances(case, traffic)[2])


@every_instance
@every_traffic
def test_causes_of_instances_add_up_to_the_latency(case, traffic):
    policies, own, _ = run_instances(case, traffic)
    for policy, tables in zip(policies, own, strict=True):
        requests = tables.requests
        rows = np.flatnonzero(requests["first_token_ns" if policy.streams_answers else "released_ns"] != NEVER)
        if not policy.streams_answers:
            rows = rows[requests["finished_ns"][rows] != NEVER]
        ttft_ns = requests["first_token_ns" if policy.streams_answers else "released_ns"] - requests["arrival_ns"]
        parts = Causes(tables, work_shares(tables, priced(policy)[0])).ttft(rows, policy.streams_answers)
        assert np.array_equal(sum(parts.values(), np.zeros(len(rows), dtype=np.int64)), ttft_ns[rows])
        assert all((part >= 0).all() for part in parts.values())


@every_instance
@pytest.mark.parametrize("traffic", ["poisson", "all at 0", "closed loop"])
def test_nobody_waits_while_an_instance_idles(case, traffic):
    """Unless the batcher waits for company: then no longer than its delay."""
    policies, own, fleet = run_instances(case, traffic)
    delay_ns = round(VARIANTS[case[0]][case[1]].get("max_queue_delay_ms", 0.0) * NS_PER_MS)
    queued_ns, admitted_ns = fleet.requests["queued_ns"], fleet.requests["admitted_ns"]
    for policy, tables in zip(policies, own, strict=True):
        start_ns, end_ns = tables.iterations["start_ns"], tables.iterations["end_ns"]
        idle_ns = np.append(start_ns, fleet.iterations["end_ns"].max())
        idle_from_ns = np.maximum.accumulate(np.append(0, end_ns))
        for since_ns, until_ns in zip(idle_from_ns, idle_ns, strict=True):
            together_ns = np.minimum(admitted_ns, until_ns) - np.maximum(queued_ns, since_ns)
            assert together_ns.max() <= delay_ns + round(COST.host_us * NS_PER_US), policy


@every_instance
def test_instances_that_are_cut_count_who_waits_and_who_runs(case):
    policies, _, fleet = run_instances(case, "all at 0", until_ns=20 * NS_PER_MS)
    assert fleet.requests["request"].tolist() == list(range(NUM_REQUESTS))
    unfinished = int((fleet.requests["outcome"] == Outcome.UNFINISHED).sum())
    running = sum(policy.num_unfinished - policy.num_waiting for policy in policies)
    assert policies[0].num_waiting > 0
    assert running > 0
    assert unfinished == running + policies[0].num_waiting
