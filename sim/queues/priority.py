"""Static priority: the smallest `priority` first, first come first served among equals.

Whoever has a low priority waits for as long as anybody else does: nothing bounds the wait.

Source: vLLM (`PriorityRequestQueue`), whose sort key is (priority, arrival time, request id). Other engines
count the other way round: SGLang serves the highest number first, Triton's level 1 is the highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field

from sim.queues.base import QueueOrderOptions
from sim.queues.keyed import KeyedOrder
from sim.request import Request


class PriorityOptions(QueueOrderOptions):
    """Nothing to choose: the traffic says who has which priority."""

    kind: Literal["priority"] = Field(description="the smallest priority first, whatever the wait")


class Priority(KeyedOrder):
    """By (priority, arrival, id); a preempted request takes the place that it had before."""

    Options = PriorityOptions

    @classmethod
    def build(cls, options: QueueOrderOptions, class_names: Sequence[str]) -> Self:
        return cls()

    def key(self, request: Request, now_ns: int) -> tuple[Any, ...]:
        return request.priority, request.arrival_ns, request.id
