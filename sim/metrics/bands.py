"""What the latencies between two percentiles are made of, and what makes the p99 the p99."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sim.clock import NS_PER_MS
from sim.metrics.causes import Cause, Parts
from sim.metrics.distribution import Ints
from sim.metrics.summary import CauseBand, CausesReport

BANDS = {"all": (0.0, 100.0), "p50": (45.0, 55.0), "p90": (89.0, 91.0), "p99": (98.5, 99.5)}
"""Name -> percentiles between which latencies are averaged."""

PHRASES = {
    Cause.CLIENT: "waiting for the client's own limit",
    Cause.SLOTS: "waiting for a place in the batch",
    Cause.KV: "waiting for KV blocks",
    Cause.BUDGET: "waiting for token budget",
    Cause.ADMISSION: "held back by a window, a pacing rule or a batch in progress",
    Cause.STEP: "waiting for the steps under way to end",
    Cause.PREEMPTION: "preempted, waiting for KV blocks again",
    Cause.RECOMPUTE: "computing lost tokens again",
    Cause.PREFILL: "its own prefill",
    Cause.OTHERS_PREFILL: "prefills of others in the same steps",
    Cause.DECODE: "decodes in the same steps",
    Cause.HOST: "the host (scheduling)",
    Cause.BATCH_END: "a finished answer held until its batch ends",
}
"""Cause -> what to call it in a sentence."""

_WORTH_NAMING = 0.1
_SAME = 0.01


@dataclass(frozen=True)
class Attribution:
    """Latencies, how often each was seen, and their parts by cause, in nanoseconds."""

    values_ns: Ints
    weights: Ints
    parts: Parts

    @classmethod
    def joined(cls, attributions: Sequence[Attribution]) -> Attribution:
        """Those of several engines, one after the other."""
        causes = [cause for cause in Cause if any(cause in one.parts for one in attributions)]
        parts = {
            cause: np.concatenate([one.parts.get(cause, np.zeros_like(one.values_ns)) for one in attributions])
            for cause in causes
        }
        values_ns = np.concatenate([one.values_ns for one in attributions])
        return cls(values_ns, np.concatenate([one.weights for one in attributions]), parts)

    def band(self, low_percent: float, high_percent: float) -> CauseBand | None:
        """The mean of the latencies that lie between two percentiles (0 to 100), and its parts; None without any.

        A latency that lies in the band in part counts in part, so that the parts change steadily with the band.
        """
        order, upto = self._ranked
        if not len(upto) or not high_percent > low_percent:
            return None
        low, high = (percent / 100 * int(upto[-1]) for percent in (low_percent, high_percent))
        inside = np.minimum(upto, high) - np.maximum(upto - self.weights[order], low)
        chosen = np.flatnonzero(inside > 0)
        rows, share = order[chosen], inside[chosen] / inside[chosen].sum()
        means = {cause.value: float(values[rows] @ share) / NS_PER_MS for cause, values in self.parts.items()}
        return CauseBand(
            low_percent=low_percent,
            high_percent=high_percent,
            mean_ms=float(self.values_ns[rows] @ share) / NS_PER_MS,
            parts_ms=dict(sorted(((c, ms) for c, ms in means.items() if ms), key=lambda part: -part[1])),
        )

    @cached_property
    def _ranked(self) -> tuple[Ints, Ints]:
        """Positions from the shortest latency to the longest, and how many were seen up to each."""
        order = np.argsort(self.values_ns, kind="stable")
        return order, np.cumsum(self.weights[order])


def report_causes(ttft: Attribution, itl: Attribution) -> CausesReport:
    """The standard bands of both latencies, and their verdicts."""
    reports = {name: _bands(attribution) for name, attribution in (("ttft", ttft), ("itl", itl))}
    verdicts = [_verdict(name.upper(), bands) for name, bands in reports.items() if bands]
    return CausesReport(**reports, verdicts=verdicts)


def _bands(attribution: Attribution) -> dict[str, CauseBand]:
    bands = {name: attribution.band(*percents) for name, percents in BANDS.items()}
    return {name: band for name, band in bands.items() if band is not None}


def _verdict(metric: str, bands: Mapping[str, CauseBand]) -> str:
    typical, tail = bands["p50"], bands["p99"]
    excess_ms = tail.mean_ms - typical.mean_ms
    if excess_ms <= _SAME * typical.mean_ms:
        named = _named(tail.parts_ms, tail.mean_ms)
        return f"{metric} is the same for all, {_ms(tail.mean_ms)}: {named}"
    more = {cause: ms - typical.parts_ms.get(cause, 0.0) for cause, ms in tail.parts_ms.items()}
    return (
        f"{metric} around p99 is {_ms(tail.mean_ms)}, {_ms(excess_ms)} more than around the median; of these, "
        f"{_named(more, excess_ms)}"
    )


def _named(parts_ms: Mapping[str, float], whole_ms: float) -> str:
    """The causes of most of `whole_ms`, largest first."""
    ranked = sorted(parts_ms.items(), key=lambda part: -part[1])
    chosen = [part for part in ranked if part[1] >= _WORTH_NAMING * whole_ms] or ranked[:1]
    return ", ".join(f"{100 * ms / whole_ms:.0f} % {PHRASES[Cause(cause)]}" for cause, ms in chosen)


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"
