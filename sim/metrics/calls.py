"""Client batching: how long API calls with several prompts take, beside the latencies of their requests.

A call is answered when the last of its prompts is over, however early the others were: its latency is the longest
of theirs. How the server batches the requests has no part in the definition.
"""

from __future__ import annotations

import numpy as np

from sim.metrics.distribution import Bools, Ints
from sim.metrics.latency import Latency, answer_ns, is_answered
from sim.metrics.summary import Calls
from sim.record import Columns
from sim.request import NEVER, Outcome


def call_latencies(requests: Columns, end_ns: int, is_streaming: bool) -> Latency:
    """From each call's arrival to the end of its last answer, in order of the column `call`, which there must be.

    Known where all prompts of a call were answered, open where some were unfinished when the run ended (`end_ns`) and
    the others answered. A call with a prompt that was turned away or timed out has none.
    """
    rows, first = _members(requests)
    members = {name: values[rows] for name, values in requests.items()}
    arrival_ns, answered = members["arrival_ns"][first], is_answered(members)
    answered_ns = np.maximum.reduceat(answer_ns(members, is_streaming), first)
    is_whole = np.logical_and.reduceat(answered, first)
    may_be_whole = np.logical_and.reduceat(answered | (members["outcome"] == Outcome.UNFINISHED), first)
    return Latency(answered_ns - arrival_ns, is_whole, may_be_whole & ~is_whole, end_ns - arrival_ns)


def of_calls(requests: Columns, of: Bools) -> Bools:
    """Which calls have their first prompt among the requests in `of`; in order of the column `call`."""
    rows, first = _members(requests)
    return of[rows[first]]


def report_calls(requests: Columns, latency: Latency, is_measured: Bools) -> Calls:
    """Counts of the whole run; the latency of calls that arrived in the window. `is_measured` is by request."""
    return Calls(
        num_calls=len(latency.is_known),
        num_answered=int(np.count_nonzero(latency.is_known)),
        mean_prompts=float(np.count_nonzero(requests["call"] != NEVER) / len(latency.is_known)),
        call_latency_ms=latency.distribution(of_calls(requests, is_measured)).stats_ms(),
    )


def _members(requests: Columns) -> tuple[Ints, Ints]:
    """The rows of requests that belong to calls, and where among these rows each call begins."""
    rows = np.flatnonzero(requests["call"] != NEVER)
    call = requests["call"][rows]
    return rows, np.flatnonzero(np.append(True, call[1:] != call[:-1])[: len(call)])
