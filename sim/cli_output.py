"""What commands have in common: a scenario in, an answer out, on the terminal or in a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sim.errors import ScenarioError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sim.scenario import Scenario

MIN_COLUMNS = 80
"""A narrower terminal breaks our lines; tables squeezed into it would lose their figures."""


def load(path: Path, overrides: list[str] | None, seed: int | None, allow_imports: bool) -> Scenario:
    """The scenario of a command line."""
    from sim.scenario import load_scenario

    return load_scenario(path, overrides or (), seed=seed, allow_imports=allow_imports)


def check_folder(out: Path | None) -> None:
    """Complain about an impossible output folder before the run rather than after it."""
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ScenarioError(f"--out {out}", f"cannot be made a folder: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise ScenarioError(f"--out {out}", "cannot be written to")


def print_json(data: Any) -> None:
    """Print data as JSON, and nothing else."""
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


def show(renderables: Iterable[RenderableType]) -> None:
    """Print a report as wide as the terminal."""
    from rich.console import Console

    console = Console(soft_wrap=False, highlight=False)
    console.width = max(console.width, MIN_COLUMNS)
    for renderable in renderables:
        console.print(renderable, markup=False)


def show_table(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows as a table or as JSON."""
    if as_json:
        print_json(rows)
        return
    from sim.report.console import rows_table

    show([rows_table(title, rows)])


def name_files(written: Sequence[Path]) -> None:
    """Say what was written, a line for each folder."""
    by_folder: dict[Path, list[str]] = {}
    for path in written:
        by_folder.setdefault(path.parent, []).append(path.name)
    for folder, names in by_folder.items():
        typer.echo(f"wrote {folder}: {', '.join(names)}")


def give(said: dict[str, Any], report: Iterable[RenderableType], out: Path | None, name: str, as_json: bool) -> None:
    """Show an answer, and store it under `name` if a folder is given."""
    from sim.storage import atomic_path

    if out is not None:
        with atomic_path(out / name) as path:
            path.write_text(json.dumps(said, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(said)
        return
    show(report)
    if out is not None:
        name_files([out / name])
