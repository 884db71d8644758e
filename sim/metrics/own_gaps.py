"""Whether each request's own inter-token gaps keep a limit, without listing them.

A request's gaps are ranges of tick gaps and a few single ones. How many of them exceed the limit is a
difference of prefix sums; that alone decides unless the percentile falls between a gap within the limit and one
beyond it, and only then the two are looked up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sim.metrics.distribution import Bools, Ints
from sim.metrics.intervals import range_max
from sim.metrics.tokens import TokenTimes

_BEYOND_ALL = np.iinfo(np.int64).max


def gap_percentile_within(tokens: TokenTimes, percent: float, limit_ns: float) -> Bools:
    """Whether the percentile of each request's own gaps is at most `limit_ns`. True without a gap.

    Percentiles interpolate linearly. Costs O(iterations × log(longest answer) + segments).
    """
    num_gaps = np.maximum(tokens.num_delivered - 1, 0)
    position = np.maximum(num_gaps - 1, 0) * (percent / 100)
    below = np.floor(position).astype(np.int64)
    share = position - below
    num_within = _num_within(tokens, limit_ns)
    is_within: Bools = (num_gaps == 0) | (num_within >= below + 1 + (share > 0))
    undecided = np.flatnonzero(~is_within & (num_within == below + 1))
    if len(undecided):
        low_ns, high_ns = _around(tokens, limit_ns, undecided)
        t, gap = share[undecided], high_ns - low_ns
        is_within[undecided] = np.where(t < 0.5, low_ns + gap * t, high_ns - gap * (1 - t)) <= limit_ns
    return is_within


def _num_within(tokens: TokenTimes, limit_ns: float) -> Ints:
    """Per request, how many of its gaps are at most `limit_ns`."""
    is_long = np.diff(tokens.tick_end_ns) > limit_ns
    num_long_before = np.concatenate([[0], np.cumsum(is_long)])
    inner = np.flatnonzero(tokens.num_ticks > 1)
    start, num = tokens.start[inner], tokens.num_ticks[inner] - 1
    num_short = num - (num_long_before[start + num] - num_long_before[start])
    between_ticks = np.bincount(tokens.row[inner], weights=num_short, minlength=tokens.num_requests)
    at_edges = np.bincount(tokens.edge_row, weights=tokens.edge_ns <= limit_ns, minlength=tokens.num_requests)
    return (between_ticks + at_edges).astype(np.int64)


def _around(tokens: TokenTimes, limit_ns: float, rows: Ints) -> tuple[Ints, Ints]:
    """The longest gap up to the limit and the shortest beyond it, of requests that have both."""
    is_asked = np.zeros(tokens.num_requests, dtype=np.bool_)
    is_asked[rows] = True
    inner = np.flatnonzero((tokens.num_ticks > 1) & is_asked[tokens.row])
    edges = np.flatnonzero(is_asked[tokens.edge_row])

    def longest(rank: Callable[[Ints], Ints], least: int) -> Ints:
        best = np.full(tokens.num_requests, least, dtype=np.int64)
        extremes = range_max(rank(np.diff(tokens.tick_end_ns)), tokens.start[inner], tokens.num_ticks[inner] - 1)
        np.maximum.at(best, tokens.row[inner], extremes)
        np.maximum.at(best, tokens.edge_row[edges], rank(tokens.edge_ns[edges]))
        return best[rows]

    low_ns = longest(lambda ns: np.where(ns <= limit_ns, ns, -1), -1)
    high_ns = -longest(lambda ns: np.where(ns > limit_ns, -ns, -_BEYOND_ALL), -_BEYOND_ALL)
    return low_ns, high_ns
