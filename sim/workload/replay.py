"""What is done with the rows of a trace, whatever its format: sorting, window, thinning, resampling, limit, rate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sim.clock import NS_PER_S, to_ns
from sim.errors import TraceError
from sim.tokens import Run, TokenRuns
from sim.workload.base import Ints, TraceOptions, TraceRows, no_shared_tokens
from sim.workload.times import MAX_TIME_S, check_number

_MIN_BLOCKS = 10
"""A recording shorter than so many blocks has shorter blocks, so that there are some to draw from."""


def in_arrival_order(
    arrival_ns: Ints,
    prompt_tokens: Ints,
    output_tokens: Ints,
    tokens: Callable[[int], TokenRuns] = no_shared_tokens,
) -> TraceRows:
    """Rows (at least one) sorted by arrival, equal times in the order given, the first one at 0."""
    order = np.argsort(arrival_ns, kind="stable")
    sorted_rows = TraceRows(arrival_ns - arrival_ns.min(), prompt_tokens, output_tokens, tokens)
    return sorted_rows if _is_identity(order) else _select(sorted_rows, order)


def play(
    rows: TraceRows,
    options: TraceOptions,
    rng: np.random.Generator,
    *,
    num_requests: int | None = None,
    duration_ns: int | None = None,
) -> TraceRows:
    """The rows that a run replays. `rng` decides which ones thinning keeps, one draw per recorded row, and then
    which blocks resampling draws.

    The window `[start_s, start_s + duration_s)` is in recorded time; its beginning becomes time 0. How many
    requests a run has room for, and until when, matters to a resampled trace only, which has no end of its
    own. Raises TraceError when nothing is left, or when it would take longer than a run can last.
    """
    start_ns = to_ns(options.start_s)
    keep = rows.arrival_ns >= start_ns
    if options.duration_s is not None:
        keep &= rows.arrival_ns < start_ns + to_ns(options.duration_s)
    if not keep.any():
        raise TraceError(
            options.path,
            f"no request lies between start_s {options.start_s:g} and the end of the window",
            valid=f"the trace lasts {rows.arrival_ns[-1] / 1e9:.6g} s",
        )
    if options.thin < 1:
        keep &= rng.random(len(rows)) < options.thin
    kept = np.flatnonzero(keep)
    if not len(kept):
        raise TraceError(
            options.path, f"thin {options.thin:g} keeps none of the requests", remedy="Raise it, or widen the window."
        )
    played = rows if len(kept) == len(rows) else _select(rows, kept)
    played = TraceRows(played.arrival_ns - start_ns, played.prompt_tokens, played.output_tokens, played.tokens)
    if options.resample_s is not None:
        until_ns = None if duration_ns is None else round(duration_ns * options.rate_scale) + 1
        wanted = min((n for n in (num_requests, options.limit) if n is not None), default=None)
        played = resampled(played, _span_ns(played, options), to_ns(options.resample_s), rng, wanted, until_ns)
    if options.limit is not None and options.limit < len(played):
        played = _select(played, np.arange(options.limit))
    since_start_ns = played.arrival_ns
    if int(since_start_ns[-1]) > MAX_TIME_S * NS_PER_S * options.rate_scale:
        raise TraceError(
            options.path,
            f"rate_scale {options.rate_scale:g} stretches it beyond what a run can last",
            valid=f"at most {MAX_TIME_S:.0e} s",
        )
    arrival_ns = np.rint(since_start_ns / options.rate_scale).astype(np.int64)
    return TraceRows(arrival_ns, played.prompt_tokens, played.output_tokens, played.tokens)


def resampled(
    rows: TraceRows,
    span_ns: int,
    block_ns: int,
    rng: np.random.Generator,
    num_requests: int | None = None,
    until_ns: int | None = None,
) -> TraceRows:
    """Another recording with the same habits: blocks of `block_ns`, beginning anywhere, one after the other.

    The circular block bootstrap in time, with at least ten blocks to the recording: within a block everything is
    as recorded, and after the last of the recorded `span_ns` comes the first. It goes on
    until `num_requests` or `until_ns`, whichever comes first, or for `span_ns`; then time is stretched to the recorded
    mean rate, so that several of them differ in everything but their load. A request that is drawn again shares no
    tokens with itself, only with others that are drawn as often.
    """
    arrival_ns = np.concatenate([rows.arrival_ns, rows.arrival_ns + span_ns])
    block_ns = min(block_ns, -(-span_ns // _MIN_BLOCKS))
    if num_requests is None and until_ns is None:
        until_ns = span_ns
    pieces, times_ns, begin_ns, count = [], [], 0, 0
    while (until_ns is None or begin_ns < until_ns) and (num_requests is None or count < num_requests):
        start_ns = int(rng.integers(span_ns))
        low, high = np.searchsorted(arrival_ns, [start_ns, start_ns + block_ns])
        pieces.append(np.arange(low, high) % len(rows))
        times_ns.append(arrival_ns[low:high] - start_ns + begin_ns)
        begin_ns, count = begin_ns + block_ns, check_number(count + int(high - low))
    drawn = np.concatenate(pieces)[:num_requests]
    chosen = _select(rows, drawn)
    tokens = chosen.tokens if chosen.tokens is no_shared_tokens else _per_copy(chosen.tokens, _copies(drawn))
    drawn_ns = np.concatenate(times_ns)[:num_requests]
    whole_ns = begin_ns if len(drawn) == count else int(drawn_ns[-1]) + 1
    stretch = len(drawn) * span_ns / (len(rows) * whole_ns)
    arrival_ns = np.rint(drawn_ns * stretch).astype(np.int64)
    return TraceRows(arrival_ns, chosen.prompt_tokens, chosen.output_tokens, tokens)


def _span_ns(rows: TraceRows, options: TraceOptions) -> int:
    """How long the recording of these rows lasted: as asked for, or to one mean gap after the last of them."""
    if options.duration_s is not None:
        return to_ns(options.duration_s)
    last_ns = int(rows.arrival_ns[-1])
    return last_ns + last_ns // max(1, len(rows) - 1) + 1


def _copies(drawn: Ints) -> Ints:
    """How often each entry occurred before."""
    order = np.argsort(drawn, kind="stable")
    in_order = drawn[order]
    copies = np.empty(len(drawn), dtype=np.int64)
    copies[order] = np.arange(len(drawn)) - np.searchsorted(in_order, in_order)
    return copies


def _per_copy(tokens: Callable[[int], TokenRuns], copies: Ints) -> Callable[[int], TokenRuns]:
    """The same identities, with streams of their own for every further copy."""

    def of(row: int) -> TokenRuns:
        runs, copy = tokens(row), int(copies[row])
        output = None if runs.output_stream is None else (copy, runs.output_stream)
        return TokenRuns(tuple(Run((copy, run.stream), run.length) for run in runs.prefix), output)

    return of


def _select(rows: TraceRows, chosen: Ints) -> TraceRows:
    tokens = rows.tokens
    return TraceRows(
        rows.arrival_ns[chosen],
        rows.prompt_tokens[chosen],
        rows.output_tokens[chosen],
        tokens if tokens is no_shared_tokens else lambda row: tokens(int(chosen[row])),
    )


def _is_identity(order: Ints) -> bool:
    return bool((order == np.arange(len(order))).all())
