"""How much of a stretch of time is covered by intervals, and by how many at once. All in integer nanoseconds."""

from __future__ import annotations

import numpy as np

from sim.metrics.distribution import Ints


class Coverage:
    """The union of half-open intervals `[starts, ends)`; those that end before they start are empty."""

    def __init__(self, starts: Ints, ends: Ints) -> None:
        is_real = ends > starts
        order = np.argsort(starts[is_real], kind="stable")
        starts, ends = starts[is_real][order], np.maximum.accumulate(ends[is_real][order])
        is_first = np.ones(len(starts), dtype=np.bool_)
        is_first[1:] = starts[1:] > ends[:-1]
        self._starts = starts[is_first]
        self._ends = ends[np.flatnonzero(is_first)[1:] - 1] if len(starts) else ends
        if len(starts):
            self._ends = np.append(self._ends, ends[-1])
        self._covered_before = np.concatenate([[0], np.cumsum(self._ends - self._starts)])

    def until(self, times: Ints) -> Ints:
        """Covered time before each of `times`."""
        piece = np.searchsorted(self._starts, times, side="right") - 1
        if len(self._starts) == 0:
            return np.zeros(len(times), dtype=np.int64)
        inside = np.minimum(times, self._ends[piece]) - self._starts[piece]
        return np.where(piece < 0, 0, self._covered_before[piece] + inside)

    def within(self, starts: Ints, ends: Ints) -> Ints:
        """Covered time inside each stretch from `starts` to `ends`."""
        return self.until(ends) - self.until(starts)


def total_overlap(starts: Ints, ends: Ints, low: int, high: int) -> int:
    """Sum over all intervals of their time between `low` and `high` (their mean number × the stretch)."""
    return int(np.maximum(np.minimum(ends, high) - np.maximum(starts, low), 0).sum())


def range_max(values: Ints, starts: Ints, lengths: Ints) -> Ints:
    """The maximum of `values[start : start + length]` for every pair (lengths >= 1).

    A sparse table of which only one level exists at a time: O(values × log(longest)), whatever the
    ranges add up to.
    """
    answers = np.empty(len(starts), dtype=np.int64)
    levels = np.frexp(lengths.astype(np.float64))[1] - 1
    table, width = values, 1
    for level in range(int(levels.max(initial=-1)) + 1):
        asked = np.flatnonzero(levels == level)
        first = starts[asked]
        answers[asked] = np.maximum(table[first], table[first + lengths[asked] - width])
        table = np.maximum(table[:-width], table[width:])
        width *= 2
    return answers
