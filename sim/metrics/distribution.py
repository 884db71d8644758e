"""Numbers with multiplicities, and the statistics that are reported of them.

Percentiles interpolate linearly, exactly as `numpy.percentile` does on the list in which every value is
repeated as often as it was seen; that list is never made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.clock import NS_PER_MS
from sim.errors import InvariantError
from sim.metrics.summary import Stats

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Numbers = NDArray[np.int64] | NDArray[np.float64]

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p999", "max")
"""What is reported of every latency."""

CENSORING_TOLERANCE = 0.01
"""Requests that had not ended may move a statistic by this share of itself before it is called censored."""


def percent_of(statistic: str) -> float | None:
    """The percent that `p99` (99), `p999` (99.9) or `max` (100) stands for; None for any other name."""
    if statistic == "max":
        return 100.0
    if re.fullmatch(r"p[1-9]\d", statistic):
        return float(statistic[1:])
    return float(statistic[1:]) / 10 if re.fullmatch(r"p99\d", statistic) else None


class Distribution:
    """Values, each seen `weights` times (default: once). Nanoseconds, if they are latencies. Immutable."""

    def __init__(self, values: Numbers, weights: Ints | None = None) -> None:
        self._seen_up_to: Ints | None = None
        is_sorted = bool(np.all(values[1:] >= values[:-1]))
        if weights is None:
            self._values = values if is_sorted else np.sort(values)
            self.count = len(values)
            self._total = float(np.sum(values, dtype=np.float64))
        else:
            order = slice(None) if is_sorted else np.argsort(values, kind="stable")
            self._values = values[order]
            self._weights = weights[order]
            self._seen_up_to = np.cumsum(self._weights)
            self.count = int(weights.sum())
            self._total = float(np.sum(values * weights.astype(np.float64)))

    def percentile(self, percent: float, num_above: int = 0) -> float | None:
        """The value that `percent` of all lie below; None when there is none.

        `num_above` further values of unknown size, larger than all others, count in; the answer is
        infinite where it depends on them.
        """
        count = self.count + num_above
        if count == 0:
            return None
        position = (count - 1) * (percent / 100)
        below = min(math.floor(position), count - 1)
        low, high = self._element(below), self._element(min(below + 1, count - 1))
        return interpolate(low, high, position - below)

    def num_above(self, limit: float) -> int:
        """How many values are larger than `limit`."""
        position = int(np.searchsorted(self._values, limit, side="right"))
        if self._seen_up_to is None:
            return self.count - position
        return self.count - (int(self._seen_up_to[position - 1]) if position else 0)

    def mean(self) -> float | None:
        """The arithmetic mean; None when there is no value."""
        return self._total / self.count if self.count else None

    def statistic(self, name: str, num_above: int = 0) -> float | None:
        """`mean`, `max` or a percentile by name (`p50`, `p999`); `num_above` as in `percentile`."""
        if name == "mean":
            return math.inf if num_above else self.mean()
        percent = percent_of(name)
        if percent is None:
            raise InvariantError(f"unknown statistic {name!r}")
        return self.percentile(percent, num_above)

    def stats_ms(self) -> Stats:
        """The count and every statistic, of nanoseconds in milliseconds."""
        return Stats(count=self.count, **{name: to_ms(self.statistic(name)) for name in STATISTICS})

    def plus(self, values: Numbers) -> Distribution:
        """This distribution and further values, each seen once."""
        if self._seen_up_to is None:
            return Distribution(np.concatenate([self._values, values]))
        ones = np.ones(len(values), dtype=np.int64)
        return Distribution(np.concatenate([self._values, values]), np.concatenate([self._weights, ones]))

    def censored_by(self, at_least: Numbers, statistics: Sequence[str] = STATISTICS) -> list[str]:
        """Those of `statistics` that values still growing, now at `at_least`, could move by more than the tolerance.

        Such a value ends anywhere from what it is now to infinity; both ends are tried.
        """
        if len(at_least) == 0:
            return []
        if self.count == 0:
            return list(statistics)
        least = self.plus(at_least)
        return [
            name
            for name in statistics
            if _moves(self.statistic(name), least.statistic(name))
            or _moves(self.statistic(name), self.statistic(name, num_above=len(at_least)))
        ]

    def _element(self, rank: int) -> float:
        """The value of the given rank of the expanded, sorted list; infinite past its end."""
        if rank >= self.count:
            return math.inf
        position = rank if self._seen_up_to is None else int(np.searchsorted(self._seen_up_to, rank, side="right"))
        return float(self._values[position])


def interpolate(low: float, high: float, share: float) -> float:
    """The point `share` of the way from `low` to `high`, rounded as numpy rounds it."""
    if low == high or share == 0:
        return low
    if math.isinf(high):
        return high
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share)


def to_ms(value_ns: float | None) -> float | None:
    """Nanoseconds in milliseconds; None stays None."""
    return None if value_ns is None else value_ns / NS_PER_MS


def _moves(value: float | None, bound: float | None) -> bool:
    return value is not None and bound is not None and abs(bound - value) > CENSORING_TOLERANCE * abs(value)


def each_bucket(sizes: Ints) -> Iterator[tuple[int, int, Bools]]:
    """Sizes by powers of two: lowest and highest size of each bucket that occurs, and who is in it.

    The buckets are 0, 1, 2, 3–4, 5–8, 9–16 and so on.
    """
    exponents = np.frexp(np.maximum(sizes - 1, 0).astype(np.float64))[1].astype(np.int64)
    exponents[sizes == 0] = -1
    for exponent in np.unique(exponents).tolist():
        low = 2 ** (exponent - 1) + 1 if exponent > 0 else exponent + 1
        yield low, 2**exponent if exponent > 0 else exponent + 1, exponents == exponent
