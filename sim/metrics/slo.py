"""Service-level objectives: what they ask, and which requests keep them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sim.clock import NS_PER_MS
from sim.errors import ScenarioError, did_you_mean
from sim.metrics.distribution import STATISTICS, Bools, Distribution, Ints, percent_of, to_ms
from sim.metrics.latency import LATENCIES, Latency
from sim.metrics.own_gaps import gap_percentile_within
from sim.metrics.summary import SloTermReport
from sim.metrics.tokens import TokenTimes

_METRICS = (*LATENCIES, "itl")

GOODPUT = "goodput"
"""The term that asks for a share of good requests rather than for a latency."""


@dataclass(frozen=True)
class SloTerm:
    """`statistic` of `metric` over all requests must be at most `limit_ms`."""

    statistic: str
    metric: str
    limit_ms: float

    @property
    def name(self) -> str:
        """As written in a scenario: `p99_ttft_ms`."""
        return f"{self.statistic}_{self.metric}_ms"


def parse_slo(slo: Mapping[str, float], place: str = "slo") -> tuple[SloTerm, ...]:
    """The latency terms of a scenario's `slo` section. Raises ScenarioError for a key that is no term of an SLO."""
    terms = tuple(_parse_term(key, limit_ms, place) for key, limit_ms in slo.items() if key != GOODPUT)
    share = slo.get(GOODPUT)
    if share is not None and not terms:
        raise ScenarioError(
            f"{place}.{GOODPUT}", "no other term says what a good request is", remedy="Give it a limit on a latency."
        )
    if share is not None and not 0 < share < 1:
        raise ScenarioError(f"{place}.{GOODPUT}", f"{share!r} is not a share", valid="a number between 0 and 1")
    return terms


def _parse_term(key: str, limit_ms: float, place: str) -> SloTerm:
    statistic, _, metric = key.removesuffix("_ms").partition("_")
    is_statistic = statistic == "mean" or percent_of(statistic) is not None
    if not key.endswith("_ms") or not is_statistic or metric not in _METRICS:
        terms = [f"{s}_{m}_ms" for s in STATISTICS for m in _METRICS]
        raise ScenarioError(
            place,
            f"unknown term {key!r}",
            valid=f"expected {GOODPUT}, or STATISTIC_METRIC_ms: mean, max or a percentile (p50, p99, p999) of "
            f"{', '.join(_METRICS)}",
            remedy=did_you_mean(key, [GOODPUT, *terms]),
        )
    if not 0 < limit_ms < float("inf"):
        raise ScenarioError(f"{place}.{key}", f"{limit_ms!r} is not a limit", valid="a finite number of ms above 0")
    return SloTerm(statistic, metric, float(limit_ms))


def report_slo(term: SloTerm, values: Distribution, open_ns: Ints) -> SloTermReport:
    """A term against the values of its metric; `open_ns`: what those cut off by the run's end had come to."""
    value_ns = values.statistic(term.statistic)
    return SloTermReport(
        term=term.name,
        limit=term.limit_ms,
        value=to_ms(value_ns),
        met=None if value_ns is None else value_ns <= term.limit_ms * NS_PER_MS,
        is_censored=bool(values.censored_by(open_ns, (term.statistic,))),
    )


def report_goodput(least: float, good_share: float | None, is_censored: bool) -> SloTermReport:
    """The term that asks for a share of good requests."""
    met = None if good_share is None else good_share >= least
    return SloTermReport(term=GOODPUT, limit=least, value=good_share, met=met, is_censored=is_censored)


def good_requests(
    terms: tuple[SloTerm, ...], latencies: Mapping[str, Latency], tokens: TokenTimes, is_streaming: bool
) -> Bools:
    """Which answered requests keep every term's limit by themselves.

    Of a latency that a request has once, its own value counts whatever the statistic; of its inter-token
    gaps, the term's own statistic. A request with one token has no gap and keeps any limit on them.
    """
    is_good = latencies["e2e"].is_known.copy()
    for term in terms:
        limit_ns = term.limit_ms * NS_PER_MS
        percent = percent_of(term.statistic) if term.metric == "itl" else None
        if percent is None:  # the mean of a request's own gaps is its time per output token
            latency = latencies["tpot" if term.metric == "itl" else term.metric]
            is_good &= ~latency.is_known | (np.asarray(latency.values_ns) <= limit_ns)
        elif is_streaming:
            is_good &= gap_percentile_within(tokens, percent, limit_ns)
    return is_good
