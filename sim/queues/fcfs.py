"""First come, first served; a preempted request waits in front of all others.

Source: vLLM (`FCFSRequestQueue`: append, `prepend_request`), and most engines beside it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Literal, Self

from pydantic import Field

from sim.queues.base import QueueOrder, QueueOrderOptions
from sim.request import Request


class FcfsOptions(QueueOrderOptions):
    """Nothing to choose."""

    kind: Literal["fcfs"] = Field(default="fcfs", description="first come, first served")


class Fcfs(QueueOrder):
    """Arrival order."""

    Options = FcfsOptions
    is_arrival_order = True

    def __init__(self) -> None:
        self._waiting: OrderedDict[Request, None] = OrderedDict()

    @classmethod
    def build(cls, options: QueueOrderOptions, class_names: Sequence[str]) -> Self:
        return cls()

    def add(self, request: Request, now_ns: int) -> None:
        self._waiting[request] = None

    def put_back(self, request: Request, now_ns: int) -> None:
        """At the front."""
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)

    def head(self, now_ns: int) -> Request | None:
        return next(iter(self._waiting), None)

    def take(self, request: Request, now_ns: int) -> None:
        del self._waiting[request]

    def remove(self, request: Request) -> None:
        del self._waiting[request]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)
