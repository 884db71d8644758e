"""Priority, with or without aging: the smallest `priority` first, first come first served among equals.

Without aging whoever has a low priority waits for as long as others keep coming: nothing bounds the wait. With
aging each `age_s` of waiting is worth one level of priority, so a request is never passed by one that comes
later than `age_s` times the difference of their priorities after it. As everybody ages alike, the order of two
requests never changes, and the queue needs no look at the clock.

Source of the static order: vLLM (`PriorityRequestQueue`), whose sort key is (priority, arrival time, request id).
Other engines count the other way round: SGLang serves the highest number first, Triton's level 1 is the highest.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field

from sim.clock import to_ns
from sim.options import PositiveSeconds
from sim.queues.base import QueueOrderOptions, Setting
from sim.queues.keyed import KeyedOrder
from sim.request import Request


class PriorityOptions(QueueOrderOptions):
    """Nothing to choose: the traffic says who has which priority."""

    kind: Literal["priority"] = Field(description="the smallest priority first, whatever the wait")


class AgingOptions(QueueOrderOptions):
    """How fast a wait makes up for a priority."""

    kind: Literal["priority_aging"] = Field(description="the smallest priority first, less the levels waited for")
    age_s: PositiveSeconds = Field(description="seconds of waiting that are worth one level of priority")


class Priority(KeyedOrder):
    """By (priority, arrival, id); a preempted request takes the place that it had before."""

    Options = PriorityOptions

    @classmethod
    def build(cls, options: QueueOrderOptions, setting: Setting) -> Self:
        return cls()

    def key(self, request: Request, now_ns: int) -> tuple[Any, ...]:
        return request.priority, request.arrival_ns, request.id


class AgingPriority(KeyedOrder):
    """By priority × `age_s` + arrival; a preempted request keeps the age that it had."""

    Options = AgingOptions

    def __init__(self, age_ns: int) -> None:
        super().__init__()
        self._age_ns = age_ns

    @classmethod
    def build(cls, options: QueueOrderOptions, setting: Setting) -> Self:
        assert isinstance(options, AgingOptions)
        return cls(to_ns(options.age_s))

    def key(self, request: Request, now_ns: int) -> tuple[Any, ...]:
        return request.priority * self._age_ns + request.arrival_ns, request.priority, request.index
