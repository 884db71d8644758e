"""Earliest deadline first: whoever's first token is due soonest.

A request is due its class's limit on the time to first token after it arrived. Those who are late stay in
front, so that under overload everybody becomes late; doors that refuse what would be late go well with it. So does
`drop_late`, which turns away whoever has not been admitted when it is due, as a wait in the queue that became too
long: its first token would come too late. Who was admitted is never dropped, however late its first token.

Sources: Liu and Layland 1973, deadline-driven scheduling, here without preemption; `drop_late` is the firm deadline
of Haritsa, Carey and Livny 1990, "On Being Optimistic about Real-Time Constraints", here only until admission.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from sim.clock import NS_PER_MS
from sim.options import Positive, by_class_index
from sim.queues.base import QueueOrderOptions, Setting
from sim.queues.keyed import KeyedOrder
from sim.request import Request

LimitMs = Annotated[Positive, Field(le=1e12)]
"""Milliseconds, up to some 30 years."""


class EarliestDeadlineOptions(QueueOrderOptions):
    """When requests are due."""

    kind: Literal["edf"] = Field(description="the earliest deadline first")
    ttft_ms: LimitMs = Field(default=1000.0, description="time to first token that a request is due, milliseconds")
    by_class: dict[str, LimitMs] = Field(default_factory=dict, description="the same for single request classes")
    drop_late: bool = Field(
        default=False, description="turn away who has not been admitted when its first token is due"
    )


class EarliestDeadline(KeyedOrder):
    """By arrival plus limit; a preempted request is due when it was."""

    Options = EarliestDeadlineOptions

    def __init__(self, limit_ns: int, limit_ns_of: dict[int, int], *, drops_late: bool) -> None:
        """`limit_ns`: time to first token of those whose class `limit_ns_of` does not have."""
        super().__init__()
        self._limit_ns = limit_ns
        self._limit_ns_of = limit_ns_of
        self.drops_late = self.reads_clock = drops_late

    @classmethod
    def build(cls, options: QueueOrderOptions, setting: Setting) -> Self:
        assert isinstance(options, EarliestDeadlineOptions)
        limits_ms = by_class_index(options.by_class, setting.class_names, "by_class")
        limit_ns_of = {index: round(limit_ms * NS_PER_MS) for index, limit_ms in limits_ms.items()}
        return cls(round(options.ttft_ms * NS_PER_MS), limit_ns_of, drops_late=options.drop_late)

    def due_ns(self, request: Request) -> int:
        return request.arrival_ns + self._limit_ns_of.get(request.class_index, self._limit_ns)

    def key(self, request: Request, now_ns: int) -> tuple[Any, ...]:
        return self.due_ns(request), request.arrival_ns, request.index
