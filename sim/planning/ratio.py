"""Whose capacity is larger, and by how much: variants under the same SLO and traffic, replication by replication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sim.errors import ScenarioError
from sim.metrics.stats import Interval, paired_difference
from sim.metrics.wording import percent
from sim.planning.capacity import Capacity, find_capacity
from sim.planning.compare import describe_same_traffic, variants_of
from sim.planning.replications import replication_note
from sim.scenario import Scenario


@dataclass(frozen=True)
class CapacityComparison:
    """The capacity of every variant; the first one is what ratios refer to."""

    capacities: dict[str, Capacity]
    missing: dict[str, str]
    """Variants without a capacity, and why: no load meets the SLO, or every one does."""
    has_same_traffic: bool

    @property
    def baseline(self) -> str | None:
        """Name of the first variant that has a capacity; None where none has."""
        return next(iter(self.capacities), None)

    @cached_property
    def ratios(self) -> dict[str, Interval]:
        """Variant -> its capacity over the baseline's, with a paired interval.

        Replication j of both met the same random numbers, so the interval is of the differences of their
        logarithms.
        """
        if self.baseline is None:
            return {}
        base = self.capacities[self.baseline]
        return {name: ratio_of(one, base) for name, one in self.capacities.items() if one is not base}

    @cached_property
    def verdict(self) -> str:
        """Who serves how many times as much, and whether that is sure."""
        said = [_said(name, ratio, str(self.baseline)) for name, ratio in self.ratios.items()]
        said += [f"{name} has no capacity: {why}" for name, why in self.missing.items()]
        return ". ".join(said).rstrip(".") + "."

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        any_scenario = next(iter(self.capacities.values())).scenario if self.capacities else None
        return {
            "baseline": self.baseline,
            "has_same_traffic": self.has_same_traffic,
            "method": replication_note(any_scenario) if any_scenario else "",
            "verdict": self.verdict,
            "missing": self.missing,
            "variants": {name: self._row(name, one) for name, one in self.capacities.items()},
        }

    def _row(self, name: str, capacity: Capacity) -> dict[str, Any]:
        ratio = self.ratios.get(name)
        boundary = {"variable": capacity.load.variable, "unit": capacity.load.unit, **_plain(capacity.boundary)}
        return {
            "boundary": boundary,
            "binding": capacity.binding,
            "replications": capacity.num_replications,
            "requests_per_run": capacity.search.num_requests,
            "ratio": None if ratio is None else _plain(ratio),
        }


def compare_capacities(*scenarios: Scenario, **options: Any) -> CapacityComparison:
    """The capacity of every variant of one scenario (itself first), or of several scenarios.

    `options` are those of `find_capacity`. Raises ScenarioError where there is nothing to compare, or where
    SLOs differ: capacities under different SLOs say nothing about each other.
    """
    variants = variants_of(scenarios)
    base = next(iter(variants.values()))
    capacities: dict[str, Capacity] = {}
    missing: dict[str, str] = {}
    for scenario in variants.values():
        if _slos(scenario) != _slos(base):
            raise ScenarioError(
                f"{scenario.place}: slo", "differs from that of the first variant", valid="capacities need one SLO"
            )
    for name, scenario in variants.items():
        try:
            capacities[name] = find_capacity(scenario, **options)
        except ScenarioError as error:
            if not error.place.startswith(f"{scenario.place}: slo"):
                raise
            missing[name] = f"{error.found} ({error.valid})" if error.valid else error.found
    level = with_equal_replications(capacities)
    same = all(describe_same_traffic(base, scenario) for scenario in variants.values())
    return CapacityComparison(level, missing, same)


def _slos(scenario: Scenario) -> tuple[Mapping[str, float], list[tuple[str, Mapping[str, float] | None]]]:
    return scenario.slo, [(entry.name, entry.slo) for entry in scenario.traffic]


def with_equal_replications(capacities: Mapping[str, Capacity]) -> dict[str, Capacity]:
    """The same ones, all from as many replications as the one that has most, so that they can be paired."""
    most = max((capacity.num_replications for capacity in capacities.values()), default=0)
    return {name: capacity.extended(most) for name, capacity in capacities.items()}


def ratio_of(ours: Capacity, theirs: Capacity) -> Interval:
    """One capacity over another, with a paired interval; both have equally many replications."""
    log = paired_difference(ours.crossing.log_loads, theirs.crossing.log_loads, ours.crossing.interval.level)
    value = ours.crossing.interval.value / theirs.crossing.interval.value
    return Interval(value, float(np.exp(log.low)), float(np.exp(log.high)), log.level)


def _said(name: str, ratio: Interval, baseline: str) -> str:
    between = f"({percent(ratio.level)} CI {ratio.low:.3g} to {ratio.high:.3g})"
    if ratio.has(1.0):
        return f"{name} and {baseline} are not told apart: {ratio.value:.3g} times the load {between}"
    return f"{name} bears {ratio.value:.3g} times the load of {baseline} {between}"


def _plain(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "ci_low": interval.low, "ci_high": interval.high, "level": interval.level}
