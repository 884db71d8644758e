"""The largest load that meets an SLO, with a confidence interval.

First one short run at each of two loads a round narrows the range to a few per cent: far from the boundary a
single run leaves no doubt. Then replications, several times as long, are made at three loads around the spot,
and more of them at the two that enclose it, until the interval is as narrow as asked for. Every replication
meets the same random numbers at every load, so that what it says about the slope is not blurred.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sim.errors import ScenarioError
from sim.metrics.distribution import percent_of
from sim.metrics.stats import LEVEL, Interval
from sim.planning.boundary import Crossing, crossing, score_at
from sim.planning.probe import STABILITY, Observation, Tally, Target, common_warm_up, observe, targets_of
from sim.planning.replications import Load, at_load, is_steady, load_of, replication
from sim.planning.workers import Workers
from sim.scenario import Scenario

PRECISION = 0.02
"""Half-width of the interval, as a part of the load, at which a search stops by itself."""
MAX_REPLICATIONS = 40
FIRST_REPLICATIONS = 6
"""At each of the loads around the boundary, before it is known between which two it lies."""
_LEAST_REPLICATIONS = 12
"""Before these are made nobody asks how precise the answer is. A search that may stop after fewer stops where their
spread happens to be small: its 95 % intervals would hold the truth in some 85 % (`benchmarks/capacity_coverage.py`)."""
_MORE_REPLICATIONS = 2
"""Between two such questions; a fixed number, so that the answer does not depend on the workers."""

_STEP = 4.0
"""Between the loads that look for a range."""
_MAX_STEPS = 6
_NARROW = 1.08
"""Ratio of the ends of a range that is narrow enough for replications."""
_SPREAD = 0.05
"""Between the loads that are replicated, as a logarithm."""
_MAX_MOVES = 6
_PILOT_SHARE = 0.3
"""Requests of a run that looks for the range, as a part of a replication's."""
_BEYOND = 50
"""Values that lie beyond a percentile in one replication, on average."""
_MIN_REQUESTS, _MAX_REQUESTS = 2_000, 50_000

Progress = Callable[[str, int], None]
"""Told what is being done, and how many runs are finished."""


@dataclass
class Search:
    """Runs that were made, and the making of more."""

    scenario: Scenario
    load: Load
    targets: tuple[Target, ...]
    workers: Workers
    progress: Progress
    num_requests: int
    runs: dict[tuple[float, int, int], Observation] = field(default_factory=dict)
    """By load, replication and number of requests."""

    def observe(self, loads: Sequence[float], replications: Sequence[int], num: int, what: str) -> None:
        """Make all of these runs that are not there yet."""
        keys = [(load, i, num) for i in replications for load in loads if (load, i, num) not in self.runs]
        tasks = [(self.at(load, i, num), self.targets) for load, i, num in keys]
        for position, observation in self.workers.each(observe, tasks):
            self.runs[keys[position]] = observation
            self.progress(what, len(self.runs))

    def at(self, load: float, index: int, num: int) -> Scenario:
        """One replication under a load."""
        return replication(at_load(self.scenario, load / self.load.value), index, num)

    def score(self, load: float, num: int) -> float:
        """Of the first replication."""
        return score_at(self.targets, [self.runs[load, 0, num]])

    def crossing(self, loads: Sequence[float], num_replications: int, level: float = LEVEL) -> Crossing:
        """From the first replications at some loads."""
        made = [[self.runs[load, i, self.num_requests] for i in range(num_replications)] for load in loads]
        return crossing(self.targets, loads, made, level)

    def rounded(self, loads: Sequence[float]) -> list[float]:
        """Loads that exist, without repetition, in order."""
        return sorted({float(max(1, round(load))) for load in loads} if self.load.is_whole else set(loads))


