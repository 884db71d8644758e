"""One scenario again and again with other random numbers, until its figures are known well enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sim.build import run
from sim.metrics.distribution import Bools, to_ms
from sim.metrics.stats import LEVEL, Floats, Interval, mean_interval
from sim.planning.probe import CUTS, SteadyPart, common_warm_up, steady_part
from sim.planning.replications import is_steady, replication, replication_note
from sim.planning.workers import Workers
from sim.results import Results
from sim.scenario import Scenario

MAX_REPLICATIONS = 100
_FIRST, _MORE = 12, 4
"""Replications before anybody asks how precise the figures are, as for a capacity, and between two such questions."""

LATENCIES = {
    f"{metric}_{statistic}_ms": (metric, statistic)
    for metric in ("ttft", "itl", "e2e")
    for statistic in ("mean", "p50", "p99")
}
"""Figure -> metric and statistic."""
WATCHED = ("ttft_p99_ms", "itl_p99_ms")
"""Figures that must be precise before the replications end, where there are any."""


class Replication(NamedTuple):
    """What one replication says."""

    figures: tuple[dict[str, float | None], ...]
    """For every share of first requests in `CUTS` that may be cut (or for none)."""
    seen: Floats
    """How many requests each one found in the system; empty if no warm-up is to be cut."""
    instability: str | None
    """The verdict on a run whose waits grow; None for a steady one."""
    num_requests: int


@dataclass(frozen=True)
class Replicated:
    """Figures with their confidence intervals, from independent replications."""

    scenario: Scenario
    replications: tuple[Replication, ...]
    precision: float
    level: float = LEVEL

    @property
    def instability(self) -> str | None:
        """What is said where most replications are unstable: their percentiles then mean nothing."""
        said = [one.instability for one in self.replications if one.instability]
        return said[0] if 2 * len(said) > len(self.replications) else None

    @cached_property
    def cut(self) -> int:
        """The warm-up, as a position in `CUTS`."""
        return common_warm_up([one.seen for one in self.replications])[0]

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Figure -> its mean over the replications that observed it; no latencies of an unstable system."""
        intervals = {}
        for name in self.replications[0].figures[0]:
            figures = [one.figures[self.cut] for one in self.replications]
            values = [value for one in figures if (value := one[name]) is not None]
            if len(values) > 1 and not (self.instability and name in LATENCIES):
                intervals[name] = mean_interval(np.array(values), self.level)
        return intervals

    @property
    def is_precise(self) -> bool:
        """Whether the half-widths of the watched figures are as small as was asked for."""
        known = self.intervals
        return all(known[name].relative_half_width <= self.precision for name in WATCHED if name in known)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data; the content of `replications.json`."""
        num = CUTS[self.cut] * np.mean([one.num_requests for one in self.replications])
        return {
            "name": self.scenario.name,
            "replications": len(self.replications),
            "precision": self.precision,
            "is_precise": self.is_precise,
            "instability": self.instability,
            "method": f"{replication_note(self.scenario)}; of each run the first {num:.0f} requests are cut as warm-up "
            "(MSER-5 on the mean number in the system)",
            "figures": {
                name: {"value": one.value, "ci_low": one.low, "ci_high": one.high, "level": one.level}
                for name, one in self.intervals.items()
            },
        }


def replicate(
    scenario: Scenario,
    *,
    precision: float = 0.05,
    max_replications: int = MAX_REPLICATIONS,
    workers: Workers | None = None,
    progress: Callable[[str, int], None] = lambda what, num_runs: None,
) -> Replicated:
    """Replicate a scenario until the half-widths of the p99 of TTFT and ITL are at most `precision` of them.

    It ends early where the system turns out to be unstable, and at `max_replications` (at least 2) in any
    case. The replications are the same ones whatever `workers` make them. Raises what a run raises.
    """
    replications: list[Replication] = []
    wanted = min(_FIRST, max_replications)
    while True:
        tasks = [replication(scenario, index) for index in range(len(replications), wanted)]
        made: dict[int, Replication] = {}
        for position, one in (workers or Workers()).each(observe_figures, tasks):
            made[position] = one
            progress("replicating", len(replications) + len(made))
        replications += [made[position] for position in range(len(tasks))]
        found = Replicated(scenario, tuple(replications), precision)
        if found.is_precise or len(replications) >= max_replications:
            return found
        wanted = min(len(replications) + _MORE, max_replications)


def observe_figures(scenario: Scenario) -> Replication:
    """Run a scenario and compute its figures over the steady part, or its own window if it has a warm-up."""
    results = run(scenario)
    summary = results.summary()
    steady = SteadyPart((results.is_measured,), 0, np.empty(0))
    if is_steady(scenario) and not scenario.run.warmup_s:
        steady = steady_part(results)
    figures = []
    for measured in steady.measured:
        figures.append({name: _latency(results, measured, *of) for name, of in LATENCIES.items()})
        figures[-1]["output_tokens_per_s"] = summary["throughput"]["output_tokens_per_s"]
        if results.is_good is not None and measured.any():
            figures[-1]["good_share"] = float(results.is_good[measured].mean())
    unstable = summary["steady"]["verdict"] if summary["steady"]["is_stable"] is False else None
    return Replication(tuple(figures), steady.seen, unstable, len(results.is_measured))


def _latency(results: Results, measured: Bools, metric: str, statistic: str) -> float | None:
    return to_ms(results.distribution(metric, measured).statistic(statistic))
