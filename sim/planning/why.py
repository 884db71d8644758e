"""Why a run is as slow as it is: causes of latency, what limits it, what no server could beat, and what to change."""

from __future__ import annotations

from typing import Any

from sim.build import draw, simulate
from sim.planning.bounds import bounds, verdict
from sim.planning.next_change import next_change
from sim.replica import replicas
from sim.scenario import Scenario


def why(scenario: Scenario, *, with_next_change: bool = False) -> dict[str, Any]:
    """Run the scenario and explain it, as plain data.

    `causes` and `limits` as in a summary; `bounds` with a `verdict`, in a fleet those of the first replica of each
    kind; `next_change` (or null) reruns the scenario with 10 % more of each resource. Raises what `sim.build` raises.
    """
    parts = replicas(scenario)
    results = simulate(scenario, draw(scenario), parts)
    first_of_kind = {id(own): index for index, own in reversed(list(enumerate(parts)))}.values()
    found = [bound for index in sorted(first_of_kind) for bound in bounds(results.engines[index], parts[index])]
    return {
        "causes": results.causes.model_dump(),
        "limits": results.limits.model_dump(),
        "bounds": {"verdict": verdict(found), "rows": [bound.to_dict() for bound in found]},
        "next_change": next_change(scenario).to_dict() if with_next_change else None,
    }
