"""Token times and the gaps between them, without ever listing tokens.

All who decode in a tick get their token at its end, so the gap between two ticks is the inter-token latency
of every stream that saw both: one value, weighted by a count that a difference array over segments yields.
What remains are the gaps at the edges of segments: from the token that a prefill samples to the first
tick, and from one segment of a request to its next (it was preempted or left out).

Tokens that were made after their client had left reached nobody: they are counted apart.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from sim.metrics.distribution import Bools, Distribution, Ints
from sim.record import Columns, Tables
from sim.request import NEVER


class Gaps(NamedTuple):
    """Gaps, shortest first: `values_ns[i]` was seen `weights[i]` times.

    Its earlier token was made by iteration `since[i]`, its later one by `iteration[i]`. `edge[i]` is its place
    among the gaps at the edges of segments, NEVER for one between two ticks.
    """

    values_ns: Ints
    weights: Ints
    since: Ints
    iteration: Ints
    edge: Ints

    def distribution(self) -> Distribution:
        """All gaps, pooled."""
        return Distribution(self.values_ns, self.weights)


class Edge(IntEnum):
    """What lies between two tokens that are not two ticks of one segment."""

    ENTERS = 0
    """Nothing: the prefill's token and the first tick, or a change of lane."""
    PREEMPTED = 1
    """The request lost its KV and was computed anew."""
    LEFT_OUT = 2
    """Steps of its lane decoded without it, for want of budget."""


