"""Who was served how much, and who waited: service per client, how equal it is, and what it cost in time.

A client is a request class. Service counts a prompt token once, when its request is first admitted, and an
output token twice, when its client receives it: the prices of Sheng et al. 2024, "Fairness in Serving Large
Language Models" (VTC).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.clock import NS_PER_MS
from sim.metrics.distribution import Bools, Distribution, Ints, each_bucket
from sim.metrics.latency import Latency, waits
from sim.metrics.summary import ClientService, Fairness, Slowdown, SlowdownBucket
from sim.metrics.tokens import TokenTimes
from sim.metrics.window import Window
from sim.record import Columns
from sim.request import NEVER

INPUT_PRICE, OUTPUT_PRICE = 1, 2
NUM_MOMENTS = 500
"""Moments of the window at which clients are compared."""


def cumulative_service(requests: Columns, tokens: TokenTimes, of: Bools, times_ns: Ints) -> Ints:
    """Service that the requests in `of` have got by each of these times."""
    admitted = of & (requests["admitted_ns"] != NEVER)
    order = np.argsort(requests["admitted_ns"][admitted], kind="stable")
    admitted_ns = requests["admitted_ns"][admitted][order]
    prompt_tokens = np.concatenate([[0], np.cumsum(requests["prompt_tokens"][admitted][order])])
    by_then: Ints = prompt_tokens[np.searchsorted(admitted_ns, times_ns, side="right")]
    return INPUT_PRICE * by_then + OUTPUT_PRICE * tokens.num_tokens_by(times_ns, of)


def fairness(
    requests: Columns,
    tokens: TokenTimes,
    window: Window,
    run_end_ns: int,
    latencies: Mapping[str, Latency],
    class_names: Sequence[str],
) -> Fairness | None:
    """How service and waits are spread over clients; None where there is one client only.

    Service is that of the window; waits and slowdowns are those of requests that arrived in it.
    """
    if len(class_names) < 2:
        return None
    times_ns = np.linspace(window.start_ns - 1, window.end_ns, NUM_MOMENTS).astype(np.int64)
    masks = [requests["class_index"] == index for index in range(len(class_names))]
    paths = np.array([cumulative_service(requests, tokens, mask, times_ns) for mask in masks])
    paths -= paths[:, :1]
    differences = paths.max(axis=0) - paths.min(axis=0)
    service = paths[:, -1]
    measured = window.has_arrival_of(requests)
    slowdowns = slowdown(latencies)
    return Fairness(
        by_client={
            name: ClientService(
                service=int(service[index]),
                service_per_s=window.per_second(int(service[index])),
                longest_wait_ms=_longest_wait_ms(requests, masks[index] & measured, run_end_ns),
                slowdown=_slowdown_stats(slowdowns[masks[index] & measured]),
            )
            for index, name in enumerate(class_names)
        },
        jain_index=jain_index(service),
        service_difference=int(differences[-1]),
        peak_service_difference=int(differences.max()),
        slowdown_by_tokens=[
            SlowdownBucket(low=low, high=high, slowdown=stats)
            for low, high, inside in each_bucket((requests["prompt_tokens"] + requests["output_tokens"])[measured])
            if (stats := _slowdown_stats(slowdowns[measured][inside])).count
        ],
    )


def jain_index(shares: Ints) -> float | None:
    """Jain's fairness index: 1 when all are equal, 1 / n when one has everything; None when nobody has anything."""
    total = float(shares.sum())
    return total**2 / (len(shares) * float((shares.astype(np.float64) ** 2).sum())) if total else None


def slowdown(latencies: Mapping[str, Latency]) -> NDArray[np.float64]:
    """Per request: its end-to-end latency over the time since it was first admitted; NaN where it has not finished.

    1: it never waited. What sharing a batch costs is in both, so this is the price of waiting alone.
    """
    whole, queue, client = latencies["e2e"], latencies["queue"], latencies["client_queue"]
    waited_ns = queue.values_ns + client.values_ns
    known = whole.is_known & queue.is_known & (whole.values_ns > waited_ns)
    slowdowns = np.full(len(known), np.nan)
    slowdowns[known] = whole.values_ns[known] / (whole.values_ns - waited_ns)[known]
    return slowdowns


def _slowdown_stats(values: NDArray[np.float64]) -> Slowdown:
    known = Distribution(values[~np.isnan(values)])
    return Slowdown(
        count=known.count,
        mean=known.statistic("mean"),
        p50=known.statistic("p50"),
        p99=known.statistic("p99"),
        max=known.statistic("max"),
    )


def _longest_wait_ms(requests: Columns, of: Bools, run_end_ns: int) -> float | None:
    start_ns, end_ns = waits(requests, run_end_ns, "admitted")
    waited = of & (requests["queued_ns"] != NEVER)
    return float((end_ns - start_ns)[waited].max()) / NS_PER_MS if waited.any() else None
