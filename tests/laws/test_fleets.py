"""Laws of every routing policy: requests are conserved, runs repeat, and one replica is no router."""

import functools
from collections import Counter

import numpy as np
import pytest

from sim.clients import Clients
from sim.clock import Clock
from sim.core import EngineCore
from sim.cost.linear import Linear
from sim.engine import Engine
from sim.metrics.replicas import merge_tables, split_tables
from sim.policies.base import POLICIES, EngineLimits
from sim.record import Recorder
from sim.request import NEVER, Outcome
from sim.rng import stream
from sim.router import Member, Router
from sim.routing.base import ROUTING
from tests.laws.test_laws import (
    BLOCK_SIZE,
    COST,
    MAX_MODEL_LEN,
    NUM_SLOTS,
    POOLS,
    TOKEN_BUDGET,
    TRAFFIC,
    simulate,
)

ENGINES = {
    "vllm-v1": {"max_num_seqs": NUM_SLOTS, "max_num_batched_tokens": TOKEN_BUDGET},
    "orca": {"max_batch_size": NUM_SLOTS},
    "static": {"max_batch_size": NUM_SLOTS},
}
every_router = pytest.mark.parametrize("kind", [kind for kind in ROUTING if ROUTING.load(kind).sends])
every_traffic = pytest.mark.parametrize("traffic", TRAFFIC)


@functools.cache
def run_fleet(kind, traffic, num_replicas=3, policy="vllm-v1", macro_steps=True, until_ns=None):
    """The policies and the tables of a fleet of equal replicas in the tight pool."""
    clock, requests, replicas, policies = Clock(), TRAFFIC[traffic], [], []
    limits = EngineLimits(max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, num_gpu_blocks=POOLS["tight"])
    cls = POLICIES.load(policy)
    for _ in range(num_replicas):
        policies.append(cls.build(cls.Options(policy=policy, **ENGINES[policy]), limits))
        recorder = Recorder()
        engine = Engine(
            clock, EngineCore(policies[-1]), Linear(COST), recorder, macro_steps=macro_steps, shares_clock=True
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
