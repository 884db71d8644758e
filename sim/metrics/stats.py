"""How sure a figure is: warm-up, confidence intervals, paired comparison. Functions of numbers, not of runs.

Three kinds of numbers need three kinds of care. Independent values (one per replication) take Student's t or
exact order statistics. The values of one run depend on their neighbours, and are judged by the means of long
batches, or by drawing whole blocks of them again. Two variants that met the same requests are compared
replication by replication, since most of what varies between replications is common to both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import InvariantError
from sim.metrics.distribution import Distribution, Ints

Floats = NDArray[np.float64]
Values = NDArray[Any]
"""One-dimensional: integers, floats or booleans."""

LEVEL = 0.95
"""Nominal coverage of an interval where nobody asks for another."""

NUM_BATCHES = 20
"""Batches that one run is cut into. B. Schmeiser, "Batch size effects in the analysis of simulation output",
Operations Research 30(3), 1982: between 10 and 30 are enough, and more make the batches depend on each other."""


@dataclass(frozen=True)
class Interval:
    """A figure with its confidence interval; `low` and `high` may be infinite where the data cannot tell."""

    value: float
    low: float
    high: float
    level: float = LEVEL

    @property
    def half_width(self) -> float:
        """Half of what lies between the ends."""
        return (self.high - self.low) / 2

    @property
    def relative_half_width(self) -> float:
        """The same as a part of the value; infinite for a value of 0 that is not certain."""
        if self.half_width == 0:
            return 0.0
        return self.half_width / abs(self.value) if self.value else np.inf

    def has(self, value: float) -> bool:
        """Whether `value` lies inside, ends included."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class WarmUp:
    """What of a series is left out because it began elsewhere than it settled."""

    num_cut: int
    is_settled: bool
    """False: the best cut would take half of the series or more, so nothing says that it settles at all."""


def find_warm_up(values: Values) -> WarmUp:
    """Where a series settles, by MSER-5: the cut that leaves the mean of the rest with the least standard error.

    The rule is applied to means of five neighbours and looks for a cut in the first half only. K. P. White,
    M. J. Cobb, S. C. Spratt, "A comparison of five steady-state truncation heuristics for simulation", WSC 2000.
    """
    num = len(values) // 5
    if num < 4:
        return WarmUp(0, is_settled=False)
    means = values[: 5 * num].reshape(num, 5).mean(axis=1)
    left = np.arange(num, 0, -1)
    total = np.cumsum(means[::-1])[::-1]
    squares = np.cumsum((means**2)[::-1])[::-1]
    candidates = num // 2 + 1
    error = (np.maximum(squares - total**2 / left, 0) / left**2)[:candidates]
    best = int(np.argmin(error))
    return WarmUp(5 * best, is_settled=best < candidates - 1)


def mean_interval(values: Values, level: float = LEVEL) -> Interval:
    """The mean of independent values, by Student's t. A single value has an infinite interval."""
    mean, num = float(np.mean(values)), len(values)
    if num < 2:
        return Interval(mean, -np.inf, np.inf, level)
    half = _t(level, num - 1) * float(np.std(values, ddof=1)) / np.sqrt(num)
    return Interval(mean, mean - half, mean + half, level)


def batch_means(values: Values, num_batches: int = NUM_BATCHES) -> Floats:
    """The means of equally long stretches of a series; what is left over at its beginning is dropped."""
    size = len(values) // num_batches
    if size == 0:
        raise InvariantError(f"{len(values)} values cannot be cut into {num_batches} batches")
    batches = values[len(values) - size * num_batches :].reshape(num_batches, size)
    means: Floats = batches.mean(axis=1, dtype=np.float64)
    return means


def run_mean_interval(values: Values, level: float = LEVEL, num_batches: int = NUM_BATCHES) -> Interval:
    """The mean of one run's series (latencies in arrival order, or whether each request was good), by batch means."""
    return mean_interval(batch_means(values, num_batches), level)


