"""A bucket that fills at a rate and from which each request takes what it needs; an empty one refuses.

Over any time t at most rate × t + burst comes through. Each class has a bucket of its own.

Source: the leaky bucket as a meter (ITU-T I.371); per-tenant admission in inference-sim (BLIS) @f90a1e3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field

from sim.clock import NS_PER_S
from sim.doors.base import Door, DoorOptions, Inside
from sim.options import Positive, by_class_index
from sim.request import Request


class TokenBucketOptions(DoorOptions):
    """What it can be told."""

    kind: Literal["token_bucket"] = Field(description="a rate and a burst for each request class")
    unit: Literal["requests", "tokens"] = Field(
        default="requests", description="requests: each takes 1; tokens: prompt + max_tokens"
    )
    rate_per_s: Positive = Field(description="what flows into a bucket in a second")
    burst: Positive = Field(description="what a bucket holds at most, and at the start")
    by_class: dict[str, Positive] = Field(default_factory=dict, description="rate_per_s of single request classes")


class TokenBucket(Door):
    """One bucket per class, filled when somebody looks."""

    Options = TokenBucketOptions

    def __init__(self, options: TokenBucketOptions, rate_of: dict[int, float]) -> None:
        self._options = options
        self._rate_of = rate_of
        self._level: dict[int, tuple[float, int]] = {}
        """By class: what was left after the last request, and when that was."""

    @classmethod
    def build(cls, options: DoorOptions, class_names: Sequence[str]) -> Self:
        assert isinstance(options, TokenBucketOptions)
        return cls(options, by_class_index(options.by_class, class_names, "by_class"))

    def refuses(self, request: Request, now_ns: int, inside: Inside) -> bool:
        return self._need(request) > self._filled(request.class_index, now_ns)

    def let_in(self, request: Request, now_ns: int) -> None:
        left = self._filled(request.class_index, now_ns) - self._need(request)
        self._level[request.class_index] = left, now_ns

    def _need(self, request: Request) -> int:
        return 1 if self._options.unit == "requests" else request.prompt_tokens + request.max_tokens

    def _filled(self, class_index: int, now_ns: int) -> float:
        rate_per_s = self._rate_of.get(class_index, self._options.rate_per_s)
        left, since_ns = self._level.get(class_index, (self._options.burst, now_ns))
        return min(self._options.burst, left + rate_per_s * (now_ns - since_ns) / NS_PER_S)
