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
from typing import Any, Literal, NamedTuple

import yaml
from joblib import Parallel, delayed
from pydantic import Field, TypeAdapter

import sim
from sim.errors import InvariantError
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
    lacks: str | None = Field(default=None, description="as of an entry, where it is another")
    counts: Literal["yes", "explains", "input"] = Field(
        default="yes",
        description="explains: run otherwise than the paper says; input: the scenario was made from it; neither counts",
    )


class Entry(Options):
    """One experiment of a paper."""

    scenario: str
    title: str
    source: str
    figures: list[Figure]
    lacks: str = Field(default="", description="what a run needs and is not on record; of a stated set-up nothing")
    seeds: Count = Field(default=1, description="as many runs with other random numbers; their median counts")
    differs: str = Field(description="why ours are not the printed figures, as far as they are not")


class Row(NamedTuple):
    """A figure and what it comes to here, and what of its set-up is not on record."""

    figure: Figure
    value: float
    lacks: str

    @property
    def is_asked(self) -> bool:
        """Whether it is what reproduction means here: a ratio of two systems whose set-up is stated."""
        return bool(self.figure.over) and not self.lacks

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
        stated = "" if self.figure.counts != "yes" else "not in full" if self.lacks else "stated"
        ours = f"{_shown(self.value)} | {self.ratio:.2f}"
        return f"| {self.figure.name} | {printed} | {ours} | {stated} | {self.verdict} |"

    @property
    def verdict(self) -> str:
        """In words."""
        if self.figure.counts != "yes":
            return self.figure.counts
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
    return [
        Row(figure, median([value_of(runs, figure) for runs in draws]), lacks(entry, figure))
        for figure in entry.figures
    ]


def lacks(entry: Entry, figure: Figure) -> str:
    """What of its set-up is not on record."""
    return entry.lacks if figure.lacks is None else figure.lacks


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
    counted = [row for _, rows, _ in made for row in rows if row.figure.counts == "yes"]
    asked = [row for row in counted if row.is_asked]
    others = [row for row in counted if row.figure.over and not row.is_asked]
    single = [row for row in counted if not row.figure.over]
    parts = [
        INTRODUCTION.format(
            minutes=sum(seconds for _, _, seconds in made) / 60,
            asked=_met(asked),
            others=_met(others),
            single=_met(single),
            signs=sum(row.has_sign for row in asked + others),
            ratios=len(asked) + len(others),
        )
    ]
    parts += [section(entry, rows, seconds) for entry, rows, seconds in made]
    return "\n\n".join(parts) + "\n"


def _met(rows: Sequence[Row]) -> str:
    return f"{len(rows)} | {sum(row.is_close for row in rows)}"


INTRODUCTION = """# Papers, reproduced

Written by `make papers` ({minutes:.1f} minutes of one core): the scenarios are `scenarios/papers/*.yaml`, the printed
figures `scenarios/papers/printed.yaml`. Nothing is fitted to a printed figure.

| figures | printed | met: within 15 % or in the printed range |
|---|---:|---:|
| **ratios of two systems whose set-up is stated** | {asked} |
| ratios whose set-up is not stated in full | {others} |
| single rates, times, batches and shares | {single} |

Of all {ratios} ratios {signs} have the system ahead that the paper has ahead.

- **Stated** means that paper or artifact name model, GPUs, lengths, load, limits and what both systems may hold, and
  that we have it on record: read, not remembered. What is missing otherwise stands above each table.
- **Ratios** depend on the schedulers, which is what is simulated; single rates and times depend on the kernels and
  hosts of their year too. Where both systems' figures are printed and their ratio is not (Sarathi's table 4, VTC's
  runs), it is their quotient.
- **Costs** follow from the set-up alone: what was timed on that hardware, of that engine or by the paper's authors,
  where it has been published (`tests/scenarios/test_papers_set_ups.py` derives each figure from its source), else the
  `roofline`, which has the efficiencies of kernels of 2025.
- **Explains** marks rows that run otherwise than the paper says, **input** those that the scenario was made from;
  neither is counted. What is said of a difference is computed in `tests/scenarios/test_papers_differences.py` where
  it says "tested"."""


def section(entry: Entry, rows: Sequence[Row], seconds: float) -> str:
    """One experiment."""
    missing = sorted({row.lacks for row in rows if row.lacks and row.figure.counts == "yes"})
    draws = f", {entry.seeds} draws of the traffic, of which the median counts" if entry.seeds > 1 else ""
    lines = [
        f"## {entry.title}",
        "",
        f"{entry.source}. Run by `scenarios/papers/{entry.scenario}.yaml` in {seconds:.0f} s{draws}.",
        "",
        *[f"- {part}: {header(entry.scenario, part)}" for part in ("Set-up", "Costs")],
        *([f"- Not on record: {'; '.join(missing)}."] if missing else []),
        "",
        "| figure | printed | ours | ours / printed | set-up | |",
        "|---|---:|---:|---:|---|---|",
        *[row.line for row in rows],
        "",
        f"Why they differ: {' '.join(entry.differs.split())}",
    ]
    return "\n".join(lines)


def header(name: str, part: str) -> str:
    """What the header of a scenario says under one of its words, as one line."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    found = re.search(rf"# {part}:((?:.|\n#  )*)\n", text)
    if found is None:
        raise InvariantError(f"{name} does not state its {part}")
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
