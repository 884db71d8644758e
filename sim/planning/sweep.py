"""Many variants of one scenario: grids and lists over its keys, on all cores, going on where it was interrupted."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from sim.build import run
from sim.errors import ScenarioError, UserError
from sim.metrics.facts import versions
from sim.planning.compare import METRICS
from sim.planning.workers import Workers
from sim.scenario import Scenario
from sim.storage import atomic_path
from sim.workload.files import resolve_path

Values: TypeAlias = Mapping[str, Any]
"""Dotted key of the scenario -> its value at one point."""
Answer: TypeAlias = dict[str, Any]
"""Of a point: its `values`, and either its `summary` or the `error` that a user would see."""

MANY_POINTS = 1_000
"""More of them are simulated only for somebody who says that this is meant."""

POINTS = "points"
_LOCK = ".sweep.lock"
_FILE_KEYS = ("path", "fallback", "artifact", "model")


@dataclass(frozen=True)
class Sweep:
    """The answers of all points, in the order of the grid."""

    name: str
    answers: tuple[Answer, ...]
    num_resumed: int
    """Points that an earlier call had finished."""
    num_stale: int
    """Points of another scenario that were in the folder and were removed."""

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """A row per point: its values, the metrics of a comparison (None: not observed), and what limits it."""
        rows = []
        for answer in self.answers:
            summary = answer.get("summary")
            figures = {metric.name: metric.value(summary) if summary else None for metric in METRICS}
            end = {"limit": summary["limits"]["binds"], "error": ""} if summary else {"limit": "", **_error(answer)}
            rows.append({**answer["values"], **figures, **end})
        return rows

    def notes(self) -> Iterator[str]:
        """What was done with points that were in the folder before."""
        if self.num_resumed:
            yield f"{self.num_resumed:,} of {len(self.answers):,} points were finished before"
        if self.num_stale:
            yield f"{self.num_stale:,} points of another scenario were removed from the folder"

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the content of `sweep.json`. The same for the same scenario, however it was run."""
        return {"name": self.name, "points": list(self.answers)}

    def save(self, folder: Path) -> list[Path]:
        """Write `sweep.json` and its table as `sweep.csv`; each appears only when it is complete."""
        written = [folder / "sweep.json", folder / "sweep.csv"]
        with atomic_path(written[0]) as path:
            path.write_text(_json(self.to_dict()), encoding="utf-8")
        columns = dict.fromkeys(key for row in self.table for key in row)
        with atomic_path(written[1]) as path, path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(columns))
            writer.writeheader()
            writer.writerows(self.table)
        return written


@dataclass(frozen=True)
class Plan:
    """What a sweep of one scenario consists of."""

    scenario: Scenario

    @property
    def num_points(self) -> int:
        """How many points there are, without making them."""
        return sum(math.prod(len(values) for values in grid.values()) for grid in self._grids())

    def points(self) -> Iterator[Values]:
        """Every point; of a grid the last key varies fastest."""
        for grid in self._grids():
            for values in itertools.product(*grid.values()):
                yield dict(zip(grid, values, strict=True))

    def scenarios(self) -> list[tuple[Values, Scenario]]:
        """Every point with its complete scenario. Raises ScenarioError for the first that is none."""
        return [(values, self.scenario.changed(values, f"sweep ({_said(values)})")) for values in self.points()]

    def num_finished(self, folder: Path) -> int:
        """How many of the points `folder` holds already."""
        names = {point_name(scenario) for _, scenario in self.scenarios()}
        return len(names & {path.name for path in (folder / POINTS).glob("*.json")})

    def _grids(self) -> list[dict[str, list[Any]]]:
        sweep = self.scenario.sweep
        if not sweep:
            raise ScenarioError(
                self.scenario.place,
                "has nothing to sweep",
                remedy="Give it a section such as sweep: {engine.max_num_seqs: [64, 128, 256]}.",
            )
        parts = [sweep] if isinstance(sweep, dict) else sweep
        return [{key: value if isinstance(value, list) else [value] for key, value in part.items()} for part in parts]


