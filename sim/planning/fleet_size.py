"""How many replicas a rate needs: fleets of several sizes are simulated behind the scenario's own router."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from sim.errors import ScenarioError
from sim.metrics.stats import Interval, jackknife_values, mean_interval
from sim.planning.boundary import score_at
from sim.planning.capacity import FIRST_REPLICATIONS, Capacity, Progress
from sim.planning.probe import Observation, observe
from sim.planning.replications import at_load, load_of, replication
from sim.planning.workers import Workers
from sim.routing.fleet import FleetOptions
from sim.scenario import Scenario

MOST_SIMULATED = 64
"""Copies in the largest fleet that is simulated: in a run of a larger one each replica would be seen too shortly."""
_MAX_REQUESTS = 100_000
"""Of one run of a fleet."""


@dataclass(frozen=True)
class FleetSize:
    """The smallest fleet that meets the SLO at a rate, and the sizes between which it lies for certain.

    Sizes count copies of the scenario: engines, or whole fleets where it has one, behind one router.
    """

    rate_per_s: float
    copies: int
    low: int
    high: int
    scenario: Scenario
    """With as many copies, under that rate."""
    is_simulated: bool
    """Whether fleets were run; otherwise each copy is taken to bear as much as one alone."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        own = _fleet(self.scenario)
        per_copy = num_replicas(self.scenario) // self.copies
        return {
            "rate_per_s": self.rate_per_s,
            "replicas": self.copies * per_copy,
            "ci_low": self.low * per_copy,
            "ci_high": self.high * per_copy,
            "gpus": num_gpus(self.scenario),
            "router": own.router.kind,
            "is_simulated": self.is_simulated,
        }


@dataclass
class _Fleets:
    """Fleets of several sizes under one rate, and what was seen of them."""

    capacity: Capacity
    rate_per_s: float
    workers: Workers
    progress: Progress
    scores: dict[int, Interval] = field(default_factory=dict)

    def score(self, copies: int) -> Interval:
        """Of the target that is worst off, over all replications: below 0 within its limit. Runs them once."""
        if copies not in self.scores:
            search = self.capacity.search
            tasks = [(self._run(copies, i), search.targets) for i in range(FIRST_REPLICATIONS)]
            seen: dict[int, Observation] = {}
            for position, observation in self.workers.each(observe, tasks):
                seen[position] = observation
                self.progress(f"trying {copies} replicas", len(self.scores) * FIRST_REPLICATIONS + len(seen))
            runs = [seen[i] for i in range(FIRST_REPLICATIONS)]
            values = jackknife_values(lambda rows: score_at(search.targets, [runs[i] for i in rows]), len(runs))
            spread = mean_interval(values, self.capacity.boundary.level)
            pooled = score_at(search.targets, runs)
            self.scores[copies] = Interval(pooled, spread.low, spread.high, spread.level)
        return self.scores[copies]

    def _run(self, copies: int, index: int) -> Scenario:
        num_requests = self.capacity.search.num_requests
        num_requests = max(num_requests, min(copies * num_requests, _MAX_REQUESTS))
        return replication(fleet_at(self.capacity, copies, self.rate_per_s), index, num_requests)


def fleet_size(
    capacity: Capacity,
    rate_per_s: float,
    *,
    workers: Workers | None = None,
    progress: Progress = lambda what, num_runs: None,
) -> FleetSize:
    """The smallest number of replicas that meets the SLO at a rate, behind the scenario's router.

    Starts at the number that the capacity of one suggests, and goes up or down until one size meets the SLO and
    the next smaller one does not: a router that evens out arrivals needs fewer, one that leaves some replicas
    behind needs more. Beyond `MOST_SIMULATED` copies the suggestion itself is the answer. Raises ScenarioError
    for closed loops, whose rate is not given.
    """
    check_has_rate(capacity.scenario)
    boundary = capacity.boundary
    low, copies, high = (
        _ceil(rate_per_s / max(bound, 1e-12)) for bound in (boundary.high, boundary.value, boundary.low)
    )
    is_simulated = copies < MOST_SIMULATED
    if is_simulated:
        low, copies, high = _smallest(_Fleets(capacity, rate_per_s, workers or Workers(), progress), copies)
    return FleetSize(rate_per_s, copies, low, high, fleet_at(capacity, copies, rate_per_s), is_simulated)


def check_has_rate(scenario: Scenario) -> None:
    """Raise ScenarioError for a scenario whose load is clients, which have no rate of their own."""
    if load_of(scenario).variable != "rate_per_s":
        raise ScenarioError("--rate", "the scenario's load is clients, not a rate", remedy="Use open-loop arrivals.")


def fleet_at(capacity: Capacity, copies: int, rate_per_s: float) -> Scenario:
    """So many copies of the scenario behind one router, under a rate."""
    scenario = at_load(capacity.scenario, rate_per_s / capacity.load.value)
    own = _fleet(scenario)
    others = [group.model_copy(update={"replicas": copies * group.replicas}) for group in own.others]
    fleet = own.model_copy(update={"replicas": copies * own.replicas, "others": others})
    return scenario.model_copy(update={"fleet": fleet})


def num_replicas(scenario: Scenario) -> int:
    """Engines of the scenario, those of its fleet if it has one."""
    own = _fleet(scenario)
    return own.replicas + sum(group.replicas for group in own.others)


def num_gpus(scenario: Scenario) -> int:
    """GPUs of the scenario, those of all replicas of a fleet."""
    own, fleet = scenario.hardware.tensor_parallel, _fleet(scenario)
    total = own * fleet.replicas
    for group in fleet.others:
        total += int((group.hardware or {}).get("tensor_parallel", own)) * group.replicas
    return total


def _smallest(fleets: _Fleets, suggested: int) -> tuple[int, int, int]:
    """The least size that may do, the smallest that does on average, and the least that does for certain."""
    copies = suggested
    while copies < MOST_SIMULATED and fleets.score(copies).value > 0:
        copies += 1
    while copies > 1 and fleets.score(copies - 1).value <= 0:
        copies -= 1
    low = high = copies
    while low > 1 and fleets.score(low - 1).low <= 0:
        low -= 1
    while high < MOST_SIMULATED and fleets.score(high).high > 0:
        high += 1
    return low, copies, high


def _fleet(scenario: Scenario) -> FleetOptions:
    return scenario.fleet or FleetOptions()


def _ceil(value: float) -> int:
    return max(1, math.ceil(value - 1e-9))
