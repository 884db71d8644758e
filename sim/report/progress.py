"""How far a study is, on a terminal, and how much longer it will take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_line() -> Iterator[Callable[[str, int | None, int | None], None]]:
    """A function of what is being done, how much of it is and how much there is (None: not known).

    It keeps one line of stderr up to date, which vanishes in the end; without a terminal it does nothing.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda what, num, total: progress.update(task, description=what, completed=num, total=total)


@contextmanager
def runs_line() -> Iterator[Callable[[str, int], None]]:
    """The same for studies that do not know how many runs they will need: what is being done, and how many are made."""
    with progress_line() as progress:
        yield lambda what, num_runs: progress(f"{what}, {num_runs} runs", None, None)