@dataclass(frozen=True)
class Capacity:
    """The answer to "how much can this serve"; see `find_capacity`."""

    search: Search
    pair: tuple[float, float]
    """The loads that were replicated, on either side of the boundary as a rule."""
    crossing: Crossing
    num_replications: int
    precision: float

    @property
    def scenario(self) -> Scenario:
        """What was asked about."""
        return self.search.scenario

    @property
    def load(self) -> Load:
        """What was varied, and how much of it the scenario has."""
        return self.search.load

    @property
    def boundary(self) -> Interval:
        """Of the load, in its unit; whole numbers of clients are rounded down."""
        interval = self.crossing.interval
        if not self.load.is_whole or not np.isfinite([interval.low, interval.high]).all():
            return interval
        value, low, high = (float(math.floor(x)) for x in (interval.value, interval.low, interval.high))
        return Interval(value, low, high, interval.level)

    @property
    def binding(self) -> str:
        """The target that gives way first."""
        return self.crossing.binding.name

    @property
    def is_precise(self) -> bool:
        """Whether the interval is as narrow as was asked for."""
        return self.crossing.interval.relative_half_width <= self.precision

    @property
    def below(self) -> float:
        """The larger of the replicated loads that does not lie beyond the boundary."""
        return max((load for load in self.pair if load <= self.crossing.interval.value), default=self.pair[0])

    @cached_property
    def observations(self) -> list[Observation]:
        """The replications at `below`."""
        num_requests = self.search.num_requests
        return [self.search.runs[self.below, i, num_requests] for i in range(self.num_replications)]

    @cached_property
    def warm_up(self) -> tuple[int, bool]:
        """The share of first requests that is cut, as a position in `CUTS`, and whether the runs settle."""
        return common_warm_up([one.seen for one in self.observations])

    @cached_property
    def values(self) -> dict[str, float | None]:
        """Target -> its statistic at `below`, averaged over the replications that observed it."""
        values: dict[str, float | None] = {}
        cut, _ = self.warm_up
        for i, target in enumerate(self.search.targets):
            seen = [value for one in self.observations if (value := one.tallies[cut][i].value) is not None]
            values[target.name] = float(np.mean(seen)) if seen else None
        return values

    def extended(self, num_replications: int) -> Capacity:
        """The same from more replications at the same two loads."""
        if num_replications <= self.num_replications:
            return self
        search = self.search
        search.observe(self.pair, range(num_replications), search.num_requests, "replicating")
        estimate = search.crossing(self.pair, num_replications, self.crossing.interval.level)
        return Capacity(search, self.pair, estimate, num_replications, self.precision)


def find_capacity(
    scenario: Scenario,
    *,
    low: float | None = None,
    high: float | None = None,
    precision: float = PRECISION,
    level: float = LEVEL,
    max_replications: int = MAX_REPLICATIONS,
    num_requests: int | None = None,
    workers: Workers | None = None,
    progress: Progress = lambda what, num_runs: None,
) -> Capacity:
    """The largest load under which `scenario` meets its SLO and stays stable.

    Searches the arrival rate in requests per second, or the number of clients of closed loops (or a factor
    on both), from `low` to `high` if given. `precision` is the half-width of the interval at which it
    stops, as a part of the load; `num_requests` the length of a replication (default: by the SLO's most
    extreme percentile). The same scenario and arguments give the same answer, whatever `workers` there are.
    Raises ScenarioError where there is no SLO, where no load meets it or every one does.
    """
    load = load_of(scenario)
    targets = targets_of(scenario, has_stability=is_steady(scenario) and not load.is_whole)
    num_requests = num_requests or _enough_requests(targets)
    search = Search(scenario, load, targets, workers or Workers(), progress, num_requests)
    bottom, top = _narrowed(search, *_bracketed(search, low, high))
    loads = _placed(search, math.sqrt(bottom * top))
    return _replicated(search, loads, precision, level, max_replications)


def _enough_requests(targets: Sequence[Target]) -> int:
    percents = [percent_of(target.term.statistic) or 0.0 for target in targets if target.term]
    percents += [100 * target.limit for target in targets if target.term is None and target.name != STABILITY]
    percent = max((percent for percent in percents if percent < 100), default=0.0)
    return min(max(round(_BEYOND / (1 - percent / 100)), _MIN_REQUESTS), _MAX_REQUESTS)


def _bracketed(search: Search, low: float | None, high: float | None) -> tuple[float, float]:
    """Two loads, of which the lower one meets all targets and the higher one does not."""
    num = _pilot(search)
    if low is not None or high is not None:
        return _given_range(search, low, high, num)
    tried = [search.load.value]
    search.observe(tried, [0], num, "looking for the range")
    upwards = search.score(tried[0], num) <= 0
    for _ in range(_MAX_STEPS):
        last = tried[-1]
        further = search.rounded([last * _STEP if upwards else last / _STEP])[0]
        if further == last:
            break
        tried.append(further)
        search.observe([further], [0], num, "looking for the range")
        if (search.score(further, num) <= 0) != upwards:
            return min(last, further), max(last, further)
    raise _unbounded(search, tried[-1], num) if upwards else _hopeless(search, tried[-1], num)


