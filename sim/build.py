"""From a scenario to a run: the only file that knows every family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.clients import Clients
from sim.clock import Clock, to_ns
from sim.core import EngineCore
from sim.cost.base import COST_MODELS, CostModel, Target
from sim.engine import Engine
from sim.errors import ArtifactError, ScenarioError
from sim.gpu import load_gpu
from sim.kv.memory import KVMemory, derive_kv_memory, kv_dtype_bytes
from sim.metrics.coverage import coverage_shares, first_beyond
from sim.metrics.facts import RunFacts
from sim.metrics.load import step_arrays
from sim.model import load_model
from sim.policies.base import POLICIES, EngineLimits, Policy
from sim.provenance import provenance
from sim.record import Recorder, Tables
from sim.request import Request
from sim.results import Results
from sim.scenario import Scenario, is_model_path, load_scenario, parse_scenario
from sim.step import StepArrays
from sim.workload.base import Traffic
from sim.workload.draw import draw_traffic
from sim.workload.files import resolve_path


@dataclass(frozen=True)
class Replica:
    """What a scenario's engine runs, on what, and within which limits."""

    target: Target
    memory: KVMemory
    limits: EngineLimits


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
        model = load_model(_model_name(scenario))
        gpu = load_gpu(scenario.hardware.gpu)
        num_tokens, num_rows = engine.largest_pass(engine.max_model_len or model.max_position_embeddings)
        memory = derive_kv_memory(
            model, gpu, tensor_parallel, engine, max_num_batched_tokens=num_tokens, max_num_seqs=num_rows
        )
    target = Target(model, gpu, tensor_parallel, kv_dtype_bytes(model, engine.kv_cache_dtype))
    class_names = tuple(traffic_class.name for traffic_class in scenario.traffic)
    limits = EngineLimits(memory.max_model_len, engine.block_size, memory.num_gpu_blocks, class_names)
    return Replica(target, memory, limits)


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
        )


def simulate(scenario: Scenario, traffic: Traffic) -> Results:
    """Run `traffic` through the engine of a scenario."""
    parts = replica(scenario)
    with _at(scenario.place):
        policy = _policy(scenario, parts.limits)
        cost = _cost(scenario, parts.target)
        _check_requests(scenario, policy, traffic)
    clock, recorder = Clock(), Recorder()
    engine = Engine(clock, EngineCore(policy), cost, recorder, aborts=scenario.engine.abort_on_disconnect)
    clients = Clients(clock, engine, recorder, traffic)
    clients.start()
    stop_ns = None if scenario.run.drain or scenario.run.duration_s is None else to_ns(scenario.run.duration_s)
    with _at(scenario.place):
        clock.run(until_ns=stop_ns)
    clients.stop()
    tables = recorder.tables()
    steps = step_arrays(tables)
    with _at(scenario.place):
        measurements = _measurements(scenario, cost, steps, tables)
    facts = _facts(scenario, traffic, parts.limits, policy, stop_ns, measurements)
    return Results(tables, facts, cost.breakdown(steps))


def _facts(
    scenario: Scenario,
    traffic: Traffic,
    limits: EngineLimits,
    policy: Policy,
    stop_ns: int | None,
    measurements: dict[str, Any],
) -> RunFacts:
    return RunFacts(
        class_names=traffic.class_names,
        num_blocks=limits.num_gpu_blocks,
        usable_blocks=policy.usable_blocks,
        block_size=limits.block_size,
        slo=scenario.slo,
        class_slos={entry.name: entry.slo for entry in scenario.traffic if entry.slo},
        warmup_s=scenario.run.warmup_s,
        cut_drain=scenario.run.cut_drain,
        stopped_ns=stop_ns,
        is_streaming=policy.streams_answers,
        is_closed_loop=all(pool.num_clients is not None for pool in traffic.pools),
        cost=measurements,
        provenance=provenance(scenario, limits),
    )


def _measurements(scenario: Scenario, cost: CostModel, steps: StepArrays, tables: Tables) -> dict[str, Any]:
    """What the prices of a run rest on; empty for a cost model without measurements.

    Raises ArtifactError for iterations beyond them where the scenario does not allow that.
    """
    levels = cost.coverage(steps)
    if levels is None:
        return {}
    out_of_range = getattr(scenario.cost, "out_of_range", "warn")
    first = first_beyond(levels)
    if out_of_range == "error" and first is not None:
        rows = int(steps.num_decode[first] + tables.iterations["prefill_tokens"][first])
        raise ArtifactError(
            "cost.out_of_range",
            f"iteration {first} ({rows} tokens, {int(steps.num_decode[first])} of them decodes, longest context "
            f"{int(steps.decode_context_max[first])}) lies beyond what was measured",
            remedy="Keep batches and contexts smaller, or set cost.out_of_range: warn.",
        )
    return cost.facts() | {"out_of_range": out_of_range, "coverage": coverage_shares(levels, tables.iterations)}


def _policy(scenario: Scenario, limits: EngineLimits) -> Policy:
    policy = POLICIES.load(scenario.engine.policy, place="engine.policy", allow_imports=scenario.allows_imports)
    return policy.build(scenario.engine, limits)


def _cost(scenario: Scenario, target: Target) -> CostModel:
    cost = COST_MODELS.load(scenario.cost.kind, place="cost.kind", allow_imports=scenario.allows_imports)
    options, artifact = scenario.cost, getattr(scenario.cost, "artifact", None)
    if isinstance(artifact, str):
        path = resolve_path(artifact, scenario.folder, place="cost.artifact")
        options = options.model_copy(update={"artifact": str(path)})
    return cost.build(options, target)


def _model_name(scenario: Scenario) -> str:
    """A bundled name as it is; a path relative to the scenario's folder."""
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
