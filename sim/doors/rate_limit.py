"""At most so many requests of a class within any window of time; what comes beyond is refused.

Source: the usual "requests per minute" of public APIs; VTC-artifact @192c2e2, `lshare_req_queue.py`, whose
window has both its ends and which does not count what it refuses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field

from sim.clock import to_ns
from sim.doors.base import Door, DoorOptions, Inside
from sim.options import Count, PositiveSeconds
from sim.request import Request


class RateLimitOptions(DoorOptions):
    """What it can be told."""

    kind: Literal["rate_limit"] = Field(description="requests of a class within a window of time")
    max_requests: Count = Field(description="requests of one class let in within `window_s`")
    window_s: PositiveSeconds = Field(default=60.0, description="seconds that a request counts")


class RateLimit(Door):
    """One count for each request class."""

    Options = RateLimitOptions

    def __init__(self, max_requests: int, window_ns: int) -> None:
        self._max_requests = max_requests
        self._window_ns = window_ns
        self._let_in_ns: dict[int, deque[int]] = {}

    @classmethod
    def build(cls, options: DoorOptions, class_names: Sequence[str]) -> Self:
        assert isinstance(options, RateLimitOptions)
        return cls(options.max_requests, to_ns(options.window_s))

    def refuses(self, request: Request, now_ns: int, inside: Inside) -> bool:
        times_ns = self._let_in_ns.get(request.class_index, deque())
        while times_ns and times_ns[0] < now_ns - self._window_ns:
            times_ns.popleft()
        return len(times_ns) >= self._max_requests

    def let_in(self, request: Request, now_ns: int) -> None:
        self._let_in_ns.setdefault(request.class_index, deque()).append(now_ns)