def _given_range(search: Search, low: float | None, high: float | None, num: int) -> tuple[float, float]:
    low = search.load.value / _STEP**_MAX_STEPS if low is None else low
    high = search.load.value * _STEP**_MAX_STEPS if high is None else high
    if max(low, high) < math.inf:
        low, high = search.rounded([low])[0], search.rounded([high])[0]
    if not 0 < low < high < math.inf:
        raise ScenarioError("--low, --high", f"{low:g} to {high:g} is no range", valid="two loads above 0, low first")
    search.observe([low, high], [0], num, "looking for the range")
    if search.score(low, num) > 0:
        raise _hopeless(search, low, num)
    if search.score(high, num) <= 0:
        raise _unbounded(search, high, num)
    return low, high


def _narrowed(search: Search, low: float, high: float) -> tuple[float, float]:
    """The same range, cut to a third each round by two runs inside it."""
    num = _pilot(search)
    while high / low > _NARROW:
        inner = search.rounded([low ** (1 - share) * high**share for share in (1 / 3, 2 / 3)])
        inner = [load for load in inner if low < load < high]
        if not inner:
            break
        search.observe(inner, [0], num, "narrowing the range")
        for load in inner:
            if search.score(load, num) > 0:
                high = load
                break
            low = load
    return low, high


def _pilot(search: Search) -> int:
    return max(_MIN_REQUESTS // 2, round(_PILOT_SHARE * search.num_requests))


def _placed(search: Search, centre: float) -> list[float]:
    """Loads around `centre` that enclose the boundary according to the first replications."""
    loads = _around(search, centre)
    for _ in range(_MAX_MOVES):
        search.observe(loads, range(FIRST_REPLICATIONS), search.num_requests, "replicating")
        estimate = search.crossing(loads, FIRST_REPLICATIONS).interval.value
        if loads[0] <= estimate <= loads[-1] or len(loads) == 1:
            break
        loads = _around(search, estimate)
    return loads


def _around(search: Search, centre: float) -> list[float]:
    spread = max(_SPREAD, 1 / centre) if search.load.is_whole else _SPREAD
    return search.rounded([centre * math.exp(step * spread) for step in (-1, 0, 1)])


def _replicated(search: Search, loads: list[float], precision: float, level: float, max_replications: int) -> Capacity:
    """Replicate at the two loads around the boundary until it is known well enough."""
    estimate = search.crossing(loads, FIRST_REPLICATIONS, level)
    right = int(np.clip(np.searchsorted(loads, estimate.interval.value), 1, len(loads) - 1))
    pair = (loads[right - 1], loads[right])
    num = max(FIRST_REPLICATIONS, min(_LEAST_REPLICATIONS, max_replications))
    while True:
        search.observe(pair, range(num), search.num_requests, "replicating")
        estimate = search.crossing(pair, num, level)
        if estimate.interval.relative_half_width <= precision or num >= max_replications:
            break
        num = min(num + _MORE_REPLICATIONS, max_replications)
    return Capacity(search, pair, estimate, num, precision)


def _hopeless(search: Search, load: float, num: int) -> ScenarioError:
    """Not even the smallest load meets the SLO: which target fails, and what it comes to."""
    tallies = _first_tallies(search, load, num)
    scores = [target.score([tally]) for target, tally in zip(search.targets, tallies, strict=True)]
    worst = int(np.argmax(scores))
    target, value = search.targets[worst], tallies[worst].value
    return ScenarioError(
        f"{search.scenario.place}: slo.{target.name}",
        f"not even {load:.3g} {search.load.unit} meet it: {_shown(target, value)} at best",
        valid=f"{_shown(target, target.limit)} was asked for",
        remedy="Relax it, or change model, hardware or engine.",
    )


def _unbounded(search: Search, load: float, num: int) -> ScenarioError:
    tallies = _first_tallies(search, load, num)
    reached = ", ".join(
        f"{target.name} {_shown(target, tally.value)} of {_shown(target, target.limit)}"
        for target, tally in zip(search.targets, tallies, strict=True)
        if target.name != STABILITY
    )
    return ScenarioError(
        f"{search.scenario.place}: slo",
        f"even {load:.3g} {search.load.unit} meet it ({reached}): the range holds no boundary",
        remedy="Search higher with --high, or tighten the SLO.",
    )


def _first_tallies(search: Search, load: float, num: int) -> tuple[Tally, ...]:
    """Of the first replication at a load."""
    observation = search.runs[load, 0, num]
    return observation.tallies[common_warm_up([observation.seen])[0]]


def _shown(target: Target, value: float | None) -> str:
    if value is None:
        return "nothing observed"
    return f"{value:.4g} ms" if target.term is not None else f"{value:.4g}"
