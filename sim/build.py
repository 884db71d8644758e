"""From a scenario to a run and its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.clients import Clients
from sim.clock import Clock, to_ns
from sim.cost.base import CostModel
from sim.device import Device
from sim.errors import ArtifactError, InvariantError, ScenarioError, at_place
from sim.machines import Machine, make_machines, routing_of, server_of, turn_away_reasons
from sim.metrics.coverage import coverage_shares, first_beyond
from sim.metrics.facts import ReplicaFacts, RunFacts
from sim.metrics.load import step_arrays
from sim.metrics.replicas import merge_prices, merge_tables
from sim.metrics.shares import work_shares
from sim.policies.base import Policy
from sim.provenance import provenance
from sim.record import Recorder, Tables
from sim.replica import Replica, replicas
from sim.request import Request
from sim.results import Results
from sim.scenario import Scenario, load_scenario, parse_scenario
from sim.step import StepArrays
from sim.workload.base import Traffic
from sim.workload.draw import draw_traffic


def run(scenario: Scenario | Mapping[str, Any] | Path | str) -> Results:
    """Simulate a scenario: an object, the path of a file, or nested dicts as YAML would give them.

    Raises ScenarioError, TraceError or ArtifactError for what is wrong with it.
    """
    if isinstance(scenario, Mapping):
        scenario = parse_scenario(scenario)
    elif not isinstance(scenario, Scenario):
        scenario = load_scenario(scenario)
    return simulate(scenario, draw(scenario))


def draw(scenario: Scenario) -> Traffic:
    """All requests of a scenario. The same for every variant that does not change its traffic."""
    duration_s = scenario.run.duration_s
    with at_place(scenario.place):
        return draw_traffic(
            scenario.traffic,
            arrivals=scenario.arrivals,
            num_requests=scenario.run.num_requests,
            duration_ns=None if duration_s is None else to_ns(duration_s),
            seed=scenario.seed,
            folder=scenario.folder,
            scale=scenario.scale,
        )


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
    with at_place(scenario.place):
        routing = routing_of(scenario)
        one_queue = routing is not None and not routing.sends
        machines = make_machines(clock, parts, cost, device, one_queue=one_queue)
        for kind in {id(machine.parts): machine for machine in machines}.values():
            _check_requests(scenario, kind.policy, traffic)
    server, ledger = server_of(scenario, routing, traffic, clock, machines)
    clients = Clients(clock, server, ledger, traffic)
    clients.start()
    stop_ns = None if scenario.run.drain or scenario.run.duration_s is None else to_ns(scenario.run.duration_s)
    with at_place(scenario.place):
        clock.run(until_ns=stop_ns)
    clients.stop()
    if stop_ns is None:
        with at_place(scenario.place):
            _check_drained(machines)
    tables = ledger.tables() if isinstance(ledger, Recorder) else merge_tables(*ledger.tables())
    if traffic.call is not None:
        tables = replace(tables, requests=tables.requests | {"call": traffic.call[tables.requests["request"]]})
    with at_place(scenario.place):
        return _results(scenario, traffic, machines, tables, stop_ns)


def _results(
    scenario: Scenario, traffic: Traffic, machines: Sequence[Machine], tables: Tables, stop_ns: int | None
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
        turn_away_reasons=turn_away_reasons(first.parts),
        is_closed_loop=all(pool.num_clients is not None for pool in traffic.pools),
        cost=_measurements(machines, steps, own_tables),
        provenance=provenance(scenario, [parts.limits for parts in kinds.values()]),
    )
    if scenario.fleet is None:
        return Results(tables, facts, breakdowns[0], shares[0])
    return Results(tables, facts, *merge_prices(tables, breakdowns, shares))


def _replica_facts(machines: Sequence[Machine]) -> Iterator[ReplicaFacts]:
    for index, machine in enumerate(machines):
        target, limits = machine.parts.target, machine.parts.limits
        name = f"{index}: {target.tensor_parallel} × {target.gpu.name}, {machine.parts.scenario.engine.policy}"
        yield ReplicaFacts(name, limits.num_gpu_blocks, machine.policy.usable_blocks, limits.block_size)


def _measurements(machines: Sequence[Machine], steps: Sequence[StepArrays], tables: Sequence[Tables]) -> dict[str, Any]:
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


def _check_drained(machines: Sequence[Machine]) -> None:
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
