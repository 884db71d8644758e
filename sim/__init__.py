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
    from sim.planning.compare import Comparison, compare
    from sim.planning.uncertainty import run_with_cost_uncertainty
    from sim.results import Results
    from sim.scenario import Scenario, load_scenario, parse_scenario

__all__ = [
    "ArtifactError",
    "Comparison",
    "InvariantError",
    "Results",
    "Scenario",
    "ScenarioError",
    "TraceError",
    "UserError",
    "compare",
    "load_scenario",
    "parse_scenario",
    "run",
    "run_with_cost_uncertainty",
]

_HOME = {
    "sim.build": ("run",),
    "sim.errors": ("ArtifactError", "InvariantError", "ScenarioError", "TraceError", "UserError"),
    "sim.planning.compare": ("Comparison", "compare"),
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
