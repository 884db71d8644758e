"""Tables reduced to what a picture can show: averages and maxima over a few hundred bins of time.

A quantity that each iteration has is a step function over the stretches that iterations own (`Spans`), zero in
between. Everything goes through integrals up to a time, which are exact for any bins. O((iterations +
requests + bins) × log).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.clock import NS_PER_S
from sim.metrics.distribution import Distribution, Ints
from sim.metrics.intervals import range_max
from sim.metrics.latency import waits
from sim.metrics.occupancy import Spans, owned_spans
from sim.results import Results

Floats = NDArray[np.float64]

NUM_BINS = 480
NUM_COARSE_BINS = 160
"""For what varies from one iteration to the next."""


class Bins:
    """Equal bins of time over a whole run, and what the iterations' columns come to in them."""

    def __init__(self, results: Results, num_bins: int = NUM_BINS) -> None:
        run = results.run_window
        self.spans: Spans = owned_spans(results.tables.iterations, run)
        self._requests = results.tables.requests
        self._end_ns = run.end_ns
        self.edges_ns: Floats = np.linspace(run.start_ns, max(run.end_ns, run.start_ns + 1), num_bins + 1)

    @property
    def edges_s(self) -> Floats:
        """One more than there are bins; seconds."""
        return self.edges_ns / NS_PER_S

    @property
    def centers_s(self) -> Floats:
        """Seconds."""
        return (self.edges_s[:-1] + self.edges_s[1:]) / 2

    def mean(self, values: Ints) -> Floats:
        """The time average in each bin, idle time counting as zero."""
        return self._mean_of(_area(values, self.spans, self.edges_ns))

    def total(self, values: Ints) -> Floats:
        """The sum over the iterations of each bin; one that lies in several is shared out by time."""
        return np.diff(_between(np.cumsum(values, dtype=np.float64), self.spans, self.edges_ns))

    def mean_per_iteration(self, values: Ints, per: Ints | None = None) -> Floats:
        """The average over the iterations of each bin (or the ratio of sums, `per` another column); zero without."""
        total, number = self.total(values), self.total(np.ones_like(values) if per is None else per)
        return np.divide(total, number, out=np.zeros_like(total), where=number > 0)

    def per_second(self, values: Ints) -> Floats:
        """The rate of what iterations count."""
        return self.total(values) / np.diff(self.edges_s)

    def maximum(self, values: Ints) -> Ints:
        """The largest value among the iterations that own a part of each bin; zero without any."""
        first = np.searchsorted(self.spans.end_ns, self.edges_ns[:-1], side="right")
        last = np.searchsorted(self.spans.start_ns, self.edges_ns[1:], side="left")
        is_busy = last > first
        maxima = np.zeros(len(first), dtype=np.int64)
        maxima[is_busy] = range_max(values, first[is_busy], (last - first)[is_busy])
        return maxima

    def mean_overlap(self, starts_ns: Ints, ends_ns: Ints) -> Floats:
        """How many of the intervals cover each bin, on average over its time."""
        return self._mean_of(_overlap(starts_ns, ends_ns, self.edges_ns))

    def mean_waiting(self, num_waiting: Ints) -> Floats:
        """The engine's queue: as iterations met it (preempted requests included), between them as requests tell."""
        intervals = waits(self._requests, self._end_ns, "admitted")
        idle_start, idle_end = (bound.astype(np.float64) for bound in self.spans.idle())
        until_start = _overlap(*intervals, idle_start)
        while_idle = np.cumsum(_overlap(*intervals, idle_end) - until_start)
        last = np.searchsorted(idle_start, self.edges_ns, side="right") - 1
        in_last = _overlap(*intervals, np.minimum(self.edges_ns, idle_end[last])) - until_start[last]
        before_last = np.concatenate([[0.0], while_idle])[last]
        return self._mean_of(_area(num_waiting, self.spans, self.edges_ns) + before_last + in_last)

    def mean_waiting_at_client(self) -> Floats:
        """Requests that their client holds back because of its own limit."""
        return self.mean_overlap(*waits(self._requests, self._end_ns, "queued"))

    def _mean_of(self, area: Floats) -> Floats:
        mean: Floats = np.maximum(np.diff(area) / np.diff(self.edges_ns), 0.0)
        return mean


def _area(values: Ints, spans: Spans, times_ns: Floats) -> Floats:
    """The integral up to each time of a step function that is `values[i]` where iteration i owns the time."""
    return _between(np.cumsum(values * spans.owned_ns.astype(np.float64)), spans, times_ns)


def _between(sums: Floats, spans: Spans, times_ns: Floats) -> Floats:
    """Running sums over iterations, growing evenly while each iteration lasts."""
    if len(sums) == 0:
        return np.zeros(len(times_ns))
    bounds = np.stack([spans.start_ns, spans.end_ns], axis=1).ravel()
    reached = np.stack([np.concatenate([[0.0], sums[:-1]]), sums], axis=1).ravel()
    between: Floats = np.interp(times_ns, bounds, reached)
    return between


def _overlap(starts_ns: Ints, ends_ns: Ints, times_ns: Floats) -> Floats:
    """Summed time that the intervals have covered by each time; those that end before they start are empty."""
    is_real = ends_ns > starts_ns
    return _elapsed(starts_ns[is_real], times_ns) - _elapsed(ends_ns[is_real], times_ns)


def _elapsed(since_ns: Ints, times_ns: Floats) -> Floats:
    """Sum of the time since those of `since_ns` that have passed."""
    since = np.sort(since_ns)
    sums = np.concatenate([[0.0], np.cumsum(since, dtype=np.float64)])
    passed = np.searchsorted(since, times_ns, side="right")
    elapsed: Floats = passed * times_ns - sums[passed]
    return elapsed


class Bucket(NamedTuple):
    """Values that belong to sizes from `low` to `high`."""

    low: float
    high: float
    middle: float
    values: Distribution


def buckets_along_axis(sizes: Ints, values: Ints, is_log: bool, num_buckets: int) -> list[Bucket]:
    """Buckets that are equally wide on a linear or logarithmic axis; empty ones are left out. `middle`: the median."""
    position = np.log(sizes) if is_log else sizes.astype(np.float64)
    low, span = position.min(), np.ptp(position)
    number = np.minimum((position - low) / (span or 1.0) * num_buckets, num_buckets - 1).astype(np.int64)
    groups = [(sizes[number == index], values[number == index]) for index in np.unique(number).tolist()]
    return [
        Bucket(float(own.min()), float(own.max()), float(np.median(own)), Distribution(theirs))
        for own, theirs in groups
    ]


def equal_width_buckets(sizes: Ints, values: Ints, weights: Ints, max_buckets: int) -> list[Bucket]:
    """Buckets of whole numbers, equally wide and at most `max_buckets`; empty ones are left out."""
    if len(sizes) == 0:
        return []
    lowest = int(sizes.min())
    width = (int(sizes.max()) - lowest) // max_buckets + 1
    number = (sizes - lowest) // width
    buckets = []
    for index in np.unique(number).tolist():
        inside = number == index
        low, high = lowest + index * width, lowest + (index + 1) * width - 1
        buckets.append(Bucket(low, high, (low + high) / 2, Distribution(values[inside], weights[inside])))
    return buckets
