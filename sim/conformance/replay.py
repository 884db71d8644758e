"""Replay a golden through an engine core and find the first difference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from sim.conformance.golden import Golden, Line
from sim.errors import GoldenError, did_you_mean
from sim.registry import Registry


class Replay(ABC):
    """Speaks one engine's log format. Drives an `EngineCore`: no clock, no costs, no refusals of our own."""

    FORMAT: ClassVar[object]
    """What the log's header must say under `format`."""

    note = ""
    """What a user should know about how the log is replayed."""

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
        """The replayed steps, each in the words of the log.

        May go on for ever, as a livelocked engine does, but each next line comes after a bounded time.
        """

    @abstractmethod
    def header(self) -> Line:
        """What the log's header should say, once all lines are out."""


@dataclass(frozen=True)
class Mismatch:
    """The first difference between a log and its replay."""

    logged: Line | None
    """The log's step, or its header when all steps agree; None when the replay goes on after the log's end."""
    replayed: Line | None
    """None when the replay ends before the log."""
    before: Line | None
    """The last step that agreed: the state in which the differing decision was taken."""

    @property
    def fields(self) -> list[str]:
        """Names of what differs, in the log's order. A field that is missing differs from any value."""
        logged, replayed = self.logged or {}, self.replayed or {}
        return [name for name in {**logged, **replayed} if _is_different(name, logged, replayed)]


class NoPolicyError(GoldenError):
    """A log of an engine that has no policy here."""


def replay_for(golden: Golden) -> Replay:
    """The replay of a golden's engine. Raises NoPolicyError, and GoldenError for an input that cannot be replayed."""
    engine = golden.field("engine", str)
    if engine not in REPLAYS:
        raise NoPolicyError(
            str(golden.path),
            f"no policy for engine {engine!r}",
            valid=f"can be replayed: {', '.join(REPLAYS)}",
            remedy=did_you_mean(engine, REPLAYS),
        )
    return REPLAYS.load(engine)(golden)


def first_mismatch(replay: Replay) -> Mismatch | None:
    """Run a replay beside its log; the first difference, or None when every field of every line agrees.

    Stops at the difference, at the latest one step behind the log's end.
    """
    before: Line | None = None
    replayed = replay.lines()
    for logged in replay.golden.lines:
        actual = next(replayed, None)
        if logged != actual:
            return Mismatch(logged, actual, before)
        before = logged
    for extra in replayed:
        return Mismatch(None, extra, before)
    header = replay.header()
    return None if header == replay.golden.header else Mismatch(replay.golden.header, header, before)


def _is_different(name: str, logged: Line, replayed: Line) -> bool:
    return (name in logged) != (name in replayed) or logged.get(name) != replayed.get(name)


REPLAYS: Registry[Replay] = Registry(
    "engine",
    "sim.conformance.replay:Replay",
    {
        "vllm": "sim.conformance.vllm_v1:VllmV1Replay",
        "vtc": "sim.conformance.vtc:VtcReplay",
    },
)
