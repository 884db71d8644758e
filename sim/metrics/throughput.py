"""Rates over the measurement window, and goodput."""

from __future__ import annotations

import numpy as np

from sim.metrics.distribution import Bools
from sim.metrics.latency import answer_ns, is_answered
from sim.metrics.summary import Throughput
from sim.metrics.tokens import TokenTimes
from sim.metrics.window import Window
from sim.record import Columns


def throughput(
    requests: Columns, tokens: TokenTimes, window: Window, is_streaming: bool, of: Bools, is_good: Bools | None
) -> Throughput:
    """What left the engine in the window for the requests in `of`, whenever they arrived.

    `is_good`: who keeps the SLO (None: there is none).
    """
    left_ns = answer_ns(requests, is_streaming)
    done = of & is_answered(requests) & (left_ns >= window.start_ns) & (left_ns <= window.end_ns)
    if is_streaming:
        num_tokens = tokens.num_tokens_between(window.start_ns, window.end_ns, of)
    else:
        num_tokens = int(requests["output_tokens"][done].sum())
    return Throughput(
        requests_per_s=window.per_second(int(np.count_nonzero(done))),
        output_tokens_per_s=window.per_second(num_tokens),
        goodput_requests_per_s=None if is_good is None else window.per_second(int(np.count_nonzero(done & is_good))),
        good_share=None if is_good is None else _share(is_good, of & window.has_arrival_of(requests)),
    )


def _share(is_good: Bools, of: Bools) -> float | None:
    return np.count_nonzero(is_good & of) / np.count_nonzero(of) if of.any() else None
