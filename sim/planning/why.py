"""Why a run is as slow as it is: causes of latency, what limits it, what no server could beat, and what to change."""

from __future__ import annotations

from typing import Any

from sim.build import draw, replica, simulate
from sim.planning.bounds import bounds, verdict
from sim.planning.next_change import next_change
from sim.scenario import Scenario


def why(scenario: Scenario, *, with_next_change: bool = False) -> dict[str, Any]:
    """Run the scenario and explain it, as plain data.

    `causes` and `limits` as in a summary; `bounds` with a `verdict`; `next_change` (or null) reruns the scenario
    with 10 % more of each resource. Raises what `sim.build` raises.
    """
    parts = replica(scenario)
    results = simulate(scenario, draw(scenario), parts)
    found = bounds(results, parts)
    return {
        "causes": results.causes.model_dump(),
        "limits": results.limits.model_dump(),
        "bounds": {"verdict": verdict(found), "rows": [bound.to_dict() for bound in found]},
        "next_change": next_change(scenario).to_dict() if with_next_change else None,
    }
