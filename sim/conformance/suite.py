"""Many goldens: what became of each, and of all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sim.conformance.golden import Golden, read_golden
from sim.conformance.replay import Mismatch, NoPolicyError, first_mismatch, replay_for
from sim.errors import GoldenError


class Result(StrEnum):
    """What became of a golden."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"
    """No policy for its engine."""
    ERROR = "error"
    """Not a golden, or one with options or requests that make no sense."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One golden's result."""

    path: Path
    result: Result
    engine: str = ""
    """Engine and version, as far as the file could be read."""
    num_steps: int = 0
    """Steps of the log."""
    note: str = ""
    mismatch: Mismatch | None = None
    error: GoldenError | None = None


def examine(path: Path) -> Outcome:
    """Read one golden and replay it. What is wrong with the file is part of the outcome, not an exception."""
    golden: Golden | None = None
    note, mismatch, error = "", None, None
    try:
        golden = read_golden(path)
        replay = replay_for(golden)
        note, mismatch = replay.note, first_mismatch(replay)
        result = Result.PASSED if mismatch is None else Result.FAILED
    except NoPolicyError as refusal:
        result, note = Result.SKIPPED, refusal.found
    except GoldenError as refusal:
        result, error = Result.ERROR, refusal
    return Outcome(
        path=path,
        result=result,
        engine="" if golden is None else _engine_and_version(golden),
        num_steps=0 if golden is None else len(golden.lines),
        note=note,
        mismatch=mismatch,
        error=error,
    )


def _engine_and_version(golden: Golden) -> str:
    engine, version = (str(golden.scenario.get(key, "?")) for key in ("engine", "version"))
    return version if version.startswith(engine) else f"{engine} {version}"


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """1 when a replay differs from its log, else 2 when a file is no good or nothing could be replayed, else 0."""
    results = {outcome.result for outcome in outcomes}
    if Result.FAILED in results:
        return 1
    return 2 if Result.ERROR in results or Result.PASSED not in results else 0
