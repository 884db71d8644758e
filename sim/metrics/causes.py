"""Why latencies are what they are: every TTFT and every inter-token gap cut into causes, to the nanosecond.

The time of an engine belongs to iterations and to the idle stretches between them (`owned_spans`). What an
iteration owns is the host's work, as far as the device stood still for it, then the device's work for the
decodes and for the prefills in the batch (`WorkShares`). A latency is the time of the iterations that it lasts, and
each has its cause in the state that the request is in:

- at its client: `client`;
- in the queue: what its head waited for in the iteration (`slots`, `kv`, `budget`, `admission`); where nobody was
  held up, `step`, for the steps under way had to end first, and `host` while the device stood still for the host;
  while the device idles, `admission`;
- preempted, until the device computes it anew: `preemption`; tokens computed for the second time: `recompute`;
- running: its own prompt is `prefill`, those of others `others_prefill`, the decodes of the batch `decode`;
  exposed host time is `host`, idle device time `admission`; left out of steps for want of tokens: `budget`;
- finished, in a batch that holds its answers to the end: `batch_end`.

A request that prefix caching restores without any loss counts as running while it waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np

from sim.metrics.distribution import Bools, Ints
from sim.metrics.occupancy import owned_spans
from sim.metrics.shares import WorkShares
from sim.metrics.tokens import Edge, Gaps, TokenTimes, rows_of
from sim.metrics.window import Window
from sim.record import Tables
from sim.request import NEVER
from sim.step import BlockedBy


class Cause(StrEnum):
    """What a piece of latency was spent on."""

    CLIENT = "client"
    SLOTS = "slots"
    KV = "kv"
    BUDGET = "budget"
    ADMISSION = "admission"
    STEP = "step"
    PREEMPTION = "preemption"
    RECOMPUTE = "recompute"
    PREFILL = "prefill"
    OTHERS_PREFILL = "others_prefill"
    DECODE = "decode"
    HOST = "host"
    BATCH_END = "batch_end"


Parts = Mapping[Cause, Ints]
"""Nanoseconds by cause, one entry per latency. They add up to it; a cause that is missing had no part."""

_HEAD_WAITS_FOR = {
    BlockedBy.SLOTS: Cause.SLOTS,
    BlockedBy.KV: Cause.KV,
    BlockedBy.BUDGET: Cause.BUDGET,
    BlockedBy.ADMISSION: Cause.ADMISSION,
}
_WORK = (Cause.ADMISSION, Cause.HOST, Cause.DECODE, Cause.OTHERS_PREFILL)
"""What an iteration's time consists of, from the end of the one before: idle, host, decodes, prefills."""


