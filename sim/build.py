"""From a scenario to a run: the only file that knows every family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.clients import Clients, Server
from sim.clock import Clock, to_ns
from sim.core import EngineCore
from sim.cost.base import COST_MODELS, CostModel, Target
from sim.cost.host import HOST_TIMES
from sim.cost.hosted import Hosted
from sim.cost.in_passes import InPasses
from sim.cost.sped_up import SpedUp
from sim.cost.swapping import Swapping
from sim.device import Device
from sim.doors.base import build_doors
from sim.engine import Engine
from sim.errors import ArtifactError, InvariantError, ScenarioError
from sim.gpu import load_gpu
from sim.kv.memory import KVMemory, derive_kv_memory, kv_dtype_bytes
from sim.metrics.coverage import coverage_shares, first_beyond
from sim.metrics.facts import ReplicaFacts, RunFacts
from sim.metrics.load import step_arrays
from sim.metrics.replicas import merge_prices, merge_tables
from sim.metrics.shares import work_shares
from sim.model import load_model
from sim.pass_record import PassRecorder
from sim.policies.base import POLICIES, EngineLimits, Policy, StepPredictor
from sim.provenance import provenance
from sim.reception import Reception, reason_names
from sim.record import Recorder, Tables
from sim.request import Request
from sim.results import Results
from sim.rng import stream
from sim.router import Member, Router
from sim.routing.base import ROUTING, RoutingPolicy
from sim.routing.fleet import FleetOptions
from sim.scenario import Scenario, is_model_path, load_scenario, parse_scenario
from sim.shared_queue import SharedQueue, Taker
from sim.step import StepArrays
from sim.workload.base import Traffic
from sim.workload.draw import draw_traffic
from sim.workload.files import resolve_path


@dataclass(frozen=True)
class Replica:
    """What one engine runs, on what, and within which limits."""

    scenario: Scenario
    """Whose `engine` and `cost` it has."""
    target: Target
    memory: KVMemory
    limits: EngineLimits
    device_speed: float = 1.0
    """How many times as fast as the cost model says the device works: for what-ifs."""
    host_speed: float = 1.0
    """The same of the host."""


def run(scenario: Scenario | Mapping[str, Any] | Path | str) -> Results:
    """Simulate a scenario: an object, the path of a file, or nested dicts as YAML would give them.

    Raises ScenarioError, TraceError or ArtifactError for what is wrong with it.
    """
    if isinstance(scenario, Mapping):
        scenario = parse_scenario(scenario)
    elif not isinstance(scenario, Scenario):
        scenario = load_scenario(scenario)
    return simulate(scenario, draw(scenario))


def replica(scenario: Scenario) -> Replica:
    """Load model and GPU and derive the KV pool. Raises ScenarioError or ArtifactError."""
    engine, tensor_parallel = scenario.engine, scenario.hardware.tensor_parallel
    with _at(scenario.place):
        model = load_model(model_name(scenario))
        gpu = load_gpu(scenario.hardware.gpu)
        num_tokens, num_rows = engine.largest_pass(engine.max_model_len or model.max_position_embeddings)
        memory = derive_kv_memory(
            model, gpu, tensor_parallel, engine, max_num_batched_tokens=num_tokens, max_num_seqs=num_rows
        )
    target = Target(model, gpu, tensor_parallel, kv_dtype_bytes(model, engine.kv_cache_dtype))
    class_names = tuple(entry.name for entry in scenario.traffic)
    limits = EngineLimits(
        memory.max_model_len, engine.block_size, memory.num_gpu_blocks, class_names, memory.block_bytes
    )
    return Replica(scenario, target, memory, limits)


def replicas(scenario: Scenario) -> list[Replica]:
    """Every engine of a scenario's fleet, those that are alike being the same object; one without a fleet.

    Raises what `replica` raises.
    """
    return [parts for group, number in scenario.replica_groups() for parts in [replica(group)] * number]


def draw(scenario: Scenario) -> Traffic:
    """All requests of a scenario. The same for every variant that does not change its traffic."""
    duration_s = scenario.run.duration_s
    with _at(scenario.place):
        return draw_traffic(
            scenario.traffic,
            arrivals=scenario.arrivals,
            num_requests=scenario.run.num_requests,
            duration_ns=None if duration_s is None else to_ns(duration_s),
            seed=scenario.seed,
            folder=scenario.folder,
            scale=scenario.scale,
        )


def cost_model(scenario: Scenario) -> CostModel:
    """What a scenario's iterations cost (its own engine's, in a fleet). Raises ScenarioError or ArtifactError."""
    parts = replica(scenario)
    with _at(scenario.place):
        return price_model(parts)


def simulate(
    scenario: Scenario,
    traffic: Traffic,
    parts: Sequence[Replica] | None = None,
    *,
    cost: CostModel | None = None,
    clock: Clock | None = None,
    device: Device | None = None,
) -> Results:
    """Run `traffic` through the engine or the fleet of a scenario; `parts` are its engines, if not its `replicas`.

    Iterations are priced by `cost` in place of each engine's own where one is given. `clock` and `device` stand in
    for simulated time and for steps that take what they are said to cost: with a clock that follows the time of day
    and a device that computes, the same engine serves the same requests for real. A device serves one engine only.
    """
    parts, clock = parts or replicas(scenario), clock or Clock()
    if device is not None and len(parts) > 1:
        raise InvariantError(f"one device was given to {len(parts)} engines")
    with _at(scenario.place):
        routing = _routing(scenario)
        one_queue = routing is not None and not routing.sends
        machines = _machines(clock, parts, cost, device, one_queue=one_queue)
        for kind in {id(machine.parts): machine for machine in machines}.values():
            _check_requests(scenario, kind.policy, traffic)
    server, ledger = _server(scenario, routing, traffic, clock, machines)
    clients = Clients(clock, server, ledger, traffic)
    clients.start()
    stop_ns = None if scenario.run.drain or scenario.run.duration_s is None else to_ns(scenario.run.duration_s)
    with _at(scenario.place):
        clock.run(until_ns=stop_ns)
    clients.stop()
    if stop_ns is None:
        with _at(scenario.place):
            _check_drained(machines)
    tables = ledger.tables() if isinstance(ledger, Recorder) else merge_tables(*ledger.tables())
    if traffic.call is not None:
        tables = replace(tables, requests=tables.requests | {"call": traffic.call[tables.requests["request"]]})
    with _at(scenario.place):
        return _results(scenario, traffic, machines, tables, stop_ns)


class _Machine(NamedTuple):
    """One engine of a run and what it is made of."""

    parts: Replica
    policy: Policy
    cost: CostModel
    recorder: Recorder
    reception: Reception
    engine: Engine


def _machines(
    clock: Clock,
    parts: Sequence[Replica],
    cost_for_all: CostModel | None,
    device: Device | None,
    *,
    one_queue: bool,
) -> list[_Machine]:
    """Engines; those of one kind share their cost model, which has no state, those with one queue what is before it."""
    kinds = {id(own): own for own in parts}
    costs = {key: cost_for_all or price_model(own) for key, own in kinds.items()}
    machines: list[_Machine] = []
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
        machines.append(_Machine(own, policy, cost, recorder, reception, engine))
    return machines


def _routing(scenario: Scenario) -> type[RoutingPolicy] | None:
    """How requests reach the replicas of a fleet; None without one."""
    if scenario.fleet is None:
        return None
    return ROUTING.load(scenario.fleet.router.kind, place="fleet.router.kind", allow_imports=scenario.allows_imports)


def _server(
    scenario: Scenario,
    routing: type[RoutingPolicy] | None,
    traffic: Traffic,
    clock: Clock,
    machines: Sequence[_Machine],
) -> tuple[Server, Recorder | Router | SharedQueue]:
    """Whom clients send requests to, and where the ends that it does not see are written down."""
    if routing is None or scenario.fleet is None:
        return machines[0].engine, machines[0].recorder
    if not routing.sends:
        queue = _shared_queue(scenario, clock, machines)
        return queue, queue
    router = _router(scenario, scenario.fleet, routing, traffic, clock, machines)
    return router, router


def _shared_queue(scenario: Scenario, clock: Clock, machines: Sequence[_Machine]) -> SharedQueue:
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


def _check_equal(scenario: Scenario, machines: Sequence[_Machine]) -> None:
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
    machines: Sequence[_Machine],
) -> Router:
    """Raises ScenarioError for replicas whose answers reach clients in different ways, or whose doors differ."""
    if len({machine.policy.streams_answers for machine in machines}) > 1:
        raise ScenarioError(
            f"{scenario.place}: fleet.others",
            "some replicas stream their answers and others do not, so that TTFT would mean two things",
            remedy="Set release: streaming for those with policy: static.",
        )
    if len({_turn_away_reasons(machine.parts) for machine in machines}) > 1:
        raise ScenarioError(
            f"{scenario.place}: fleet.others",
            "replicas have different doors, so that reasons to turn requests away would mean different things",
            remedy="Give every engine the same kinds of doors in admission_control, in the same order.",
        )
    members = [Member(machine.engine, machine.recorder) for machine in machines]
    policy = routing.build(fleet.router, len(members), stream(scenario.seed, "router"))
    return Router(clock, members, policy, traffic.sessions().item)


def _results(
    scenario: Scenario, traffic: Traffic, machines: Sequence[_Machine], tables: Tables, stop_ns: int | None
) -> Results:
    """The tables priced and put together with the facts."""
    own_tables = [machine.recorder.tables() for machine in machines]
    steps = [step_arrays(own) for own in own_tables]
    breakdowns = [machine.cost.breakdown(own) for machine, own in zip(machines, steps, strict=True)]
    shares = [work_shares(own, machine.cost) for machine, own in zip(machines, own_tables, strict=True)]
    first, limits = machines[0], [machine.parts.limits for machine in machines]
    kinds = {id(machine.parts): machine.parts for machine in machines}
    facts = RunFacts(
        class_names=traffic.class_names,
        num_blocks=sum(own.num_gpu_blocks for own in limits),
        usable_blocks=sum(machine.policy.usable_blocks for machine in machines),
        block_size=limits[0].block_size,
        replicas=() if scenario.fleet is None else tuple(_replica_facts(machines)),
        slo=scenario.slo,
        class_slos={entry.name: entry.slo for entry in scenario.traffic if entry.slo},
        warmup_s=scenario.run.warmup_s,
        cut_drain=scenario.run.cut_drain,
        stopped_ns=stop_ns,
        is_streaming=first.policy.streams_answers,
        turn_away_reasons=_turn_away_reasons(first.parts),
        is_closed_loop=all(pool.num_clients is not None for pool in traffic.pools),
        cost=_measurements(machines, steps, own_tables),
        provenance=provenance(scenario, [parts.limits for parts in kinds.values()]),
    )
    if scenario.fleet is None:
        return Results(tables, facts, breakdowns[0], shares[0])
    return Results(tables, facts, *merge_prices(tables, breakdowns, shares))


def _replica_facts(machines: Sequence[_Machine]) -> Iterator[ReplicaFacts]:
    for index, machine in enumerate(machines):
        target, limits = machine.parts.target, machine.parts.limits
        name = f"{index}: {target.tensor_parallel} × {target.gpu.name}, {machine.parts.scenario.engine.policy}"
        yield ReplicaFacts(name, limits.num_gpu_blocks, machine.policy.usable_blocks, limits.block_size)


def _measurements(
    machines: Sequence[_Machine], steps: Sequence[StepArrays], tables: Sequence[Tables]
) -> dict[str, Any]:
    """What the prices of a run rest on; empty where no cost model has measurements.

    In a fleet these are those of the first replica that has any, with the shares of all that have. Raises ArtifactError
    for iterations beyond them where the scenario does not allow that.
    """
    known = []
    for machine, own_steps, own_tables in zip(machines, steps, tables, strict=True):
        levels = machine.cost.coverage(own_steps)
        if levels is not None:
            _check_range(machine.parts.scenario, own_steps, own_tables, levels)
            known.append((machine, own_tables, levels))
    if not known:
        return {}
    first = known[0][0]
    times = {name: np.concatenate([own.iterations[name] for _, own, _ in known]) for name in ("start_ns", "end_ns")}
    coverage = coverage_shares(np.concatenate([levels for *_, levels in known]), times)
    return first.cost.facts() | {"out_of_range": _out_of_range(first.parts.scenario), "coverage": coverage}


def _out_of_range(scenario: Scenario) -> str:
    return str(getattr(scenario.cost, "out_of_range", "warn"))


def _check_range(scenario: Scenario, steps: StepArrays, tables: Tables, levels: NDArray[np.int8]) -> None:
    first = first_beyond(levels)
    if _out_of_range(scenario) == "error" and first is not None:
        rows = int(steps.num_decode[first] + tables.iterations["prefill_tokens"][first])
        raise ArtifactError(
            "cost.out_of_range",
            f"iteration {first} ({rows} tokens, {int(steps.num_decode[first])} of them decodes, longest context "
            f"{int(steps.decode_context_max[first])}) lies beyond what was measured",
            remedy="Keep batches and contexts smaller, or set cost.out_of_range: warn.",
        )


def _check_drained(machines: Sequence[_Machine]) -> None:
    """Raise ScenarioError for an engine that can run none of those who are left in it, as the real one would hang."""
    for machine in machines:
        policy = machine.policy
        if not policy.num_unfinished:
            continue
        head = next(iter(policy.waiting()), None)
        who = (
            ""
            if head is None
            else f"; request {head.index} is first in its queue, {head.num_tokens} tokens long by now"
        )
        raise ScenarioError(
            "engine",
            f"{policy.num_unfinished} requests are left in it that it can never run again{who}",
            valid="who was preempted comes back only if its prompt and answer so far fit into a step's tokens, unless "
            "they may be split, and into the pool without its watermark",
            remedy="Raise the token budget or num_gpu_blocks, lower watermark, or choose another rule for preemption.",
        )


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


def _turn_away_reasons(parts: Replica) -> tuple[str, ...]:
    return reason_names([door.kind for door in parts.scenario.engine.admission_control])


def _reception(parts: Replica) -> Reception:
    engine = parts.scenario.engine
    doors = build_doors(engine.admission_control, parts.limits.class_names)
    return Reception(doors, None if engine.queue_timeout_s is None else to_ns(engine.queue_timeout_s))


def price_model(parts: Replica) -> CostModel:
    """What prices the iterations of a replica. Raises ScenarioError or ArtifactError at a key of its scenario."""
    scenario = parts.scenario
    cost = COST_MODELS.load(scenario.cost.kind, place="cost.kind", allow_imports=scenario.allows_imports)
    options, artifact = scenario.cost, getattr(scenario.cost, "artifact", None)
    if isinstance(artifact, str):
        path = resolve_path(artifact, scenario.folder, place="cost.artifact")
        options = options.model_copy(update={"artifact": str(path)})
    built = cost.build(options, parts.target)
    if options.host is not None:
        host = HOST_TIMES.load(options.host.kind, place="cost.host.kind", allow_imports=scenario.allows_imports)
        built = Hosted(built, host.build(options.host))
    if parts.device_speed == parts.host_speed == 1.0:
        return built
    return SpedUp(built, parts.device_speed, parts.host_speed)


def model_name(scenario: Scenario) -> str:
    """The model of a scenario as `load_model` takes it: a bundled name, or a path found from the scenario's folder."""
    name = scenario.model
    return str(resolve_path(name, scenario.folder, place="model")) if is_model_path(name) else name


