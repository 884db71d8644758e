"""Latencies of requests, as their clients see them.

A client sees an answer when it leaves the engine: token by token if answers are streamed, otherwise all of
it at once when it is released. For an answer that is not streamed TTFT is therefore the end-to-end
latency, and there are no gaps between tokens to observe (no ITL, no TPOT).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.metrics.distribution import Bools, Distribution, Ints, Numbers
from sim.record import Columns
from sim.request import NEVER, Outcome

LATENCIES = ("ttft", "ttft_after_client_queue", "tpot", "ntpot", "e2e", "queue", "client_queue")
"""The latencies that a request has one of; the inter-token latency (`itl`) is the only other metric."""


@dataclass(frozen=True)
class Latency:
    """One latency of every request; entries are meaningful where `is_known`."""

    values_ns: Numbers
    is_known: Bools
    is_open: Bools
    """The run ended before the value was known."""
    at_least_ns: Ints
    """What it had come to by then, where open."""

    def distribution(self, of: Bools) -> Distribution:
        """The known values of the requests in `of`."""
        return Distribution(self.values_ns[self.is_known & of])

    def open_ns(self, of: Bools) -> Ints:
        """The lower bounds of the open values of the requests in `of`."""
        return self.at_least_ns[self.is_open & of]


def is_answered(requests: Columns) -> Bools:
    """Which requests finished with their client still there."""
    answered: Bools = (requests["outcome"] == Outcome.FINISHED) & (requests["cancelled_ns"] == NEVER)
    return answered


def answer_ns(requests: Columns, is_streaming: bool) -> Ints:
    """When a finished answer was complete at its client: with its last token, or at its release."""
    return requests["finished_ns"] if is_streaming else requests["released_ns"]


def request_latencies(requests: Columns, end_ns: int, is_streaming: bool) -> dict[str, Latency]:
    """Each of LATENCIES. `end_ns` is when the run ended."""
    arrival_ns, queued_ns = requests["arrival_ns"], requests["queued_ns"]
    admitted_ns, cancelled_ns = requests["admitted_ns"], requests["cancelled_ns"]
    num_tokens = requests["output_tokens"]
    answered = is_answered(requests)
    end_to_end_ns = answer_ns(requests, is_streaming) - arrival_ns
    first_ns = requests["first_token_ns"] if is_streaming else requests["released_ns"]
    is_seen = (first_ns != NEVER) & ((cancelled_ns == NEVER) | (first_ns <= cancelled_ns))
    has_first = is_seen if is_streaming else answered
    decode_ns = requests["finished_ns"] - requests["first_token_ns"]

    def latency(values_ns: Numbers, is_known: Bools, since_ns: Ints | None) -> Latency:
        is_open = (requests["outcome"] == Outcome.UNFINISHED) & ~is_known
        if since_ns is None:  # per token: of how many is not known yet
            return Latency(values_ns, is_known, is_open, np.zeros_like(arrival_ns))
        return Latency(values_ns, is_known, is_open & (since_ns != NEVER), end_ns - since_ns)

    return {
        "ttft": latency(first_ns - arrival_ns, has_first, arrival_ns),
        "ttft_after_client_queue": latency(first_ns - queued_ns, has_first, queued_ns),
        "tpot": latency(decode_ns / np.maximum(num_tokens - 1, 1), answered & (num_tokens > 1) & is_streaming, None),
        "ntpot": latency(end_to_end_ns / np.maximum(num_tokens, 1), answered, None),
        "e2e": latency(end_to_end_ns, answered, arrival_ns),
        "queue": latency(admitted_ns - queued_ns, admitted_ns != NEVER, queued_ns),
        "client_queue": latency(queued_ns - arrival_ns, queued_ns != NEVER, arrival_ns),
    }


def waits(requests: Columns, end_ns: int, before: str) -> tuple[Ints, Ints]:
    """Start and end of every request's wait `before` "queued" (at its client) or "admitted" (in the engine).

    Waits that nothing ended last until the client left, the request was turned away, or the run ended.
    """
    start_ns = requests["arrival_ns" if before == "queued" else "queued_ns"]
    until_ns, cancelled_ns = requests[f"{before}_ns"], requests["cancelled_ns"]
    otherwise_ns = np.where(cancelled_ns != NEVER, cancelled_ns, end_ns)
    otherwise_ns = np.where(requests["outcome"] == Outcome.REJECTED, start_ns, otherwise_ns)
    return start_ns, np.where(start_ns == NEVER, NEVER, np.where(until_ns != NEVER, until_ns, otherwise_ns))
