"""The figures that papers print, computed here: `make papers` writes docs/papers.md.

Each entry of scenarios/papers/printed.yaml names a scenario beside it, whose variants are the systems that the
paper compares, and its printed figures. A figure is a number of the summary of a run, or the largest load under
which a latency stays within a limit, of one variant or as the ratio of two; of several variants the best counts,
as where a paper shows the best configuration of a baseline.

Names of entries as arguments: print those, write nothing.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml
from joblib import Parallel, delayed
from pydantic import Field, TypeAdapter

import sim
from sim.options import Count, Options
from sim.planning.replications import at_load, load_of
from sim.scenario import Scenario

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scenarios" / "papers"
CLOSE = 0.15
"""A printed figure is met when ours differs by no more, as a part of it."""
PRECISION = 0.02
"""Of a search for a load, as a part of it."""


class Figure(Options):
    """One number that a paper prints."""

    name: str
    printed: float | tuple[float, float] = Field(description="or the range of several set-ups")
    of: list[str] = Field(description="variants; the largest of their values counts")
    over: list[str] = Field(default=[], description="variants that it is a ratio to")
    key: str = Field(default="", description="where the value stands in a summary; default: the load itself")
    under: dict[str, float] = Field(default={}, description="limits: the value at the largest load that keeps them")
    change: dict[str, Any] = Field(default={}, description="what to change in the scenario, by dotted key")
    explains: bool = Field(default=False, description="run otherwise than the paper says, to explain: not counted")


class Entry(Options):
    """One experiment of a paper."""

    scenario: str
    title: str
    source: str
    figures: list[Figure]
    seeds: Count = Field(default=1, description="as many runs with other random numbers; their median counts")
    differs: str = Field(description="why ours are not the printed figures, as far as they are not")


class Row(NamedTuple):
    """A figure and what it comes to here."""

    figure: Figure
    value: float

    @property
    def ratio(self) -> float:
        """Ours to the printed one; to the nearer end of a range, and 1 inside it."""
        printed = self.figure.printed
        low, high = printed if isinstance(printed, tuple) else (printed, printed)
        return self.value / min(max(self.value, low), high)

    @property
    def is_close(self) -> bool:
        """Whether the printed figure is met."""
        return abs(self.ratio - 1) <= CLOSE

    @property
    def has_sign(self) -> bool:
        """Whether the same system is ahead; asked of ratios only, and held by every other figure."""
        printed = self.figure.printed
        low = printed[0] if isinstance(printed, tuple) else printed
        return not self.figure.over or abs(low - 1) < CLOSE or (self.value > 1) == (low > 1)

    @property
    def line(self) -> str:
        """As in the document."""
        printed = _shown(self.figure.printed)
        return f"| {self.figure.name} | {printed} | {_shown(self.value)} | {self.ratio:.2f} | {self.verdict} |"

    @property
    def verdict(self) -> str:
        """In words."""
        if self.figure.explains:
            return "explains"
        if self.is_close:
            return "within 15 %" if isinstance(self.figure.printed, float) else "in the range"
        if not self.figure.over:
            return "differs"
        return "same direction" if self.has_sign else "other direction"


def entries() -> dict[str, Entry]:
    """All of them by the name of their scenario."""
    data = yaml.safe_load((FOLDER / "printed.yaml").read_text(encoding="utf-8"))
    return {entry.scenario: entry for entry in TypeAdapter(list[Entry]).validate_python(data)}


def rows(entry: Entry) -> list[Row]:
    """Run what an entry asks for."""
    draws = [Runs(entry.scenario, draw) for draw in range(entry.seeds)]
    return [Row(figure, median([value_of(runs, figure) for runs in draws])) for figure in entry.figures]


def value_of(runs: Runs, figure: Figure) -> float:
    """A figure by some runs."""

    def best(variants: Sequence[str]) -> float:
        return max(runs.value(variant, figure) for variant in variants)

    return best(figure.of) / best(figure.over) if figure.over else best(figure.of)


class Runs:
    """The runs of one scenario and its variants, each made once; `base` is the scenario itself."""

    def __init__(self, name: str, draw: int = 0) -> None:
        """`draw`: which random numbers; 0: those of the scenario."""
        scenario = sim.load_scenario(FOLDER / f"{name}.yaml")
        self._variants = {"base": scenario, **scenario.variants()}
        self._always = {"seed": scenario.seed + draw}
        self._summary = cache(self._simulate)
        self._largest_load = cache(self._search)

    def value(self, variant: str, figure: Figure) -> float:
        """A figure of one variant. Raises KeyError for a key that its summary lacks."""
        change = json.dumps(figure.change)
        if not figure.under:
            return _at(self._summary(variant, change), figure.key)
        load = self._largest_load(variant, change, json.dumps(figure.under))
        return _at(self._summary(variant, change, load), figure.key) if figure.key else load

    def _scenario(self, variant: str, change: str) -> Scenario:
        return self._variants[variant].changed(json.loads(change) | self._always, "change")

    def _simulate(self, variant: str, change: str, load: float | None = None) -> dict[str, Any]:
        scenario = self._scenario(variant, change)
        if load is not None:
            scenario = at_load(scenario, load / load_of(scenario).value)
        return sim.run(scenario).summary()

    def _search(self, variant: str, change: str, under: str) -> float:
        """The largest load whose run keeps all limits, by bisection, as the papers search for it."""
        limits, load = json.loads(under), load_of(self._scenario(variant, change))

        def keeps(value: float) -> bool:
            metrics = self._summary(variant, change, value)["metrics"]
            return all(metrics[name][statistic] <= limits[f"{statistic}_{name}"] for statistic, name in terms)

        terms = [tuple(key.split("_", 1)) for key in limits]
        low = high = load.value
        while not keeps(low):
            low, high = low / 2, low
        while low == high or keeps(high):
            low, high = high, high * 2
        while high / low > 1 + PRECISION and not (load.is_whole and high - low <= 1):
            middle = round((low + high) / 2) if load.is_whole else (low * high) ** 0.5
            low, high = (middle, high) if keeps(middle) else (low, middle)
        return low


def _at(summary: dict[str, Any], key: str) -> float:
    value: Any = summary
    for part in key.split("."):
        value = value[part]
    return float(value)


def document(made: Sequence[tuple[Entry, list[Row], float]]) -> str:
    """The content of docs/papers.md."""
    counted = [row for _, rows, _ in made for row in rows if not row.figure.explains]
    ratios = [row for row in counted if row.figure.over]
    parts = [
        INTRODUCTION.format(
            num=len(counted),
            close=sum(row.is_close for row in counted),
            ratios=len(ratios),
            close_ratios=sum(row.is_close for row in ratios),
            signs=sum(row.has_sign for row in ratios),
            minutes=sum(seconds for _, _, seconds in made) / 60,
        )
    ]
    parts += [section(entry, rows, seconds) for entry, rows, seconds in made]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """# Papers, reproduced

