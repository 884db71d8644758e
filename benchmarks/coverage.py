"""How often nominal 95 % intervals hold the truth, for queues whose truth is known.

    python benchmarks/coverage.py [REPLICATIONS]

Customers of M/M/1, M/D/1 and M/G/1 queues wait by Lindley's recursion (Proc. Cambridge Phil. Soc. 48, 1952), all
replications at once. Every replication begins with an empty queue, finds its own warm-up and makes the
intervals that `sim.metrics.stats` makes of a run. Truth: Pollaczek and Khinchine for mean waits; for M/M/1 also
the 99th percentile of responses, which are exponential, and the share that meets a limit. 2,000
replications leave 0.5 % (one standard error) on each coverage.
"""

import sys

import numpy as np

from sim.metrics.stats import (
    Floats,
    Interval,
    bootstrap_interval,
    find_warm_up,
    mean_interval,
    paired_difference,
    percentile_interval,
    run_mean_interval,
    run_percentile_interval,
)
from sim.rng import stream

Coverage = dict[str, tuple[float, int]]
"""Figure -> the share of intervals that hold the truth, and how many there were."""

NUM_CUSTOMERS = 50_000
"""Of a run that is judged by itself."""
LOAD = 0.5
"""Of the server; service takes 1 on average."""
GOOD_BELOW = 5.0
NUM_AT_ONCE = 100
GROUP = 10
"""Shorter runs that make one interval together, as independent values."""
NUM_IN_GROUP = 4_000
"""Customers of each of them."""


def services(queue: str, shape: tuple[int, int], rng: np.random.Generator) -> tuple[Floats, float]:
    """Service times with mean 1, and the mean of their squares."""
    if queue == "M/D/1":
        return np.ones(shape), 1.0
    if queue == "M/M/1":
        return rng.exponential(1.0, shape), 2.0
    # Two kinds of requests: short and, one in five, four times as long.
    long = rng.random(shape) < 0.2
    return np.where(long, 2.5, 0.625), 0.2 * 2.5**2 + 0.8 * 0.625**2


def waits(gaps: Floats, served: Floats) -> Floats:
    """Waits of successive customers (along the last axis): a random walk above its lowest point so far."""
    walk = np.cumsum(np.concatenate([np.zeros((len(gaps), 1)), served[:, :-1] - gaps[:, 1:]], axis=1), axis=1)
    return walk - np.minimum.accumulate(walk, axis=1)


def intervals(queue: str, wait: Floats, response: Floats) -> dict[str, Interval]:
    """Figure -> its interval from one run."""
    cut = find_warm_up(wait).num_cut
    wait, response = wait[cut:], response[cut:]
    found = {"mean wait, batch means": run_mean_interval(wait)}
    if queue == "M/M/1":
        found["p99 response, order statistics"] = run_percentile_interval(response, 99)
        found["goodput share, batch means"] = run_mean_interval(response <= GOOD_BELOW)
    return found


def truths(queue: str, second_moment: float) -> dict[str, float]:
    figures = {"mean wait, batch means": LOAD * second_moment / (2 * (1 - LOAD))}
    if queue == "M/M/1":
        figures["p99 response, order statistics"] = np.log(100) / (1 - LOAD)
        figures["goodput share, batch means"] = -np.expm1(-(1 - LOAD) * GOOD_BELOW)
    return figures


def measure(queue: str, num_replications: int, num_customers: int = NUM_CUSTOMERS) -> Coverage:
    """Figure -> the share of intervals from one run that hold the truth, and how many there were."""
    rng = stream(1, f"coverage/{queue}")
    hits: dict[str, list[bool]] = {}
    for _ in range(num_replications // NUM_AT_ONCE):
        shape = (NUM_AT_ONCE, num_customers)
        served, second_moment = services(queue, shape, rng)
        wait = waits(rng.exponential(1 / LOAD, shape), served)
        for row in range(NUM_AT_ONCE):
            found = intervals(queue, wait[row], wait[row] + served[row])
            for figure, truth in truths(queue, second_moment).items():
                hits.setdefault(figure, []).append(found[figure].has(truth))
    return {figure: (float(np.mean(found)), len(found)) for figure, found in hits.items()}


def measure_groups(queue: str, num_groups: int) -> Coverage:
    """The same for intervals from several runs, and for the difference that 10 % less load makes to the same ones."""
    rng = stream(1, f"coverage/{queue}/groups")
    hits: dict[str, list[bool]] = {"mean wait, replications": [], "difference of two loads, paired": []}
    for _ in range(num_groups):
        shape, cut = (GROUP, NUM_IN_GROUP), NUM_IN_GROUP // 10
        gaps = rng.exponential(1.0, shape)
        served, second_moment = services(queue, shape, rng)
        ours, theirs = (waits(gaps / load, served)[:, cut:].mean(axis=1) for load in (LOAD, LOAD - 0.1))
        truth, less = (load * second_moment / (2 * (1 - load)) for load in (LOAD, LOAD - 0.1))
        hits["mean wait, replications"].append(mean_interval(ours).has(truth))
        hits["difference of two loads, paired"].append(paired_difference(ours, theirs).has(truth - less))
    return {figure: (float(np.mean(found)), len(found)) for figure, found in hits.items()}


def mean(values: Floats) -> float:
    return float(values.mean())


def measure_independent(num_replications: int, num_values: int = 1000) -> Coverage:
    """The same for independent values (ranks) and for a moving average of them (bootstrap of blocks)."""
    rng = stream(1, "coverage/independent")
    hits: dict[str, list[bool]] = {"p90, binomial ranks": [], "mean, bootstrap of blocks": []}
    for _ in range(num_replications):
        values = rng.exponential(1.0, num_values)
        hits["p90, binomial ranks"].append(percentile_interval(values, 90).has(np.log(10)))
        found = bootstrap_interval((values[1:] + values[:-1]) / 2, mean, rng, block=20, num_resamples=300)
        hits["mean, bootstrap of blocks"].append(found.has(1.0))
    return {figure: (float(np.mean(found)), len(found)) for figure, found in hits.items()}


def main() -> None:
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for queue in ("M/M/1", "M/D/1", "M/G/1"):
        for figure, (share, tries) in (measure(queue, num) | measure_groups(queue, num)).items():
            print(f"{queue}  {figure:34} {share:6.1%} of {tries}")
    for figure, (share, tries) in measure_independent(num).items():
        print(f"i.i.d. {figure:34} {share:6.1%} of {tries}")


if __name__ == "__main__":
    main()
