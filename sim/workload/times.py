"""Arithmetic that arrival processes share: sums of gaps, limits, nanoseconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sim.clock import NS_PER_S
from sim.errors import ScenarioError
from sim.workload.base import Ints

Floats = NDArray[np.float64]

MAX_REQUESTS = 100_000_000
"""A run with more requests would not fit in the memory of the machines that this is made for."""
MAX_TIME_S = 4e9
"""Later times do not fit in 64 bits of nanoseconds with room to spare."""

_CHUNK = 1 << 16


def check_number(num_requests: int) -> int:
    """The same number, unless a run cannot hold so many requests: then ScenarioError."""
    if num_requests > MAX_REQUESTS:
        raise ScenarioError(
            "",
            f"this makes {num_requests:.3g} requests",
            valid=f"a run holds at most {MAX_REQUESTS:.0e}",
            remedy="Lower the rate, the duration or the number of requests.",
        )
    return num_requests


def expected_number(rate_per_s: float, num_requests: int | None, duration_ns: int | None, *, slack: int = 0) -> int:
    """How many requests come within the limits at this mean rate, plus `slack` when time is what limits.

    Raises ScenarioError when it is more than a run can hold.
    """
    by_time = np.inf if duration_ns is None else rate_per_s * duration_ns / NS_PER_S
    if num_requests is not None and num_requests <= by_time:
        return check_number(num_requests)
    return check_number(int(min(by_time, 1e18)) + slack)


def partial_sums(gaps: Callable[[int], Floats], num: int | None, limit: float) -> Floats:
    """Running sums of `gaps(size)` until there are `num` of them or they have passed `limit`.

    Sums beyond `limit` are among them. Chunks have a fixed size, so that more of them never changes the
    rounding of the first ones.
    """
    parts: list[Floats] = []
    total, count = 0.0, 0
    while total <= limit and (num is None or count < num):
        size = _CHUNK if num is None else min(_CHUNK, num - count)
        sums = total + np.cumsum(gaps(size))
        parts.append(sums)
        total, count = float(sums[-1]), check_number(count + size)
    return np.concatenate(parts) if parts else np.empty(0)


def times_ns(times_s: Floats) -> Ints:
    """Sorted seconds as integer nanoseconds. Raises ScenarioError when they reach too far."""
    if len(times_s) and times_s[-1] > MAX_TIME_S:
        raise ScenarioError(
            "",
            f"the last request would arrive after {times_s[-1]:.3g} s",
            valid=f"a run lasts at most {MAX_TIME_S:.0e} s",
            remedy="Raise the rate or lower the number of requests.",
        )
    return np.rint(times_s * NS_PER_S).astype(np.int64)


def up_to(duration_ns: int | None, arrival_ns: Ints) -> Ints:
    """The sorted times that are not after `duration_ns`."""
    if duration_ns is None:
        return arrival_ns
    return arrival_ns[: np.searchsorted(arrival_ns, duration_ns, side="right")]