class Causes:
    """The causes of the latencies of one run. Building it costs O(iterations + chunks × log(chunks))."""

    def __init__(self, tables: Tables, shares: WorkShares) -> None:
        self._tables = tables
        self._cut_iterations(shares)
        self._sort_chunks(shares)

    def _cut_iterations(self, shares: WorkShares) -> None:
        """Where each iteration's idle, host and device time end, and their sums before each iteration."""
        iterations = self._tables.iterations
        spans = owned_spans(iterations, Window(0, int(iterations["end_ns"].max(initial=0))))
        self._start_ns, self._end_ns = spans.start_ns, spans.end_ns
        self._device_ns = spans.start_ns + spans.host_ns
        """When the device turns to each iteration."""
        busy_ns = spans.end_ns - self._device_ns
        decode_ns = (busy_ns * shares.decode).astype(np.int64)
        self._prefill_ns = busy_ns - decode_ns
        idle_start_ns, idle_end_ns = spans.idle()
        idle_ns = idle_end_ns[:-1] - idle_start_ns[:-1]
        pieces = (idle_ns, spans.host_ns, decode_ns, self._prefill_ns)
        self._before = {cause: _sums(piece) for cause, piece in zip(_WORK, pieces, strict=True)}

    def _sort_chunks(self, shares: WorkShares) -> None:
        """The chunks by request and then by time, with sums that give those of any range of them."""
        chunks = self._tables.chunks
        order = np.lexsort((chunks["iteration"], chunks["request"]))
        row = rows_of(self._tables.requests, chunks["request"][order])
        iteration, num_tokens, context = (chunks[name][order] for name in ("iteration", "num_tokens", "context"))
        own_ns = _divided(self._prefill_ns, chunks["iteration"], shares.chunk)[order]
        self._chunk_iteration = iteration
        self._chunk_key = self._key(row, iteration)
        computed_before = _highest_before(row, context + num_tokens)
        num_again = np.clip(computed_before - context, 0, num_tokens)
        again_ns = own_ns * num_again // num_tokens
        self._own_before = _sums(own_ns)
        self._again_before = _sums(again_ns)
        goes_on = np.append(False, (row[1:] == row[:-1]) & (context[1:] >= (context + num_tokens)[:-1]))[: len(row)]
        restarts = np.flatnonzero(~goes_on & (computed_before > 0))
        self._lost_before = {cause: np.zeros(len(row) + 1, dtype=np.int64) for cause in _WORK}
        for cause, lost_ns in self._until_device(iteration[restarts - 1], iteration[restarts]).items():
            each = np.zeros(len(row), dtype=np.int64)
            each[restarts] = lost_ns
            self._lost_before[cause] = _sums(each)

    def _key(self, row: Ints, iteration: Ints) -> Ints:
        """Sorts like (row, iteration)."""
        return row * (len(self._end_ns) + 1) + iteration

    # ------------------------------------------------------------------ what iterations are made of

    def _after(self, since: Ints, until: Ints) -> dict[Cause, Ints]:
        """Work from the end of iterations `since` to the end of iterations `until`."""
        return {cause: before[until + 1] - before[since + 1] for cause, before in self._before.items()}

    def _until_device(self, since: Ints, until: Ints) -> dict[Cause, Ints]:
        """Work from the end of iterations `since` to when the device turns to iterations `until`."""
        work = self._after(since, until - 1)
        for cause in (Cause.ADMISSION, Cause.HOST):
            work[cause] += np.diff(self._before[cause])[until]
        return work

    def _running(self, since: Ints, until: Ints, row: Ints, parts: dict[Cause, Ints], is_first: Bools) -> None:
        """Move the request's own chunks of iterations (since, until] from `parts` of others to its own.

        `is_first`: the chunks before its first token, where what is computed for the first time is no
        recomputation. Waits between chunks that a preemption made are moved as well. Mutates `parts`.
        """
        low, high = (np.searchsorted(self._chunk_key, self._key(row, at), side="right") for at in (since, until))
        own_ns = self._own_before[high] - self._own_before[low]
        again_ns = np.where(is_first, self._again_before[high] - self._again_before[low], own_ns)
        parts[Cause.OTHERS_PREFILL] = parts[Cause.OTHERS_PREFILL] - own_ns
        parts[Cause.PREFILL] = own_ns - again_ns
        parts[Cause.RECOMPUTE] = again_ns
        later = np.minimum(low + 1, high)
        lost = {cause: before[high] - before[later] for cause, before in self._lost_before.items()}
        _move(parts, lost, Cause.PREEMPTION)

    # ------------------------------------------------------------------ time to first token

    def ttft(self, rows: Ints, is_streaming: bool) -> Parts:
        """The causes of the TTFT of requests that have one, named by their rows.

        `is_streaming` is False for answers that come whole: TTFT then lasts until the release.
        """
        requests = self._tables.requests
        arrival_ns, queued_ns = requests["arrival_ns"][rows], requests["queued_ns"][rows]
        admitted = requests["admitted_iteration"][rows]
        last = requests["first_token_iteration" if is_streaming else "finished_iteration"][rows]
        parts = self._after(admitted - 1, last)
        parts[Cause.ADMISSION] = parts[Cause.ADMISSION] - np.diff(self._before[Cause.ADMISSION])[admitted]
        self._running(admitted - 1, last, rows, parts, np.ones(len(rows), dtype=np.bool_))
        for cause, wait_ns in self._waits(queued_ns, self._start_ns[admitted]).items():
            parts[cause] = parts.get(cause, 0) + wait_ns
        parts[Cause.CLIENT] = queued_ns - arrival_ns
        if not is_streaming:
            parts[Cause.BATCH_END] = requests["released_ns"][rows] - self._end_ns[last]
        return _without_zeros(parts)

    def _waits(self, start_ns: Ints, end_ns: Ints) -> dict[Cause, Ints]:
        """Time in the queue between two times, by cause."""
        blocked_by = self._tables.iterations["blocked_by"]
        idle = np.full(len(blocked_by), list(Cause).index(Cause.ADMISSION))
        host, device = (
            np.array([list(Cause).index(_HEAD_WAITS_FOR.get(reason, unblocked)) for reason in BlockedBy])[blocked_by]
            for unblocked in (Cause.HOST, Cause.STEP)
        )
        cause_of = np.append(np.stack([idle, host, device], axis=1).ravel(), -1)
        edges_ns = np.append(0, np.stack([self._start_ns, self._device_ns, self._end_ns], axis=1).ravel())
        lengths_ns = np.append(np.diff(edges_ns), 0)
        times = [(at, np.searchsorted(edges_ns, at, side="right") - 1) for at in (start_ns, end_ns)]
        waits = {}
        for index in np.unique(cause_of[:-1]).tolist():
            is_mine = cause_of == index
            before = _sums(np.where(is_mine, lengths_ns, 0))
            since, until = (before[piece] + np.where(is_mine[piece], at - edges_ns[piece], 0) for at, piece in times)
            waits[list(Cause)[index]] = until - since
        return waits

    # ------------------------------------------------------------------ inter-token gaps

    def itl(self, gaps: Gaps, tokens: TokenTimes) -> Parts:
        """The causes of gaps between tokens, one entry for each entry of `gaps`."""
        parts = self._after(gaps.since, gaps.iteration)
        edges = np.flatnonzero(gaps.edge != NEVER)
        kind = tokens.edge_kind[gaps.edge[edges]]
        for wanted, explain in ((Edge.PREEMPTED, self._preempted), (Edge.LEFT_OUT, self._left_out)):
            at = edges[kind == wanted]
            own = {cause: parts[cause][at] for cause in _WORK}
            explain(gaps.since[at], gaps.iteration[at], tokens.edge_row[gaps.edge[at]], own)
            for cause, values_ns in own.items():
                parts.setdefault(cause, np.zeros(len(gaps.edge), dtype=np.int64))[at] = values_ns
        return _without_zeros(parts)

    def _preempted(self, since: Ints, until: Ints, row: Ints, parts: dict[Cause, Ints]) -> None:
        self._running(since, until, row, parts, np.zeros(len(row), dtype=np.bool_))
        first = self._chunk_iteration[np.searchsorted(self._chunk_key, self._key(row, since), side="right")]
        _move(parts, self._until_device(since, first), Cause.PREEMPTION)

    def _left_out(self, since: Ints, until: Ints, row: Ints, parts: dict[Cause, Ints]) -> None:
        _move(parts, self._until_device(since, until), Cause.BUDGET)


