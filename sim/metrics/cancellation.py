"""What it takes an engine to notice that a client has left, and what it computed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.metrics.distribution import Bools, Distribution, Ints
from sim.metrics.summary import Cancellation
from sim.metrics.tokens import TokenTimes, rows_of
from sim.record import Tables
from sim.request import NEVER


def cancellations(runs: Sequence[tuple[Tables, TokenTimes]]) -> Cancellation:
    """Of one engine, or of all engines of a fleet, each with its own tables.

    Delays from a client's departure to its KV being free and to blocks being given out again, and waste. The
    delays are of requests that held KV when their client left. Reuse is the first step started at or after
    the release that takes new blocks (any blocks: which ones is not recorded). Tokens for the departed are
    all that steps ending after the departure computed for them, prefill tokens included.
    """
    num_departed = num_tokens = 0
    to_free_ns, to_reuse_ns = [], []
    for tables, tokens in runs:
        left_ns, freed_ns = tables.requests["cancelled_ns"], tables.requests["released_ns"]
        held = (left_ns != NEVER) & (freed_ns != NEVER) & _was_scheduled(tables)
        num_departed += int(np.count_nonzero(left_ns != NEVER))
        num_tokens += _prefilled(tables) + int(tokens.num_undelivered.sum()) + _in_flight(tables, tokens)
        to_free_ns.append((freed_ns - left_ns)[held])
        to_reuse_ns.append(_to_reuse_ns(tables, left_ns[held], freed_ns[held]))
    return Cancellation(
        num_departed=num_departed,
        to_free_ms=Distribution(np.concatenate(to_free_ns)).stats_ms(),
        to_reuse_ms=Distribution(np.concatenate(to_reuse_ns)).stats_ms(),
        tokens_for_departed=num_tokens,
    )


def _was_scheduled(tables: Tables) -> Bools:
    """Which requests ever had KV. One whose client left during its first step was never admitted by the books."""
    was_scheduled: Bools = tables.requests["admitted_ns"] != NEVER
    was_scheduled[rows_of(tables.requests, tables.chunks["request"])] = True
    return was_scheduled


def _to_reuse_ns(tables: Tables, left_ns: Ints, freed_ns: Ints) -> Ints:
    iterations = tables.iterations
    taken_ns = np.sort(iterations["start_ns"][iterations["num_new_blocks"] > 0])
    next_taken = np.searchsorted(taken_ns, freed_ns)
    is_reused = next_taken < len(taken_ns)
    return taken_ns[next_taken[is_reused]] - left_ns[is_reused]


def _prefilled(tables: Tables) -> int:
    """Prefill tokens of chunks that ended after their client had left."""
    chunks = tables.chunks
    left_ns = tables.requests["cancelled_ns"][rows_of(tables.requests, chunks["request"])]
    is_late = (left_ns != NEVER) & (tables.iterations["end_ns"][chunks["iteration"]] > left_ns)
    return int(chunks["num_tokens"][is_late].sum())


def _in_flight(tables: Tables, tokens: TokenTimes) -> int:
    """Requests that were dropped while a step computed their next token, which then went nowhere.

    Such a token is in no segment: its request's last segment ends just before the step that runs at the
    departure.
    """
    left_ns = tables.requests["cancelled_ns"]
    is_dropped = (left_ns != NEVER) & (tables.requests["finished_ns"] == NEVER) & (tokens.num_undelivered == 0)
    last = _last_segments(tokens, is_dropped)
    next_tick = tokens.next_tick(last)
    last, next_tick = last[next_tick != NEVER], next_tick[next_tick != NEVER]
    step = tokens.tick_iteration[next_tick]
    departure_ns = left_ns[tokens.row[last]]
    planned_ns = tables.iterations["start_ns"][step] - tables.iterations["host_ns"][step]
    is_in_flight = (planned_ns < departure_ns) & (departure_ns <= tables.iterations["end_ns"][step])
    return int(np.count_nonzero(is_in_flight))


def _last_segments(tokens: TokenTimes, of: Bools) -> Ints:
    is_last = np.append(tokens.row[1:] != tokens.row[:-1], True)[: len(tokens.row)]
    return np.flatnonzero(is_last & of[tokens.row])
