"""What a scenario runs on: its engines with their model, GPU, KV pool and prices, before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from sim.cost.base import COST_MODELS, CostModel, Target
from sim.cost.host import HOST_TIMES
from sim.cost.hosted import Hosted
from sim.cost.sped_up import SpedUp
from sim.errors import at_place
from sim.gpu import load_gpu
from sim.kv.memory import KVMemory, derive_kv_memory, kv_dtype_bytes
from sim.model import load_model
from sim.policies.base import EngineLimits
from sim.scenario import Scenario, is_model_path
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


def replica(scenario: Scenario) -> Replica:
    """Load model and GPU and derive the KV pool. Raises ScenarioError or ArtifactError."""
    engine, tensor_parallel = scenario.engine, scenario.hardware.tensor_parallel
    with at_place(scenario.place):
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


def cost_model(scenario: Scenario) -> CostModel:
    """What a scenario's iterations cost (its own engine's, in a fleet). Raises ScenarioError or ArtifactError."""
    parts = replica(scenario)
    with at_place(scenario.place):
        return price_model(parts)


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
