"""One run of a search, boiled down to what the search needs of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sim.build import run
from sim.clock import NS_PER_MS, NS_PER_S
from sim.errors import ScenarioError
from sim.metrics.distribution import Bools, percent_of, to_ms
from sim.metrics.latency import is_answered
from sim.metrics.slo import GOODPUT, SloTerm, parse_slo
from sim.metrics.stats import Floats, find_warm_up
from sim.metrics.steady import in_arrival_order, seen_by_arrivals, wait_growth
from sim.planning.replications import is_steady
from sim.results import Results
from sim.scenario import Scenario

STABILITY = "stability"
"""The requirement that nobody has to write down: waits must not grow with the run."""

GROWTH_LIMIT = 0.01
"""Seconds of wait by which a second of later arrival may cost more before a run counts as overloaded."""

_NEVER_SEEN = math.log(0.01)
"""Score of a target that is a hundredth of its limit or less, or that nothing was observed of."""

CUTS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Shares of a run's first requests that may be cut as warm-up."""

_NOTHING: Floats = np.empty(0)

_MAX_TAIL = 0.1
"""Share of the requests that may be left out because they ended while no new ones came."""


@dataclass(frozen=True)
class Target:
    """One requirement: a latency term, a share of good requests, or stability; of one class or of all."""

    name: str
    """As in the scenario; `chat: p99_ttft_ms` for a class."""
    limit: float
    """Milliseconds, or a share of good requests."""
    term: SloTerm | None = None
    class_name: str | None = None

    def score(self, tallies: Sequence[Tally]) -> float:
        """How far replications together are from the limit: below 0 within it, above 0 beyond, about linear in the
        logarithm of the load.

        For a percentile it is the logarithm of the share of values beyond the limit over the share allowed
        there: shares add up over replications, percentiles do not.
        """
        over, count = sum(tally.over for tally in tallies), sum(tally.out_of for tally in tallies)
        if count == 0:
            return _NEVER_SEEN
        percent = percent_of(self.term.statistic) if self.term else None
        if self.name == STABILITY:
            ratio = over / count / GROWTH_LIMIT
        elif self.term is not None and percent is None:
            ratio = over / count / self.limit
        elif percent == 100:
            ratio = max(tally.value or 0.0 for tally in tallies) / self.limit
        else:
            allowed = 1 - (self.limit if percent is None else percent / 100)
            ratio = max(over, 0.5) / count / allowed
        return max(math.log(max(ratio, 1e-300)), _NEVER_SEEN)


class Tally(NamedTuple):
    """What one run has to say on a target."""

    over: float
    """Values beyond the limit (percentiles), bad requests (goodput), the sum in ms (means), growth (stability)."""
    out_of: float
    value: float | None
    """The statistic itself: milliseconds or a share; None when nothing was observed."""


@dataclass(frozen=True, eq=False)
class Observation:
    """One run: a tally for each target, in their order, and what the report says of it. Immutable."""

    tallies: tuple[tuple[Tally, ...], ...]
    """For every share of first requests in `CUTS` that may be cut (or for none): one a target."""
    seen: Floats
    """How many requests each one found in the system, in arrival order; empty if no warm-up is to be cut."""
    num_requests: int
    num_tail: int
    """Of the last requests, which ended while no new ones came and are cut."""
    prompt_tokens: float
    """Of all requests together."""
    output_tokens: float
    duration_s: float
    """Of the whole run."""
    no_answer_share: float
    """Requests that were turned away or left, of those measured."""


def targets_of(scenario: Scenario, has_stability: bool) -> tuple[Target, ...]:
    """Everything that the scenario asks for. Raises ScenarioError when that is nothing."""
    targets = list(_targets(scenario.slo, "slo", None))
    for entry in scenario.traffic:
        targets += _targets(entry.slo or {}, f"slo of {entry.name}", entry.name)
    if not targets:
        raise ScenarioError(
            f"{scenario.place}: slo",
            "there is nothing to meet",
            valid="a capacity is the largest load that meets an SLO",
            remedy="Add one, such as slo: {p99_ttft_ms: 500, p99_itl_ms: 50}.",
        )
    if has_stability:
        targets.append(Target(STABILITY, GROWTH_LIMIT))
    return tuple(targets)


