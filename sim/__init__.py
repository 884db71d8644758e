"""Simulate LLM serving schedulers: the public API.

    results = sim.run("scenarios/quickstart.yaml")
    results.summary()["metrics"]["ttft_ms"]["p99"]

Names are loaded on first use; importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.build import run
    from sim.errors import ArtifactError, InvariantError, ScenarioError, TraceError, UserError
    from sim.planning.capacity import Capacity, find_capacity
    from sim.planning.compare import Comparison, compare
    from sim.planning.replicate import Replicated, replicate
    from sim.planning.sweep import Sweep, sweep
    from sim.planning.uncertainty import run_with_cost_uncertainty
    from sim.results import Results
    from sim.scenario import Scenario, load_scenario, parse_scenario

__all__ = [
    "ArtifactError",
    "Capacity",
    "Comparison",
    "InvariantError",
    "Replicated",
    "Results",
    "Scenario",
    "ScenarioError",
    "Sweep",
    "TraceError",
    "UserError",
    "compare",
    "find_capacity",
    "load_scenario",
    "parse_scenario",
    "replicate",
    "run",
    "run_with_cost_uncertainty",
    "sweep",
]

_HOME = {
    "sim.build": ("run",),
    "sim.errors": ("ArtifactError", "InvariantError", "ScenarioError", "TraceError", "UserError"),
    "sim.planning.capacity": ("Capacity", "find_capacity"),
    "sim.planning.compare": ("Comparison", "compare"),
    "sim.planning.replicate": ("Replicated", "replicate"),
    "sim.planning.sweep": ("Sweep", "sweep"),
    "sim.planning.uncertainty": ("run_with_cost_uncertainty",),
    "sim.results": ("Results",),
    "sim.scenario": ("Scenario", "load_scenario", "parse_scenario"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'sim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
