"""Triton's queue: priority levels, first come first served within one, and time-outs that put a request last.

Level 1 is the highest. A request with priority 0 is of the default level, one with a higher number than there
are levels of the lowest. Whoever waits longer than its level's time-out goes behind all of its level who do
not; it is served before any lower level all the same.

Source: Triton core 73aad7c, `scheduler_utils.cc` (PolicyQueue, PriorityQueue), the queue policy's
`timeout_action` DELAY. Its REJECT is an engine's `queue_timeout_s`, its `max_queue_size` a `queue_limit` door.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sim.clock import NS_PER_MS
from sim.options import Count, NonNegative
from sim.queues.base import QueueOrder, QueueOrderOptions, Setting
from sim.request import Request


class TritonOptions(QueueOrderOptions):
    """What the queue can be told; Triton's own words."""

    kind: Literal["triton"] = Field(description="priority levels with time-outs that delay")
    priority_levels: Annotated[Count, Field(le=1000)] = Field(
        default=1, description="number of levels; 1 is the highest"
    )
    default_priority_level: Count = Field(default=1, description="level of requests with priority 0")
    default_timeout_ms: NonNegative = Field(
        default=0.0, le=1e12, description="wait after which a request goes behind the others of its level; 0: never"
    )
    timeout_ms_by_level: dict[int, Annotated[NonNegative, Field(le=1e12)]] = Field(
        default_factory=dict, description="the same for single levels"
    )

    @model_validator(mode="after")
    def _levels_exist(self) -> Self:
        for level in (self.default_priority_level, *self.timeout_ms_by_level):
            if not 1 <= level <= self.priority_levels:
                raise PydanticCustomError(
                    "no_such_level",
                    "there is no level {level}; levels: 1 to {most}",
                    {"level": level, "most": self.priority_levels},
                )
        return self


class Level:
    """The requests of one priority level."""

    def __init__(self, timeout_ns: int) -> None:
        self.timeout_ns = timeout_ns
        self.in_time: OrderedDict[Request, None] = OrderedDict()
        self.delayed: OrderedDict[Request, None] = OrderedDict()

    def expire(self, now_ns: int) -> None:
        """Move those whose time is up. All have the same time-out, so the oldest are first."""
        while self.timeout_ns and self.in_time:
            oldest = next(iter(self.in_time))
            if oldest.queued_ns + self.timeout_ns > now_ns:
                return
            del self.in_time[oldest]
            self.delayed[oldest] = None


class Triton(QueueOrder):
    """One pair of queues per level."""

    Options = TritonOptions

    def __init__(self, options: TritonOptions) -> None:
        timeouts_ms = [
            options.timeout_ms_by_level.get(level, options.default_timeout_ms)
            for level in range(1, options.priority_levels + 1)
        ]
        self._levels = [Level(round(timeout_ms * NS_PER_MS)) for timeout_ms in timeouts_ms]
        self._default = options.default_priority_level

    @classmethod
    def build(cls, options: QueueOrderOptions, setting: Setting) -> Self:
        assert isinstance(options, TritonOptions)
        return cls(options)

    def add(self, request: Request, now_ns: int) -> None:
        self._level(request).in_time[request] = None

    def put_back(self, request: Request, now_ns: int) -> None:
        """At the front of its level."""
        level = self._level(request)
        level.in_time[request] = None
        level.in_time.move_to_end(request, last=False)

    def head(self, now_ns: int) -> Request | None:
        self._expire(now_ns)
        return next(iter(self), None)

    def take(self, request: Request, now_ns: int) -> None:
        self.remove(request)

    def remove(self, request: Request) -> None:
        level = self._level(request)
        del (level.in_time if request in level.in_time else level.delayed)[request]

    def __len__(self) -> int:
        return sum(len(level.in_time) + len(level.delayed) for level in self._levels)

    def __iter__(self) -> Iterator[Request]:
        return (request for level in self._levels for queue in (level.in_time, level.delayed) for request in queue)

    def next_change_ns(self, now_ns: int) -> int | None:
        self._expire(now_ns)
        times_ns = [
            next(iter(level.in_time)).queued_ns + level.timeout_ns
            for level in self._levels
            if level.timeout_ns and level.in_time
        ]
        return min(times_ns, default=None)

    def _expire(self, now_ns: int) -> None:
        for level in self._levels:
            level.expire(now_ns)

    def _level(self, request: Request) -> Level:
        number = request.priority or self._default
        return self._levels[min(max(number, 1), len(self._levels)) - 1]