def _check_requests(scenario: Scenario, policy: Policy, traffic: Traffic) -> None:
    """Raise ScenarioError for requests that can never fit, unless the scenario lets the engine reject them."""
    if scenario.run.oversized == "reject":
        return
    most = (int(column.max()) for column in (traffic.prompt_tokens, traffic.output_tokens, traffic.max_tokens))
    prompt_tokens, output_tokens, max_tokens = most
    if policy.never_fits(Request(0, prompt_tokens, output_tokens, max_tokens=max_tokens)) is None:
        return  # no request is larger than this one, so all fit
    misfits = [row for row in range(len(traffic)) if policy.never_fits(traffic.request(row)) is not None]
    if not misfits:
        return
    largest = max(misfits, key=lambda row: int(traffic.prompt_tokens[row] + traffic.max_tokens[row]))
    request = traffic.request(largest)
    raise ScenarioError(
        "traffic",
        f"{len(misfits):,} of {len(traffic):,} requests can never run; the largest is request {largest} of class "
        f"{traffic.class_names[request.class_index]!r} ({request.prompt_tokens} prompt tokens, max_tokens "
        f"{request.max_tokens}): {policy.never_fits(request)}",
        remedy="Raise the limit, make the requests shorter, or set run.oversized: reject.",
    )


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Put the scenario's file in front of the key in errors that know only the key."""
    try:
        yield
    except (ScenarioError, ArtifactError) as error:
        raise type(error)(
            f"{place}: {error.place}" if error.place else place, error.found, valid=error.valid, remedy=error.remedy
        ) from error
