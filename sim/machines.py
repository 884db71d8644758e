"""The engines of a run, and what stands between them and the clients: nothing, a router, or one queue for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from sim.clients import Server
from sim.clock import Clock, to_ns
from sim.core import EngineCore
from sim.cost.base import CostModel
from sim.cost.in_passes import InPasses
from sim.cost.swapping import Swapping
from sim.device import Device
from sim.doors.base import build_doors
from sim.engine import Engine
from sim.errors import ScenarioError
from sim.pass_record import PassRecorder
from sim.policies.base import POLICIES, Policy, StepPredictor
from sim.reception import Reception, reason_names
from sim.record import Recorder
from sim.replica import Replica, price_model
from sim.rng import stream
from sim.router import Member, Router
from sim.routing.base import ROUTING, RoutingPolicy
from sim.routing.fleet import FleetOptions
from sim.scenario import Scenario
from sim.shared_queue import SharedQueue, Taker
from sim.workload.base import Traffic


class Machine(NamedTuple):
    """One engine of a run and what it is made of."""

    parts: Replica
    policy: Policy
    cost: CostModel
    recorder: Recorder
    reception: Reception
    engine: Engine


def make_machines(
    clock: Clock,
    parts: Sequence[Replica],
    cost_for_all: CostModel | None,
    device: Device | None,
    *,
    one_queue: bool,
) -> list[Machine]:
    """Engines; those of one kind share their cost model, which has no state, those with one queue what is before it."""
    kinds = {id(own): own for own in parts}
    costs = {key: cost_for_all or price_model(own) for key, own in kinds.items()}
    machines: list[Machine] = []
    for own in parts:
        cost, recorder = costs[id(own)], Recorder()
        policy = _policy(own, cost)
        if policy.runs_in_passes:
            cost, recorder = InPasses(cost), PassRecorder()
        if policy.may_swap:
            cost = Swapping(cost, own.limits.block_bytes, own.target.gpu)
        aborts = own.scenario.engine.abort_on_disconnect
        reception = machines[0].reception if one_queue and machines else _reception(own)
        engine = Engine(
            clock,
            EngineCore(policy),
            cost,
            recorder,
            aborts=aborts,
            macro_steps=device is None and not one_queue,
            shares_clock=len(parts) > 1,
            reception=reception,
            device=device,
        )
        machines.append(Machine(own, policy, cost, recorder, reception, engine))
    return machines


def routing_of(scenario: Scenario) -> type[RoutingPolicy] | None:
    """How requests reach the replicas of a fleet; None without one."""
    if scenario.fleet is None:
        return None
    return ROUTING.load(scenario.fleet.router.kind, place="fleet.router.kind", allow_imports=scenario.allows_imports)


def server_of(
    scenario: Scenario,
    routing: type[RoutingPolicy] | None,
    traffic: Traffic,
    clock: Clock,
    machines: Sequence[Machine],
) -> tuple[Server, Recorder | Router | SharedQueue]:
    """Whom clients send requests to, and where the ends that it does not see are written down."""
    if routing is None or scenario.fleet is None:
        return machines[0].engine, machines[0].recorder
    if not routing.sends:
        queue = _shared_queue(scenario, clock, machines)
        return queue, queue
    router = _router(scenario, scenario.fleet, routing, traffic, clock, machines)
    return router, router


def _shared_queue(scenario: Scenario, clock: Clock, machines: Sequence[Machine]) -> SharedQueue:
    """Raises ScenarioError for replicas that differ, and for engines or doors that one queue for all cannot have."""
    first, engine = machines[0], machines[0].parts.scenario.engine
    _check_equal(scenario, machines)
    if any(door.kind == "predicted_ttft" for door in engine.admission_control):
        raise ScenarioError(
            f"{scenario.place}: engine.admission_control",
            "predicted_ttft knows the pace of one engine, not of several that take from one queue",
            remedy="Use queue_limit, or another router.",
        )
    if not all(machine.policy.share_queue(first.policy) for machine in machines):
        order = getattr(engine, "queue_order", None)
        raise ScenarioError(
            f"{scenario.place}: fleet.router.kind",
            "shared_queue, which policy: "
            + engine.policy
            + (f" with queue_order: {order.kind}" if order is not None else "")
            + " does not know",
            valid="policy: static or orca with fcfs, priority, priority_aging, sjf, srpt, edf or triton",
            remedy="Choose another router, policy or queue_order.",
        )
    takers = [Taker(machine.engine, machine.policy, machine.recorder) for machine in machines]
    return SharedQueue(clock, takers, first.reception, aborts=engine.abort_on_disconnect)


def _check_equal(scenario: Scenario, machines: Sequence[Machine]) -> None:
    """Raise ScenarioError where one queue would have to know who can run what."""
    first = machines[0].parts
    if any((own.parts.scenario.engine, own.parts.limits) != (first.scenario.engine, first.limits) for own in machines):
        raise ScenarioError(
            f"{scenario.place}: fleet.others",
            "replicas have different engines or KV pools, but one queue for all of them",
            remedy="Leave out others, or choose another router.",
        )


def _router(
    scenario: Scenario,
    fleet: FleetOptions,
    routing: type[RoutingPolicy],
    traffic: Traffic,
    clock: Clock,
    machines: Sequence[Machine],
) -> Router:
    """Raises ScenarioError for replicas whose answers reach clients in different ways, or whose doors differ."""
    if len({machine.policy.streams_answers for machine in machines}) > 1:
        raise ScenarioError(
            f"{scenario.place}: fleet.others",
            "some replicas stream their answers and others do not, so that TTFT would mean two things",
            remedy="Set release: streaming for those with policy: static.",
        )
    if len({turn_away_reasons(machine.parts) for machine in machines}) > 1:
        raise ScenarioError(
            f"{scenario.place}: fleet.others",
            "replicas have different doors, so that reasons to turn requests away would mean different things",
            remedy="Give every engine the same kinds of doors in admission_control, in the same order.",
        )
    members = [Member(machine.engine, machine.recorder) for machine in machines]
    policy = routing.build(fleet.router, len(members), stream(scenario.seed, "router"))
    return Router(clock, members, policy, traffic.sessions().item)


def _policy(parts: Replica, cost: CostModel) -> Policy:
    scenario = parts.scenario
    cls = POLICIES.load(scenario.engine.policy, place="engine.policy", allow_imports=scenario.allows_imports)
    limits = replace(parts.limits, predictor=StepPredictor(cost.price, cost.host_ns))
    policy = cls.build(scenario.engine, limits)
    if scenario.engine.queue_timeout_s is not None and policy.deadlines is not None:
        raise ScenarioError(
            "engine.queue_order.drop_late",
            "contradicts queue_timeout_s: a wait in the queue would have two ends",
            valid="drop_late, which ends it at the deadline, or queue_timeout_s, which ends it so long after its begin",
            remedy="Leave one of them out.",
        )
    return policy


def turn_away_reasons(parts: Replica) -> tuple[str, ...]:
    """Names of the reasons why an engine turns somebody away, by their number."""
    return reason_names([door.kind for door in parts.scenario.engine.admission_control])


def _reception(parts: Replica) -> Reception:
    engine = parts.scenario.engine
    doors = build_doors(engine.admission_control, parts.limits.class_names)
    return Reception(doors, None if engine.queue_timeout_s is None else to_ns(engine.queue_timeout_s))
