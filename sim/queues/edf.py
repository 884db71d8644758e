"""Earliest deadline first: whoever's first token is due soonest.

A request is due its class's limit on the time to first token after it arrived. Those who are late stay in
front, so that under overload everybody becomes late; doors that refuse what would be late go well with it.

Source: Liu and Layland 1973, deadline-driven scheduling, here without preemption.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field

from sim.clock import NS_PER_MS
from sim.options import Positive, by_class_index
from sim.queues.base import QueueOrderOptions, Setting
from sim.queues.keyed import KeyedOrder
from sim.request import Request


class EarliestDeadlineOptions(QueueOrderOptions):
    """When requests are due."""

    kind: Literal["edf"] = Field(description="the earliest deadline first")
    ttft_ms: Positive = Field(default=1000.0, description="time to first token that a request is due, milliseconds")
    by_class: dict[str, Positive] = Field(default_factory=dict, description="the same for single request classes")


class EarliestDeadline(KeyedOrder):
    """By arrival plus limit; a preempted request is due when it was."""

    Options = EarliestDeadlineOptions

    def __init__(self, due_ns: int, due_ns_of: dict[int, int]) -> None:
        super().__init__()
        self._due_ns = due_ns
        self._due_ns_of = due_ns_of

    @classmethod
    def build(cls, options: QueueOrderOptions, setting: Setting) -> Self:
        assert isinstance(options, EarliestDeadlineOptions)
        limits_ms = by_class_index(options.by_class, setting.class_names, "by_class")
        due_ns_of = {index: round(limit_ms * NS_PER_MS) for index, limit_ms in limits_ms.items()}
        return cls(round(options.ttft_ms * NS_PER_MS), due_ns_of)

    def key(self, request: Request, now_ns: int) -> tuple[Any, ...]:
        due_ns = self._due_ns_of.get(request.class_index, self._due_ns)
        return request.arrival_ns + due_ns, request.arrival_ns, request.index