def _move(parts: dict[Cause, Ints], what: Mapping[Cause, Ints], to: Cause) -> None:
    """Give what other causes were charged with to one. Mutates `parts`."""
    moved_ns = np.sum(list(what.values()), axis=0)
    for cause, work_ns in what.items():
        parts[cause] = parts[cause] - work_ns
    parts[to] = parts.get(to, 0) + moved_ns


def _sums(values: Ints) -> Ints:
    """The sum of all values before each position."""
    return np.concatenate([[0], np.cumsum(values)])


def _divided(totals: Ints, group: Ints, share: np.ndarray) -> Ints:
    """Whole numbers in the proportion of `share` that add up to the total of each group."""
    order = np.argsort(group, kind="stable")
    upto = np.cumsum(share[order])
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(group)))
    base = np.repeat(upto[starts] - share[order][starts], sizes)
    cut = np.rint(totals[group[order]] * np.clip(upto - base, 0.0, 1.0)).astype(np.int64)
    ends = starts + sizes - 1
    cut[ends] = totals[group[order][ends]]
    pieces = np.diff(cut, prepend=0)
    pieces[starts] = cut[starts]
    divided: Ints = np.empty_like(pieces)
    divided[order] = pieces
    return divided


def _highest_before(row: Ints, values: Ints) -> Ints:
    """The largest of the earlier values of the same row (rows are sorted); 0 for the first."""
    lift = row * (int(values.max(initial=0)) + 1)
    highest = np.maximum.accumulate(values + lift) - lift
    before: Ints = np.concatenate([[0], highest[:-1]])
    before[np.flatnonzero(np.diff(row, prepend=-1))] = 0
    return before


def _without_zeros(parts: Mapping[Cause, Ints]) -> Parts:
    return {cause: parts[cause] for cause in Cause if cause in parts and parts[cause].any()}