class TokenTimes:
    """When the tokens of a run reached their clients. Requests are named by their row in the requests table.

    Building it costs O(iterations + segments); so does each question, unless it says otherwise.
    """

    def __init__(self, tables: Tables) -> None:
        iterations = tables.iterations
        self.num_requests = len(tables.requests["request"])
        self._end_ns = iterations["end_ns"]
        decoding = np.flatnonzero(iterations["num_decode"] > 0)
        lanes = iterations["lane"][decoding]
        by_lane = np.argsort(lanes, kind="stable")
        self.tick_iteration: Ints = decoding[by_lane]
        """Row of `iterations` of each tick; the ticks of lane 0 first, then those of lane 1, ..."""
        self.tick_end_ns: Ints = self._end_ns[self.tick_iteration]
        self._lane_start: Ints = np.searchsorted(lanes[by_lane], np.arange(iterations["lane"].max(initial=0) + 2))
        self._load_segments(tables)
        self._find_edge_gaps()

    def _load_segments(self, tables: Tables) -> None:
        segments = tables.segments
        order = np.argsort(segments["request"], kind="stable")  # of one request they are in order of time already
        row = rows_of(tables.requests, segments["request"][order])
        lane, iteration, num_ticks = (segments[name][order] for name in ("lane", "iteration", "num_ticks"))
        first_tick = segments["first_tick"][order]
        start = np.where(first_tick == NEVER, 0, first_tick + self._lane_start[lane])
        left_ns = tables.requests["cancelled_ns"][row]
        seen_ticks, seen_iteration = self._seen(left_ns, lane, start, num_ticks, iteration)
        made = self._tokens_by_row(row, num_ticks, iteration)
        self.num_delivered: Ints = self._tokens_by_row(row, seen_ticks, seen_iteration)
        """Tokens per request that its client received."""
        self.num_undelivered: Ints = made - self.num_delivered
        """Tokens per request that were made after its client had left."""
        kept = (seen_iteration != NEVER) | (seen_ticks > 0)
        self.row: Ints = row[kept]
        """Per segment of delivered tokens, by request and then by time: the row of its request."""
        self.iteration: Ints = seen_iteration[kept]
        """Per segment: the iteration whose prefill sampled its first token, or NEVER."""
        self.start: Ints = start[kept]
        """Per segment: the position of its first tick among all ticks."""
        self.num_ticks: Ints = seen_ticks[kept]
        self._lane: Ints = lane[kept]

    def _seen(self, left_ns: Ints, lane: Ints, start: Ints, num_ticks: Ints, iteration: Ints) -> tuple[Ints, Ints]:
        """`num_ticks` and `iteration` without the tokens that came after the client had left."""
        has_left = left_ns != NEVER
        seen_ticks = num_ticks.copy()
        for index in range(len(self._lane_start) - 1):
            cut = np.flatnonzero(has_left & (lane == index))
            low, high = self._lane_start[index : index + 2]
            end = low + np.searchsorted(self.tick_end_ns[low:high], left_ns[cut], side="right")
            seen_ticks[cut] = np.clip(end - start[cut], 0, num_ticks[cut])
        is_late = has_left & (_pick(self._end_ns, iteration, iteration != NEVER) > left_ns)
        return seen_ticks, np.where(is_late, NEVER, iteration)

    def _tokens_by_row(self, row: Ints, num_ticks: Ints, iteration: Ints) -> Ints:
        num_tokens = num_ticks + (iteration != NEVER)
        return np.bincount(row, weights=num_tokens, minlength=self.num_requests).astype(np.int64)

    def _find_edge_gaps(self) -> None:
        """The gaps that are not between two ticks of one segment."""
        is_sampled, ticks = self.iteration != NEVER, self.num_ticks > 0
        sampled_ns = _pick(self._end_ns, self.iteration, is_sampled)
        first_tick_ns = _pick(self.tick_end_ns, self.start, ticks)
        first_tick_iteration = _pick(self.tick_iteration, self.start, ticks)
        self._last_ns = np.where(ticks, _pick(self.tick_end_ns, self.start + self.num_ticks - 1, ticks), sampled_ns)
        first_ns = np.where(is_sampled, sampled_ns, first_tick_ns)
        first_iteration = np.where(is_sampled, self.iteration, first_tick_iteration)
        enters = np.flatnonzero(is_sampled & ticks)
        resumes = np.flatnonzero(self.row[1:] == self.row[:-1]) + 1
        self.edge_row: Ints = np.concatenate([self.row[enters], self.row[resumes]])
        """Per gap at the edge of a segment: the row of its request."""
        self.edge_ns: Ints = np.concatenate(
            [first_tick_ns[enters] - sampled_ns[enters], first_ns[resumes] - self._last_ns[resumes - 1]]
        )
        """Per gap at the edge of a segment: its length."""
        last_tick_iteration = _pick(self.tick_iteration, self.start + self.num_ticks - 1, ticks)
        last_iteration = np.where(ticks, last_tick_iteration, self.iteration)
        self._edge_since = np.concatenate([self.iteration[enters], last_iteration[resumes - 1]])
        self._edge_iteration = np.concatenate([first_tick_iteration[enters], first_iteration[resumes]])
        self.edge_kind: Ints = np.concatenate([np.full(len(enters), Edge.ENTERS), self._resumption(resumes)])
        """Per gap at the edge of a segment: its `Edge`."""

    def _resumption(self, resumes: Ints) -> Ints:
        """The `Edge` before each of these segments, which follow another one of their request."""
        is_same_lane = self._lane[resumes] == self._lane[resumes - 1]
        goes_on = np.where(is_same_lane, Edge.LEFT_OUT, Edge.ENTERS)
        return np.where(self.iteration[resumes] != NEVER, Edge.PREEMPTED, goes_on)

    def times_ns(self, row: int) -> Ints:
        """The token times of one request, in order. O(segments + its tokens)."""
        pieces = [np.empty(0, dtype=np.int64)]
        for i in np.flatnonzero(self.row == row):
            if self.iteration[i] != NEVER:
                pieces.append(self._end_ns[self.iteration[i] : self.iteration[i] + 1])
            pieces.append(self.tick_end_ns[self.start[i] : self.start[i] + self.num_ticks[i]])
        return np.concatenate(pieces)

    def next_tick(self, segments: Ints) -> Ints:
        """The tick that follows each of these segments in its lane; NEVER where the lane has no further one."""
        lane = self._lane[segments]
        after = self.start[segments] + self.num_ticks[segments]
        for index in range(len(self._lane_start) - 1):
            unticked = np.flatnonzero((lane == index) & (self.num_ticks[segments] == 0))
            low, high = self._lane_start[index : index + 2]
            sampled_ns = self._end_ns[self.iteration[segments[unticked]]]
            after[unticked] = low + np.searchsorted(self.tick_end_ns[low:high], sampled_ns, side="right")
        return np.where(after < self._lane_start[lane + 1], after, NEVER)

    def last_token_ns(self) -> Ints:
        """The time of each request's last token so far; NEVER without one."""
        last_ns = np.full(self.num_requests, NEVER, dtype=np.int64)
        last_ns[self.row] = self._last_ns
        return last_ns

    def num_tokens_between(self, start_ns: int, end_ns: int, of: Bools) -> int:
        """Tokens that reached the clients of the requests in `of` from `start_ns` to `end_ns`, both included."""
        mine = of[self.row]
        streams = _coverage(self.start[mine], self.num_ticks[mine], len(self.tick_end_ns))
        sampled_ns = self._end_ns[self.iteration[mine & (self.iteration != NEVER)]]
        return int(
            streams[(self.tick_end_ns >= start_ns) & (self.tick_end_ns <= end_ns)].sum()
            + np.count_nonzero((sampled_ns >= start_ns) & (sampled_ns <= end_ns))
        )

    def num_tokens_by(self, times_ns: Ints, of: Bools) -> Ints:
        """Tokens that have reached the clients of the requests in `of` by each of these times."""
        mine = of[self.row]
        streams = _coverage(self.start[mine], self.num_ticks[mine], len(self.tick_end_ns))
        order = np.argsort(self.tick_end_ns, kind="stable")  # ticks are sorted by lane
        from_ticks = np.concatenate([[0], np.cumsum(streams[order])])
        sampled_ns = np.sort(self._end_ns[self.iteration[mine & (self.iteration != NEVER)]])
        ticks_by_then = np.searchsorted(self.tick_end_ns[order], times_ns, side="right")
        by_then: Ints = from_ticks[ticks_by_then] + np.searchsorted(sampled_ns, times_ns, side="right")
        return by_then

    def gaps(self, of: Bools) -> Gaps:
        """Every gap between consecutive tokens of the requests in `of`."""
        mine = of[self.row] & (self.num_ticks > 1)
        weights = _coverage(self.start[mine], self.num_ticks[mine] - 1, len(self.tick_end_ns))
        seen = np.flatnonzero(weights)
        edges = of[self.edge_row]
        values_ns = np.concatenate([self.tick_end_ns[seen + 1] - self.tick_end_ns[seen], self.edge_ns[edges]])
        weights = np.concatenate([weights[seen], np.ones(np.count_nonzero(edges), dtype=np.int64)])
        since = np.concatenate([self.tick_iteration[seen], self._edge_since[edges]])
        iteration = np.concatenate([self.tick_iteration[seen + 1], self._edge_iteration[edges]])
        edge = np.concatenate([np.full(len(seen), NEVER, dtype=np.int64), np.flatnonzero(edges)])
        order = np.argsort(values_ns, kind="stable")
        return Gaps(values_ns[order], weights[order], since[order], iteration[order], edge[order])


def rows_of(requests: Columns, indices: Ints) -> Ints:
    """The rows of requests in their table, which is sorted by `request` and as a rule complete."""
    known = requests["request"]
    if len(known) and known[0] == 0 and known[-1] == len(known) - 1:
        return indices
    return np.searchsorted(known, indices)


def _pick(values: Ints, index: Ints, where: Bools) -> Ints:
    """`values[index]` where allowed, NEVER elsewhere."""
    picked = np.full(len(index), NEVER, dtype=np.int64)
    picked[where] = values[index[where]]
    return picked


def _coverage(starts: Ints, lengths: Ints, size: int) -> Ints:
    """How many of the ranges `[start, start + length)` contain each of `size` positions."""
    change = np.bincount(starts, minlength=size + 1) - np.bincount(starts + lengths, minlength=size + 1)
    return np.cumsum(change)[:size]