def observe(task: tuple[Scenario, tuple[Target, ...]]) -> Observation:
    """Run a scenario and take the measure of its targets, over the steady part of the run if there is one."""
    scenario, targets = task
    results = run(scenario)
    requests = results.tables.requests
    steady = steady_part(results) if is_steady(scenario) else SteadyPart((results.is_measured,), 0, _NOTHING)
    return Observation(
        tuple(tuple(_tally(target, results, measured) for target in targets) for measured in steady.measured),
        steady.seen,
        len(requests["request"]),
        steady.num_tail,
        float(requests["prompt_tokens"].sum()),
        float(requests["output_tokens"].sum()),
        results.run_window.duration_ns / NS_PER_S,
        1 - float(is_answered(requests)[steady.measured[0]].mean()),
    )


class SteadyPart(NamedTuple):
    """Which requests of a run count, for every share of the first ones in `CUTS` that may be cut."""

    measured: tuple[Bools, ...]
    num_tail: int
    """Of the last ones, which count in none."""
    seen: Floats
    """How many requests each one found in the system, in arrival order."""


def steady_part(results: Results) -> SteadyPart:
    """Leave out who arrived so late that the system emptied around them, and several numbers of first ones.

    The last ones are those that arrived within one mean end-to-end latency of the end.
    """
    requests = results.tables.requests
    order, num = in_arrival_order(requests), len(requests["request"])
    arrival_ns = requests["arrival_ns"][order]
    mean_ns = results.latencies["e2e"].distribution(np.ones(num, dtype=np.bool_)).mean() or 0.0
    tail = num - int(np.searchsorted(arrival_ns, arrival_ns[-1] - mean_ns, side="right"))
    tail = min(tail, int(_MAX_TAIL * num))
    measured = []
    for cut in CUTS:
        measured.append(np.zeros(num, dtype=np.bool_))
        measured[-1][order[round(cut * num) : num - tail]] = True
    return SteadyPart(tuple(measured), tail, seen_by_arrivals(requests).astype(np.float64))


def common_warm_up(series: Sequence[Floats]) -> tuple[int, bool]:
    """The position in `CUTS` of the warm-up of replications, and whether they settle; `series` are their `seen`.

    MSER-5 of the replications' mean. Of each run by itself it would cut whatever happens to be busy in the
    beginning, which makes waits some 3 % too short in an M/D/1 queue of load 0.8 and 5,000 requests.
    """
    length = min(len(seen) for seen in series)
    if length == 0:
        return 0, True
    found = find_warm_up(np.mean([seen[:length] for seen in series], axis=0))
    enough = (i for i, cut in enumerate(CUTS) if cut * length >= found.num_cut)
    return next(enough, len(CUTS) - 1), found.is_settled


def _targets(slo: Mapping[str, float], place: str, class_name: str | None) -> list[Target]:
    prefix = "" if class_name is None else f"{class_name}: "
    targets = [Target(f"{prefix}{term.name}", term.limit_ms, term, class_name) for term in parse_slo(slo, place)]
    if GOODPUT in slo:
        targets.append(Target(f"{prefix}{GOODPUT}", slo[GOODPUT], None, class_name))
    return targets


def _tally(target: Target, results: Results, measured: Bools) -> Tally:
    if target.name == STABILITY:
        # Of the whole run: an overloaded one does not settle, and half of it says half as much about its growth.
        growth = wait_growth(results.tables.requests, results.run_window.end_ns)
        slope = growth.slope if growth else 0.0
        return Tally(slope, 1, slope)
    if target.class_name is not None:
        index = results.facts.class_names.index(target.class_name)
        measured = measured & (results.tables.requests["class_index"] == index)
    if target.term is None:
        good = results.is_good[measured] if results.is_good is not None else np.empty(0, dtype=np.bool_)
        return Tally(int(np.count_nonzero(~good)), len(good), float(good.mean()) if len(good) else None)
    values = results.distribution(target.term.metric, measured)
    value = to_ms(values.statistic(target.term.statistic))
    if target.term.statistic == "mean":
        return Tally((value or 0.0) * values.count, values.count, value)
    return Tally(values.num_above(target.limit * NS_PER_MS), values.count, value)
