"""Replay a golden through an engine core and find the first difference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from sim.conformance.golden import Golden, Line
from sim.errors import GoldenError
from sim.registry import Registry


class Replay(ABC):
    """Speaks one engine's log format. Drives an `EngineCore`: no clock, no costs, no refusals of our own."""

    FORMAT: ClassVar[object]
    """What the log's header must say under `format`."""

    def __init__(self, golden: Golden) -> None:
        """Builds the core. Raises GoldenError for options or requests that the policy does not know."""
        found = golden.header.get("format")
        if found != self.FORMAT:
            raise GoldenError(
                str(golden.path), f"its log has format {found!r}", valid=f"this engine's logs have {self.FORMAT!r}"
            )
        self.golden = golden

    @abstractmethod
    def lines(self) -> Iterator[Line]:
        """The replayed steps, each in the words of the log."""

    @abstractmethod
    def header(self) -> Line:
        """What the log's header should say, once all lines are out."""


@dataclass(frozen=True)
class Mismatch:
    """The first difference between a log and its replay."""

    field: str
    expected: Any
    actual: Any
    line: Line | None
    """The log's line; None when the replay goes on after the log's end."""
    replayed: Line | None
    before: Line | None
    """The last line that agreed: the state in which the differing decision was taken."""


def replay_for(golden: Golden) -> Replay:
    """The replay of a golden's engine. Raises GoldenError for an engine that has no policy here."""
    engine = golden.scenario.get("engine")
    if not isinstance(engine, str) or engine not in REPLAYS:
        raise GoldenError(
            str(golden.path), f"is a log of engine {engine!r}", valid=f"can be replayed: {', '.join(REPLAYS)}"
        )
    return REPLAYS.load(engine)(golden)


def check(golden: Golden) -> Mismatch | None:
    """Replay a golden; the first difference, or None when every field of every line agrees."""
    replay = replay_for(golden)
    before: Line | None = None
    replayed = replay.lines()
    for expected in golden.lines:
        actual = next(replayed, None)
        if (mismatch := _compare(expected, actual, before)) is not None:
            return mismatch
        before = expected
    for extra in replayed:
        return _compare(None, extra, before)
    return _compare(golden.header, replay.header(), before)


def _compare(expected: Line | None, actual: Line | None, before: Line | None) -> Mismatch | None:
    if expected is None or actual is None:
        return Mismatch("line", expected, actual, expected, actual, before)
    for field in chain(expected, actual):
        wanted, got = expected.get(field), actual.get(field)
        if wanted != got or (field in expected) != (field in actual):
            return Mismatch(field, wanted, got, expected, actual, before)
    return None


REPLAYS: Registry[Replay] = Registry(
    "engine",
    "sim.conformance.replay:Replay",
    {"vllm": "sim.conformance.vllm_v1:VllmV1Replay"},
)
