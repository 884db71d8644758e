"""Outcomes of goldens as lines and tables to print. Prints nothing itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sim.conformance.golden import INPUT_SUFFIX, Line
from sim.conformance.replay import Mismatch
from sim.conformance.suite import Outcome, Result

MAX_ITEMS_SHOWN = 8
MAX_CHARACTERS_SHOWN = 120
MAX_ENGINE_CHARACTERS = 24


def heading(width: int) -> str:
    """The line above all rows; `width` is that of `name_width`."""
    return _columns("scenario", "engine", "steps", "seconds", "result", width)


def row(outcome: Outcome, seconds: float, width: int) -> str:
    """One golden's line; `seconds` is how long the caller waited for it."""
    result = str(outcome.result) + (f" ({outcome.note})" if outcome.note else "")
    name, steps = _name(outcome.path), str(outcome.num_steps)
    return _columns(name, outcome.engine, steps, f"{seconds:.2f}", result, width)


def name_width(paths: Sequence[Path]) -> int:
    """Width of the column of names."""
    return max(len("scenario"), *(len(_name(path)) for path in paths))


def _columns(name: str, engine: str, steps: str, seconds: str, result: str, width: int) -> str:
    engine = _cut(engine, MAX_ENGINE_CHARACTERS)
    return f"{name:<{width}}  {engine:<{MAX_ENGINE_CHARACTERS}}  {steps:>6}  {seconds:>7}  {result}"


def _name(path: Path) -> str:
    return path.name.removesuffix(INPUT_SUFFIX)


def details(outcome: Outcome) -> Iterator[RenderableType]:
    """Of a golden that failed: the state before the first difference, and the differing step side by side."""
    mismatch = outcome.mismatch
    if mismatch is None:
        return
    yield Text(f"\n{_name(outcome.path)}: {_difference(mismatch)}", style="bold")
    yield Text(_state(mismatch.before))
    yield side_by_side(mismatch)


def closing(outcomes: Sequence[Outcome]) -> str:
    """The sum of it all. Its last line is `N passed, N failed`."""
    count = Counter(outcome.result for outcome in outcomes)
    lines = [f"{count[Result.PASSED]} passed, {count[Result.FAILED]} failed"]
    others = [f"{count[Result.SKIPPED]} skipped for lack of a policy", f"{count[Result.ERROR]} could not be replayed"]
    uncounted = [text for text in others if not text.startswith("0 ")]
    if uncounted:
        lines.insert(0, f"Not counted: {', '.join(uncounted)}")
    return "\n".join(lines)


def _difference(mismatch: Mismatch) -> str:
    logged, replayed = mismatch.logged or {}, mismatch.replayed or {}
    if not logged:
        return f"the log ends, the replay goes on with step {replayed.get('step')}"
    if not replayed:
        return f"the replay ends before step {logged.get('step')} of the log"
    place = f"step {logged.get('step')}" if "step" in replayed else "all steps agree, the header"
    return f"{place} differs in {', '.join(mismatch.fields)}"


def _state(before: Line | None) -> str:
    if before is None:
        return "before it: nothing runs, nothing waits"
    lines = [f"state before it (end of step {before.get('step')}):"]
    names = ("scheduled", "running", "waiting", "free_blocks")
    return "\n   ".join(lines + [f"{name} {_cut(_compact(before.get(name)))}" for name in names])


def side_by_side(mismatch: Mismatch) -> Table:
    """Every field of the step in the log and in the replay; `>` marks those that differ."""
    table = Table("", "field", "log", "replay", box=None, padding=(0, 2, 0, 0), header_style="underline")
    logged, replayed, differing = mismatch.logged or {}, mismatch.replayed or {}, set(mismatch.fields)
    for name in {**logged, **replayed}:
        mark, style = (">", "bold") if name in differing else ("", "")
        sides = ((logged, replayed), (replayed, logged))
        values = [_shown(mine.get(name), other.get(name)) if name in mine else "(absent)" for mine, other in sides]
        table.add_row(mark, name, *(Text(value) for value in values), style=style)
    return table


def _shown(value: Any, other: Any) -> str:
    """A value, shortened to what distinguishes it from the other side's."""
    if isinstance(value, list) and isinstance(other, list) and value != other:
        pairs = zip(value, other, strict=False)
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        rest = value[num_equal : num_equal + MAX_ITEMS_SHOWN]
        num_more = len(value) - num_equal - len(rest)
        before = [f"({num_equal} equal)"] if num_equal else []
        after = [f"({num_more} more)"] if num_more else []
        return f"[{', '.join([*before, *map(_compact, rest), *after])}]"
    if isinstance(value, dict) and isinstance(other, dict) and value != other:
        own = {key: item for key, item in value.items() if key not in other or other[key] != item}
        equal = [f"({len(value) - len(own)} equal)"] if len(own) < len(value) else []
        shown = [f"{key}: {_compact(item)}" for key, item in own.items()]
        return _cut(f"{{{', '.join([*equal, *shown])}}}")
    return _cut(_compact(value))


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _cut(text: str, length: int = MAX_CHARACTERS_SHOWN) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
