"""How far the errors of a calibration move the answers: the same run again, with costs off as their fit was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sim.build import draw, simulate
from sim.errors import ScenarioError
from sim.replica import cost_model
from sim.results import Results
from sim.rng import stream
from sim.scenario import Scenario

NUM_RERUNS = 20
LEVEL = 0.9
METRICS = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def run_with_cost_uncertainty(scenario: Scenario) -> Results:
    """Simulate a scenario, and again with costs drawn from the errors of their fit, on the same requests.

    The results are those of the plain run; their summary says under `cost.uncertainty` between which values the
    middle 90 % of the reruns' means and percentiles lie. The same seed gives the same band. Raises ScenarioError
    where the cost model knows no errors of its own.
    """
    traffic, cost = draw(scenario), cost_model(scenario)
    costs = [cost.perturbed(stream(scenario.seed, f"cost_uncertainty/{i}")) for i in range(NUM_RERUNS)]
    known = [own for own in costs if own is not None]
    if not known:
        raise ScenarioError(
            f"{scenario.place}: cost",
            f"{scenario.cost.kind} knows no errors of its own, so that nothing says how they move the answers",
            valid="known are those of `kind: table` with held-out errors and of `kind: linear` with relative_error",
            remedy="Leave --cost-uncertainty out, or calibrate.",
        )
    results = simulate(scenario, traffic, cost=cost)
    reruns = [simulate(scenario, traffic, cost=own).summary()["metrics"] for own in known]
    band = {name: {key: _band([own[name][key] for own in reruns]) for key in STATISTICS} for name in METRICS}
    uncertainty = {"num_reruns": len(known), "level": LEVEL, "metrics": band}
    facts = replace(results.facts, cost={**results.facts.cost, "uncertainty": uncertainty})
    return Results(results.tables, facts, results.breakdown, results.shares)


def _band(values: Sequence[float | None]) -> list[float] | None:
    """Between which the middle part of the values lies; None where there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = np.percentile(known, [50 * (1 - LEVEL), 50 * (1 + LEVEL)]).tolist()
    return [low, high]
