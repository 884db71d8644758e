"""Contract of the doors: which requests an engine turns away before they enter its queue.

A door answers at once: a request that it refuses is over, and its client knows. Check, then act: all doors
of an engine are asked, and only if none refuses is each of them told that the request comes in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, Self

from pydantic import Field

from sim.options import Options
from sim.registry import Registry
from sim.request import Request


class Inside(Protocol):
    """What a door may know of its engine."""

    @property
    def num_waiting(self) -> int:
        """Requests that are in and have not been admitted to the batch, those on their way to the queue included."""


class DoorOptions(Options):
    """Base of every door's options."""

    kind: str = Field(description="name of a door")


class Door(ABC):
    """One rule. Times are integer nanoseconds of the run's clock and never go back."""

    Options: ClassVar[type[DoorOptions]]

    @classmethod
    @abstractmethod
    def build(cls, options: DoorOptions, class_names: Sequence[str]) -> Self:
        """A door through which nobody has come. `options` is an instance of `cls.Options`.

        Raises ScenarioError (place: the key of the options) where they name a class that the traffic has not.
        """

    @abstractmethod
    def refuses(self, request: Request, now_ns: int, inside: Inside) -> bool:
        """Whether this request, which arrives now, is turned away. Changes nothing that decides about others."""

    def let_in(self, request: Request, now_ns: int) -> None:  # noqa: B027  # most doors count nobody
        """The request comes in. Mutates the door."""


DOORS: Registry[Door] = Registry(
    "door",
    "sim.doors.base:Door",
    {
        "rate_limit": "sim.doors.rate_limit:RateLimit",
    },
)
