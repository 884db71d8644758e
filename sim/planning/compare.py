"""Variants on the same arrivals: how they differ, who wins, by how much and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.build import draw, simulate
from sim.errors import ScenarioError
from sim.results import Results
from sim.scenario import Scenario
from sim.storage import atomic_path
from sim.workload.base import Traffic

TIE = 0.02
"""Two variants whose figures differ by less than this part count as equal."""


class Metric(NamedTuple):
    """One column of a comparison."""

    name: str
    value: Callable[[Mapping[str, Any]], float | None]
    """From a summary."""


METRICS = (
    Metric("output_tokens_per_s", lambda summary: summary["throughput"]["output_tokens_per_s"]),
    Metric("goodput_requests_per_s", lambda summary: summary["throughput"]["goodput_requests_per_s"]),
    Metric("ttft_mean_ms", lambda summary: summary["metrics"]["ttft_ms"]["mean"]),
    Metric("ttft_p99_ms", lambda summary: summary["metrics"]["ttft_ms"]["p99"]),
    Metric("itl_p99_ms", lambda summary: summary["metrics"]["itl_ms"]["p99"]),
    Metric("e2e_mean_ms", lambda summary: summary["metrics"]["e2e_ms"]["mean"]),
    Metric("e2e_p99_ms", lambda summary: summary["metrics"]["e2e_ms"]["p99"]),
    Metric("mean_num_running", lambda summary: summary["iterations"]["mean_num_running"]),
    Metric("makespan_s", lambda summary: summary["makespan_s"]),
)


@dataclass(frozen=True)
class Comparison:
    """The results of all variants; the first one is the baseline that ratios refer to."""

    results: dict[str, Results]
    has_same_traffic: bool

    @property
    def baseline(self) -> str:
        """Name of the first variant."""
        return next(iter(self.results))

    @cached_property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """Every variant's summary."""
        return {name: results.summary() for name, results in self.results.items()}

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """One row per variant: every metric's value (None: not observed) and its ratio to the baseline."""
        base = self.summaries[self.baseline]
        rows = []
        for name, summary in self.summaries.items():
            values = {metric.name: metric.value(summary) for metric in METRICS}
            ratios = {metric.name: _ratio(values[metric.name], metric.value(base)) for metric in METRICS}
            rows.append({"variant": name, "values": values, "ratios": ratios, "limit": summary["limits"]["binds"]})
        return rows

    @cached_property
    def verdict(self) -> str:
        """One sentence: who wins, by how much, and why."""
        return _verdict(self.summaries)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data; the content of `comparison.json`."""
        return {
            "baseline": self.baseline,
            "has_same_traffic": self.has_same_traffic,
            "verdict": self.verdict,
            "table": self.table,
            "variants": self.summaries,
        }

    def save(self, folder: Path | str) -> Path:
        """Write `comparison.json` into `folder`; returns its path. The file appears when it is complete."""
        path = Path(folder) / "comparison.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return path


def compare(*scenarios: Scenario) -> Comparison:
    """Simulate the variants of one scenario (itself first, then its `compare` section), or several scenarios.

    Traffic is drawn once for all variants that describe it alike, so that they meet the same requests.
    Raises ScenarioError when there is nothing to compare.
    """
    variants = _variants(scenarios)
    drawn: list[tuple[Scenario, Traffic]] = []
    results: dict[str, Results] = {}
    traffics: list[Traffic] = []
    for name, scenario in variants.items():
        traffic = next((known for other, known in drawn if _describe_same_traffic(scenario, other)), None)
        if traffic is None:
            traffic = draw(scenario)
            drawn.append((scenario, traffic))
        traffics.append(traffic)
        results[name] = simulate(scenario, traffic)
    return Comparison(results, all(_is_same(traffics[0], traffic) for traffic in traffics[1:]))


def _variants(scenarios: tuple[Scenario, ...]) -> dict[str, Scenario]:
    if len(scenarios) == 1:
        (base,) = scenarios
        variants = base.variants()
        if not variants:
            raise ScenarioError(
                base.place, "has nothing to compare", remedy="Give it a `compare` section, or name several scenarios."
            )
        name = base.engine.policy if base.engine.policy not in variants else base.name
        if name in variants:
            raise ScenarioError(f"{base.place}: compare", f"a variant is called like the base, {name!r}")
        return {name: base, **variants}
    named: dict[str, Scenario] = {}
    for scenario in scenarios:
        name = scenario.name if scenario.name not in named else scenario.place
        if name in named:
            raise ScenarioError(scenario.place, "is given twice")
        named[name] = scenario
    return named


def _describe_same_traffic(one: Scenario, other: Scenario) -> bool:
    return one.folder == other.folder and all(
        getattr(one, key) == getattr(other, key) for key in ("seed", "traffic", "arrivals", "run")
    )


def _is_same(one: Traffic, other: Traffic) -> bool:
    """Whether two runs met the same requests."""
    columns = ("class_index", "arrival_ns", "think_ns", "prompt_tokens", "output_tokens")
    return all(np.array_equal(getattr(one, column), getattr(other, column)) for column in columns)


# --- the sentence -----------------------------------------------------------------------------------


class _Yardstick(NamedTuple):
    phrase: str
    """`{0}` stands for how many times the winner is better, `{1}` for whom it beats."""
    value: Callable[[Mapping[str, Any]], float | None]
    is_more_better: bool


_YARDSTICKS = (
    _Yardstick("its requests within the SLO per second are {0} those of {1}", METRICS[1].value, True),
    _Yardstick("its output tokens per second are {0} those of {1}", METRICS[0].value, True),
    _Yardstick("its mean end-to-end latency is {0} shorter than that of {1}", METRICS[5].value, False),
)


def _verdict(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """The first yardstick on which the variants differ decides: goodput (where there is an SLO), output, latency."""
    for yardstick in _YARDSTICKS:
        values = {name: yardstick.value(summary) or 0.0 for name, summary in summaries.items()}
        if max(values.values()) <= min(values.values()) * (1 + TIE):
            continue
        ranked = sorted(values, key=lambda name: values[name], reverse=yardstick.is_more_better)
        factors = {name: _factor(values[name], values[ranked[0]]) for name in ranked}
        level = [name for name in ranked if factors[name] < 1 + TIE]
        beaten = [name for name in ranked if name not in level]
        lead = f"{level[0]} wins" + (f" (level with {', '.join(level[1:])})" if level[1:] else "")
        margins = _margins(yardstick, {name: factors[name] for name in beaten})
        reason = _reason(summaries[beaten[-1]], summaries[level[0]])
        return f"{lead}: {margins}, because {beaten[-1]} {reason}."
    return f"Nobody wins: goodput, output and latency differ by less than {TIE:.0%}."


def _margins(yardstick: _Yardstick, factors: Mapping[str, float]) -> str:
    """By how much the winner is better than each other one; some may have nothing to compare with."""
    finite = [(f"{factor:.3g} times", name) for name, factor in factors.items() if factor != float("inf")]
    nothing = [name for name, factor in factors.items() if factor == float("inf")]
    parts = [yardstick.phrase.format(*finite[0]), *(" ".join(margin) for margin in finite[1:])] if finite else []
    parts += [f"{' and '.join(nothing)} had none"] if nothing else []
    return ", ".join(parts)


def _factor(value: float, best: float) -> float:
    """How many times better `best` is, >= 1."""
    high, low = max(value, best), min(value, best)
    return high / low if low > 0 else float("inf")


def _reason(loser: Mapping[str, Any], winner: Mapping[str, Any]) -> str:
    """What the loser's tables show most of, beyond the winner's: the largest of several lost shares."""
    reasons = {
        "left places of the batch idle: {0:.0%} of the time that places were held, their request had finished": (
            lambda summary: summary["waste"]["finished_slot_share"]
        ),
        "computed padding: {0:.0%} of its tokens were for nobody": lambda summary: summary["waste"]["padding_share"],
        "threw work away: preemption cost {0:.0%} of the tokens in recomputation": _recomputed_share,
        "held KV that it did not use: {0:.0%} of the reserved memory": (
            lambda summary: summary["kv"]["reserved_unused_share"] if summary["limits"]["shares"]["kv"] > 0.1 else 0.0
        ),
        "held requests back with the device idle, waiting for company: {0:.0%} of the time": (
            lambda summary: summary["limits"]["shares"]["admission"] * (1 - (summary["iterations"]["busy_share"] or 0))
        ),
    }
    shares = {text: (share(loser), share(loser) - share(winner)) for text, share in reasons.items()}
    text = max(shares, key=lambda text: shares[text][1])
    if shares[text][1] >= 0.05:
        return text.format(shares[text][0])
    running, best = (summary["iterations"]["mean_num_running"] or 0.0 for summary in (loser, winner))
    queue, e2e = (loser["metrics"][key]["mean"] or 0.0 for key in ("queue_ms", "e2e_ms"))
    if running < 0.9 * best:
        return f"had {running:.3g} requests running on average against {best:.3g}" + _queued(queue, e2e)
    if e2e and queue >= 0.05 * e2e:
        return f"spent {queue / e2e:.0%} of its latency in the queue"
    return f"is limited by {loser['limits']['verdict']}"


def _queued(queue_ms: float, e2e_ms: float) -> str:
    return f", and its requests spent {queue_ms / e2e_ms:.0%} of their time in the queue" if queue_ms > 0.05 * e2e_ms else ""


def _recomputed_share(summary: Mapping[str, Any]) -> float:
    iterations = summary["iterations"]
    computed = (iterations["mean_scheduled_tokens"] or 0.0) * iterations["count"]
    return float(summary["kv"]["recomputed_tokens"] / computed) if computed else 0.0


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
