"""A queue of limited length: whoever comes when it is full is refused at once.

Source: Triton's `max_queue_size`, llm-d's and vLLM's request limits; in queueing theory a finite buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field

from sim.doors.base import Door, DoorOptions, Inside
from sim.options import CountOrZero
from sim.request import Request


class QueueLimitOptions(DoorOptions):
    """What it can be told."""

    kind: Literal["queue_limit"] = Field(description="requests that may wait")
    max_waiting: CountOrZero = Field(description="requests waiting for their first admission at most")


class QueueLimit(Door):
    """Counts who waits, whatever its class."""

    Options = QueueLimitOptions

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting

    @classmethod
    def build(cls, options: DoorOptions, class_names: Sequence[str]) -> Self:
        assert isinstance(options, QueueLimitOptions)
        return cls(options.max_waiting)

    def refuses(self, request: Request, now_ns: int, inside: Inside) -> bool:
        return inside.num_waiting >= self._max_waiting