def sweep(
    scenario: Scenario,
    folder: Path | None = None,
    *,
    workers: Workers | None = None,
    many: bool = False,
    progress: Callable[[int, int], None] = lambda num_finished, num_points: None,
) -> Sweep:
    """Simulate every point of the scenario's `sweep` section, all of them under its seed.

    With a `folder`, every point is stored there the moment it is finished, and those that are there
    already are not made again; points of another scenario, another version or other input files are
    removed. A point that cannot run (its model does not fit, say) has an `error` in place of a summary.
    Raises ScenarioError for a point that is no scenario, or for more than `MANY_POINTS` unless `many`;
    UserError when another sweep is writing to the folder, or when workers are lost.
    """
    plan = Plan(scenario)
    if plan.num_points > MANY_POINTS and not many:
        raise ScenarioError(
            f"{scenario.place}: sweep",
            f"these are {plan.num_points:,} points",
            valid=f"more than {MANY_POINTS:,} are run only if that is meant",
            remedy="Say so with --yes, or shorten the lists.",
        )
    points = plan.scenarios()
    if folder is None:
        answers = dict(_simulated(points, range(len(points)), workers or Workers()))
        return Sweep(scenario.name, tuple(answers[i] for i in range(len(points))), 0, 0)
    with _locked(folder):
        return _stored(scenario.name, points, folder / POINTS, workers or Workers(), progress)


def point_name(scenario: Scenario) -> str:
    """The file of a point, called after everything that its answer depends on: scenario, files, versions."""
    data = scenario.model_dump(mode="json", exclude={"name", "compare", "sweep"})
    content = {"scenario": data, "files": dict(_digests(data, scenario.folder)), "versions": versions()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24] + ".json"


def simulate_point(scenario: Scenario) -> dict[str, Any]:
    """The summary of one point, or the user's error that keeps it from running."""
    try:
        return {"summary": run(scenario).summary()}
    except UserError as error:
        return {"error": str(error)}


def _simulated(
    points: Sequence[tuple[Values, Scenario]], wanted: Sequence[int], workers: Workers
) -> Iterator[tuple[int, Answer]]:
    for position, answer in workers.each(simulate_point, [points[i][1] for i in wanted]):
        yield wanted[position], {"values": dict(points[wanted[position]][0]), **answer}


def _stored(
    name: str,
    points: Sequence[tuple[Values, Scenario]],
    folder: Path,
    workers: Workers,
    progress: Callable[[int, int], None],
) -> Sweep:
    folder.mkdir(exist_ok=True)
    paths = [folder / point_name(scenario) for _, scenario in points]
    stale = set(folder.glob("*.json")) - set(paths)
    for path in stale:
        path.unlink()
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    progress(len(points) - len(missing), len(points))
    for num_new, (i, answer) in enumerate(_simulated(points, missing, workers), start=1):
        with atomic_path(paths[i]) as path:
            path.write_text(_json(answer), encoding="utf-8")
        progress(len(points) - len(missing) + num_new, len(points))
    answers = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return Sweep(name, tuple(answers), len(points) - len(missing), len(stale))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of a folder; the lock goes with the process, however that ends."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                str(folder), "another sweep is writing to this folder", remedy="Wait for it, or give another --out."
            ) from None
        yield


def _digests(value: Any, folder: Path, key: str = "") -> Iterator[tuple[str, str]]:
    """The contents of every file that a scenario names, as far as they are there."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _digests(inner, folder, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _digests(inner, folder)
    elif isinstance(value, str) and key in _FILE_KEYS:
        path = resolve_path(value, folder)
        if path.is_file():
            yield value, hashlib.sha256(path.read_bytes()).hexdigest()


def _error(answer: Answer) -> dict[str, str]:
    return {"error": answer["error"]}


def _said(values: Values) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, allow_nan=False) + "\n"
