"""Two separate trees of exceptions: the user's mistakes and our own bugs.

UserError                        the command line prints it without a traceback and exits with 2
├── ScenarioError                a scenario file or an override of it
├── TraceError                   a trace that traffic is read from
├── ArtifactError                a cost artifact, model description or GPU row
└── GoldenError                  a step log given to `servesim conformance`

InvariantError                   "this is a bug in servesim"; exit code 3
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something the user can mend. The message names place, finding, what is valid and what to do.

    `place` is a file, a file and line, or a dotted key of the scenario; `found` says what is wrong with
    it (with the offending value); `valid` what would be accepted; `remedy` what to do about it.
    """

    def __init__(self, place: str, found: str, valid: str = "", remedy: str = "") -> None:
        # SimPy and pickle make an exception again from its `args`.
        super().__init__(place, found, valid, remedy)
        self.place, self.found, self.valid, self.remedy = place, found, valid, remedy

    def __str__(self) -> str:
        message = f"{self.place}: {self.found}" if self.place else self.found
        message += f"; {self.valid}" if self.valid else ""
        message += "" if message.endswith((".", "?", "!")) else "."
        return f"{message} {self.remedy}".rstrip()


class ScenarioError(UserError):
    """A scenario (or an override on the command line) that cannot be simulated as written."""


class TraceError(UserError):
    """A trace file that is missing, empty or has a bad row; the place is `file:line`."""


class ArtifactError(UserError):
    """A cost artifact, model description or GPU row that is missing, corrupt or of another kind."""


class GoldenError(UserError):
    """A step log (or its input) that cannot be read."""


class InvariantError(Exception):
    """A law of the simulator is broken: never the user's fault, always ours."""

    def __str__(self) -> str:
        return f"this is a bug in servesim: {super().__str__()}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'?` for the closest of `known`, or an empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else ""


@contextmanager
def at_place(place: str) -> Iterator[None]:
    """Put the scenario's file in front of the key in errors that know only the key. Raises them again."""
    try:
        yield
    except (ScenarioError, ArtifactError) as error:
        raise type(error)(
            f"{place}: {error.place}" if error.place else place, error.found, valid=error.valid, remedy=error.remedy
        ) from error
