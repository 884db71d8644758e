"""What is done with the rows of a trace, whatever its format: sorting, window, thinning, limit, rate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sim.clock import NS_PER_S, to_ns
from sim.errors import TraceError
from sim.tokens import TokenRuns
from sim.workload.base import Ints, TraceOptions, TraceRows, no_shared_tokens
from sim.workload.times import MAX_TIME_S


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


def play(rows: TraceRows, options: TraceOptions, rng: np.random.Generator) -> TraceRows:
    """The rows that a run replays. `rng` decides which ones thinning keeps, one draw per recorded row.

    The window `[start_s, start_s + duration_s)` is in recorded time; its beginning becomes time 0. Raises
    TraceError when nothing is left, or when it would take longer than a run can last.
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
    kept = np.flatnonzero(keep)[: options.limit]
    if not len(kept):
        raise TraceError(
            options.path, f"thin {options.thin:g} keeps none of the requests", remedy="Raise it, or widen the window."
        )
    played = rows if len(kept) == len(rows) else _select(rows, kept)
    since_start_ns = played.arrival_ns - start_ns
    if int(since_start_ns[-1]) > MAX_TIME_S * NS_PER_S * options.rate_scale:
        raise TraceError(
            options.path,
            f"rate_scale {options.rate_scale:g} stretches it beyond what a run can last",
            valid=f"at most {MAX_TIME_S:.0e} s",
        )
    arrival_ns = np.rint(since_start_ns / options.rate_scale).astype(np.int64)
    return TraceRows(arrival_ns, played.prompt_tokens, played.output_tokens, played.tokens)


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
