"""Whether a run has a steady state at all, and where it begins.

A server that is offered more than it can sustain answers ever later: the wait of a request grows with the time of
its arrival, by λ / μ - 1 seconds a second where λ is offered and μ sustained. Percentiles of such a run say how
long the run was and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.clock import NS_PER_S
from sim.metrics.distribution import Bools, Ints
from sim.metrics.latency import waits
from sim.metrics.stats import NUM_BATCHES, WarmUp, batch_means, find_warm_up
from sim.metrics.summary import SteadyReport
from sim.record import Columns
from sim.request import NEVER, Outcome

_MIN_EXCESS = 0.02
"""Load above what is sustained by less than this part is not told from a busy queue."""
_MIN_FIT = 0.8
"""Share of the variance between batches that a straight line must explain to be called growth."""
_MIN_REQUESTS = 10 * NUM_BATCHES


class Growth(NamedTuple):
    """The straight line through the mean waits of batches of requests, by arrival."""

    slope: float
    """Seconds of wait for a second of later arrival: λ / μ - 1 under overload, about 0 in a steady state."""
    fit: float
    """R² of the line."""


def in_arrival_order(requests: Columns) -> Ints:
    """Rows of the requests table by arrival, equal times by row."""
    return np.argsort(requests["arrival_ns"], kind="stable")


def seen_by_arrivals(requests: Columns) -> Ints:
    """How many requests, in arrival order, each one found arrived and not yet over: the state of the system."""
    arrival_ns = np.sort(requests["arrival_ns"])
    over_ns = requests["released_ns"].copy()
    for column in (requests["finished_ns"], requests["cancelled_ns"]):
        over_ns = np.where(over_ns == NEVER, column, over_ns)
    over_ns = np.where(requests["outcome"] == Outcome.REJECTED, requests["arrival_ns"], over_ns)
    ends_ns = np.sort(over_ns[over_ns != NEVER])
    seen: Ints = np.arange(len(arrival_ns)) - np.searchsorted(ends_ns, arrival_ns, side="right")
    return np.maximum(seen, 0)


def warm_up(requests: Columns) -> WarmUp:
    """How many of the first arrivals met a system that was still filling up."""
    return find_warm_up(seen_by_arrivals(requests))


def wait_growth(requests: Columns, end_ns: int) -> Growth | None:
    """How waits for admission (those at the client included) grow with the arrival; `end_ns`: the run's end.

    None where nothing can be told: fewer than 200 requests were queued, or all arrive at once.
    """
    order = in_arrival_order(requests)
    start_ns, until_ns = (column[order] for column in waits(requests, end_ns, "admitted"))
    queued: Bools = start_ns != NEVER
    arrival_s = requests["arrival_ns"][order][queued] / NS_PER_S
    wait_s = until_ns[queued] / NS_PER_S - arrival_s
    if len(wait_s) < _MIN_REQUESTS or arrival_s[0] == arrival_s[-1]:
        return None
    times, means = batch_means(arrival_s), batch_means(wait_s)
    spread = times - times.mean()
    slope = float(spread @ means / (spread @ spread))
    total = float(((means - means.mean()) ** 2).sum())
    return Growth(slope, slope**2 * float(spread @ spread) / total if total else 0.0)


def report_steadiness(requests: Columns, end_ns: int, is_closed_loop: bool) -> SteadyReport:
    """The verdict on a run; `end_ns` is when it ended."""
    num = len(requests["arrival_ns"])
    cut = warm_up(requests)
    arrival_ns = np.sort(requests["arrival_ns"])
    span_s = (int(arrival_ns[-1]) - int(arrival_ns[0])) / NS_PER_S if num else 0.0
    growth = None if is_closed_loop else wait_growth(requests, end_ns)
    if growth is None:
        why = "a closed loop cannot be overloaded" if is_closed_loop else "too few requests, or all at once"
        return _steady(cut, arrival_ns, None, None, None, f"whether the run is steady was not judged: {why}")
    offered = (num - 1) / span_s
    # The queue of a server that is exactly full drifts by some sqrt(num) requests.
    least = max(_MIN_EXCESS, 2 / np.sqrt(num))
    if growth.slope > least and growth.fit > _MIN_FIT:
        sustained = offered / (1 + growth.slope)
        verdict = (
            f"unstable: offered {_rate(offered)} req/s exceeds the sustainable {_rate(sustained)}; percentiles depend "
            "on run length and are not reported as steady"
        )
        return _steady(cut, arrival_ns, False, offered, sustained, verdict)
    return _steady(cut, arrival_ns, True, offered, None, f"waits do not grow at {_rate(offered)} req/s")


def _steady(
    cut: WarmUp, arrival_ns: Ints, is_stable: bool | None, offered: float | None, sustained: float | None, verdict: str
) -> SteadyReport:
    warmup_s = (int(arrival_ns[cut.num_cut]) - int(arrival_ns[0])) / NS_PER_S if len(arrival_ns) else 0.0
    return SteadyReport(
        is_stable=is_stable,
        offered_requests_per_s=offered,
        sustainable_requests_per_s=sustained,
        warmup_requests=cut.num_cut,
        warmup_s=warmup_s,
        is_settled=cut.is_settled,
        verdict=verdict,
    )


def _rate(per_s: float) -> str:
    return f"{per_s:.3g}" if per_s < 1000 else f"{per_s:,.0f}"