Written by `make papers` ({minutes:.0f} minutes of one core): the scenarios are `scenarios/papers/*.yaml`, the printed
figures `scenarios/papers/printed.yaml`. Nothing is fitted to a printed figure. Where a paper does not say what a run
needs, the scenario's header says what was taken instead.

Of {num} figures {close} are met within 15 % (or lie in the printed range). {ratios} of them are ratios of two systems:
{close_ratios} of these are met, and {signs} have the system ahead that the paper has ahead. Rows marked "explains" run
otherwise than the paper says and are not counted. Ratios depend on the schedulers, which is what is simulated; rates
and times depend on kernels and hosts of their year, which the `roofline` cost does not know: it has the efficiencies
of kernels of 2025. Where an experiment says `linear`, its costs were measured by the paper's own authors."""


def section(entry: Entry, rows: Sequence[Row], seconds: float) -> str:
    """One experiment."""
    kind = sim.load_scenario(FOLDER / f"{entry.scenario}.yaml").cost.kind
    draws = f", {entry.seeds} draws of the traffic, of which the median counts" if entry.seeds > 1 else ""
    lines = [
        f"## {entry.title}",
        "",
        f"{entry.source}. Set-up: {set_up(entry.scenario)} Costs: `{kind}`. Run by "
        f"`scenarios/papers/{entry.scenario}.yaml` in {seconds:.0f} s{draws}.",
        "",
        "| figure | printed | ours | ours / printed | |",
        "|---|---:|---:|---:|---|",
        *[row.line for row in rows],
        "",
        f"Why they differ: {' '.join(entry.differs.split())}",
    ]
    return "\n".join(lines)


def set_up(name: str) -> str:
    """What the header of a scenario says of it, as one line."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    found = re.search(r"# Set-up:((?:.|\n#  )*)\n", text)
    assert found is not None, f"{name} does not state its set-up"
    return " ".join(found[1].replace("\n#", " ").split())


def _shown(value: float | tuple[float, float]) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:g} to {value[1]:g}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _timed(entry: Entry) -> tuple[Entry, list[Row], float]:
    start = time.process_time()
    return entry, rows(entry), time.process_time() - start


def main(names: Sequence[str]) -> None:
    """Run all entries, or those that are named."""
    known = entries()
    chosen = [known[name] for name in names] or list(known.values())
    made = Parallel(n_jobs=2)(delayed(_timed)(entry) for entry in chosen)
    if not names:
        (ROOT / "docs" / "papers.md").write_text(document(made), encoding="utf-8")
    print(document(made) if names else f"wrote docs/papers.md: {len(made)} experiments")


if __name__ == "__main__":
    main(sys.argv[1:])
