"""Variants on the same arrivals: how they differ, who wins, by how much and why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.build import draw, simulate
from sim.errors import ScenarioError
from sim.planning.verdict import verdict
from sim.provenance import save
from sim.results import Results
from sim.scenario import Scenario
from sim.storage import atomic_path
from sim.workload.base import Traffic

MAX_NAME = 60
"""Characters of a folder's name, so that no file system finds it too long."""


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

    scenarios: dict[str, Scenario]
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
        return verdict(self.summaries)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data; the content of `comparison.json`."""
        return {
            "baseline": self.baseline,
            "has_same_traffic": self.has_same_traffic,
            "verdict": self.verdict,
            "table": self.table,
            "variants": self.summaries,
        }

    def save(self, folder: Path | str) -> list[Path]:
        """Write `comparison.json`, and every run into a folder of its own; returns the files.

        Each file appears under its name only when it is complete.
        """
        folder = Path(folder)
        written: list[Path] = []
        for (name, results), folder_name in zip(self.results.items(), folder_names(self.results), strict=True):
            written += save(results, self.scenarios[name], folder / folder_name)
        written.append(folder / "comparison.json")
        with atomic_path(written[-1]) as path:
            path.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return written


def folder_names(variants: Iterable[str]) -> list[str]:
    """A folder for each variant, called like it as far as a file name can be, all of them different.

    Names are letters, digits, dots and dashes; numbers are added to those that would be the same, also where
    case makes no difference.
    """
    names: list[str] = []
    taken = {"comparison.json"}
    for variant in variants:
        plain = re.sub(r"[^\w.-]+", "_", variant).strip("._")[:MAX_NAME] or "_"
        numbered = (f"{plain}_{i}" for i in count(2))
        names.append(next(name for name in chain([plain], numbered) if name.casefold() not in taken))
        taken.add(names[-1].casefold())
    return names


def compare(*scenarios: Scenario) -> Comparison:
    """Simulate the variants of one scenario (itself first, then its `compare` section), or several scenarios.

    Traffic is drawn once for all variants that describe it alike, so that they meet the same requests.
    Raises ScenarioError when there is nothing to compare.
    """
    variants = variants_of(scenarios)
    drawn: list[tuple[Scenario, Traffic]] = []
    results: dict[str, Results] = {}
    traffics: list[Traffic] = []
    for name, scenario in variants.items():
        traffic = next((known for other, known in drawn if describe_same_traffic(scenario, other)), None)
        if traffic is None:
            traffic = draw(scenario)
            drawn.append((scenario, traffic))
        traffics.append(traffic)
        results[name] = simulate(scenario, traffic)
    return Comparison(variants, results, all(_is_same(traffics[0], traffic) for traffic in traffics[1:]))


def variants_of(scenarios: tuple[Scenario, ...]) -> dict[str, Scenario]:
    """What is compared, by name: one scenario and its variants, or several. Raises ScenarioError for nothing."""
    if len(scenarios) == 1:
        (base,) = scenarios
        variants = base.variants()
        if not variants:
            raise ScenarioError(
                base.place, "has nothing to compare", remedy="Give it a `compare` section, or name several scenarios."
            )
        policy = base.engine.policy
        changes_policy = any(variant.engine.policy != policy for variant in variants.values())
        name = policy if changes_policy and policy not in variants else "base"
        if name in variants:
            raise ScenarioError(f"{base.place}: compare.{name}", "a variant cannot be called like the base")
        return {name: base, **variants}
    named: dict[str, Scenario] = {}
    for scenario in scenarios:
        name = scenario.name if scenario.name not in named else scenario.place
        if name in named or scenario.place in (other.place for other in named.values()):
            raise ScenarioError(scenario.place, "is given twice")
        named[name] = scenario
    return named


def describe_same_traffic(one: Scenario, other: Scenario) -> bool:
    """Whether two scenarios describe their traffic alike."""
    return one.folder == other.folder and all(
        getattr(one, key) == getattr(other, key) for key in ("seed", "traffic", "arrivals", "scale", "run")
    )


def _is_same(one: Traffic, other: Traffic) -> bool:
    """Whether two runs met the same requests. How many of them clients send at once is not asked."""
    if one is other:
        return True
    for column in fields(Traffic):
        ours, theirs = getattr(one, column.name), getattr(other, column.name)
        if isinstance(ours, np.ndarray) and not np.array_equal(ours, theirs):
            return False
    return (one.has_next_turn is None) == (other.has_next_turn is None) and _say_the_same(one, other)


def _say_the_same(one: Traffic, other: Traffic) -> bool:
    """Whether rows share the same tokens with one another in both."""
    if one.tokens is other.tokens:
        return True
    pairs = ((one.tokens(row), other.tokens(row)) for row in range(len(one)))
    return all((a.prefix, a.output_stream) == (b.prefix, b.output_stream) for a, b in pairs)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