def percentile_interval(values: Values, percent: float, level: float = LEVEL) -> Interval:
    """A percentile of independent values between two order statistics whose ranks are binomial: exact, no density.

    W. J. Conover, "Practical Nonparametric Statistics", 1999, section 3.2. An end lies at infinity where there
    are too few values to have one that far out.
    """
    from scipy.stats import binom

    num, share = len(values), percent / 100
    below, above = (float(binom.ppf((1 + sign * level) / 2, num, share)) for sign in (-1, 1))
    return _between_ranks(values, percent, below, above + 1, level)


def run_percentile_interval(
    values: Values, percent: float, level: float = LEVEL, num_batches: int = NUM_BATCHES
) -> Interval:
    """A percentile of one run's series (in its order), between order statistics.

    How far the ranks lie apart comes from batch means of "lies below the percentile", which are as dependent
    as the series is. P. Heidelberger, P. A. W. Lewis, "Quantile estimation in dependent sequences",
    Operations Research 32(1), 1984.
    """
    estimate = Distribution(values).percentile(percent)
    is_below = batch_means(values <= estimate, num_batches)
    half = _t(level, num_batches - 1) * float(np.std(is_below, ddof=1)) / np.sqrt(num_batches)
    num, share = len(values), percent / 100
    return _between_ranks(values, percent, num * (share - half), num * (share + half) + 1, level)


def bootstrap_interval(
    values: Values,
    statistic: Callable[[Values], float],
    rng: np.random.Generator,
    *,
    block: int,
    level: float = LEVEL,
    num_resamples: int = 1000,
) -> Interval:
    """Any statistic of a series, from drawing blocks of `block` neighbours again (1: independent values).

    The basic interval of the circular block bootstrap: D. N. Politis, J. P. Romano, "A circular
    block-resampling procedure for stationary data", 1992.
    """
    estimate = statistic(values)
    draws = [statistic(values[circular_blocks(len(values), block, rng)]) for _ in range(num_resamples)]
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate, 2 * estimate - float(high), 2 * estimate - float(low), level)


def circular_blocks(num: int, block: int, rng: np.random.Generator) -> Ints:
    """Positions 0 to `num` - 1 as blocks of `block` neighbours, drawn with replacement from a circle."""
    starts = rng.integers(num, size=-(-num // block))
    positions: Ints = ((starts[:, None] + np.arange(block)) % num).ravel()[:num]
    return positions


def paired_difference(ours: Values, theirs: Values, level: float = LEVEL) -> Interval:
    """The mean of `ours` - `theirs`, values that belong together replication by replication."""
    if len(ours) != len(theirs):
        raise InvariantError(f"{len(ours)} values cannot be paired with {len(theirs)}")
    return mean_interval(np.asarray(ours, dtype=np.float64) - theirs, level)


def jackknife_values(estimate: Callable[[Ints], float], num: int) -> Floats:
    """One value for each of `num` replications whose mean is `estimate` of all of them, less most of its bias.

    `estimate` maps the positions of some replications to a figure. The values may be treated as independent:
    J. W. Tukey, 1958; R. G. Miller, "The jackknife: a review", Biometrika 61(1), 1974.
    """
    everyone = np.arange(num)
    whole = estimate(everyone)
    return np.array([num * whole - (num - 1) * estimate(np.delete(everyone, i)) for i in everyone])


def _between_ranks(values: Values, percent: float, below: float, above: float, level: float) -> Interval:
    """The interval from the value of rank `below` (counted from 1, rounded out) to that of rank `above`."""
    ordered, num = np.sort(values), len(values)
    first, last = int(np.floor(below)), int(np.ceil(above))
    low = float(ordered[first - 1]) if first >= 1 else -np.inf
    high = float(ordered[last - 1]) if last <= num else np.inf
    value = Distribution(ordered).percentile(percent)
    if value is None:
        raise InvariantError("a percentile of no values")
    return Interval(value, low, high, level)


def _t(level: float, degrees: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, degrees))
