"""Where scores of several targets cross zero, from replications at a few loads, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.metrics.distribution import Ints
from sim.metrics.stats import LEVEL, Floats, Interval, jackknife_values, mean_interval
from sim.planning.probe import Observation, Target, common_warm_up


@dataclass(frozen=True)
class Crossing:
    """The load at which the first target reaches its limit, estimated from `loads` on either side of it."""

    interval: Interval
    binding: Target
    log_loads: Floats
    """One value per replication; their mean is the logarithm of the load (see `jackknife_values`). Variants that
    were replicated with the same random numbers are compared through them."""


def score_at(targets: Sequence[Target], observations: Sequence[Observation]) -> float:
    """The score of the target that is worst off, over all replications at one load."""
    cut, _ = common_warm_up([observation.seen for observation in observations])
    return max(_scores(targets, observations, cut))


def crossing(
    targets: Sequence[Target],
    loads: Sequence[float],
    observations: Sequence[Sequence[Observation]],
    level: float = LEVEL,
) -> Crossing:
    """Where the targets' limits lie. `observations[i][j]`: replication j at `loads[i]` (increasing, two or more).

    Every target's score, pooled over the replications, is interpolated (beyond the ends: extrapolated)
    linearly in the logarithm of the load; the smallest load at which one is 0 is the boundary. Its interval
    is the jackknife's over replications, taken on the logarithm.
    """
    at = np.log(np.asarray(loads, dtype=np.float64))
    cuts = [common_warm_up([one.seen for one in column])[0] for column in observations]

    def roots(rows: Ints) -> list[float]:
        table = np.array(
            [_scores(targets, [c[row] for row in rows], cut) for c, cut in zip(observations, cuts, strict=True)]
        )
        return [_root(at, table[:, i]) for i in range(len(targets))]

    everyone = np.arange(len(observations[0]))
    each = roots(everyone)
    values = jackknife_values(lambda rows: min(roots(rows)), len(everyone)) if len(everyone) > 1 else np.array(each[:0])
    log = mean_interval(values, level) if len(values) else Interval(min(each), -np.inf, np.inf, level)
    interval = Interval(float(np.exp(min(each))), float(np.exp(log.low)), float(np.exp(log.high)), level)
    return Crossing(interval, targets[int(np.argmin(each))], values)


def _scores(targets: Sequence[Target], observations: Sequence[Observation], cut: int) -> list[float]:
    return [
        target.score([observation.tallies[cut][i] for observation in observations]) for i, target in enumerate(targets)
    ]


def _root(at: Floats, scores: Floats) -> float:
    """Where a line through the scores first rises through 0, or one width of `at` beyond the end that is nearer.

    A target far from its limit says little about where it would reach it.
    """
    width = at[-1] - at[0]
    above = np.flatnonzero(scores > 0)
    right = max(1, int(above[0])) if len(above) else len(at) - 1
    rise = scores[right] - scores[right - 1]
    if rise <= 0:
        return float(at[0] - width if scores[right] > 0 else at[-1] + width)
    root = at[right] - scores[right] * (at[right] - at[right - 1]) / rise
    return float(np.clip(root, at[0] - width, at[-1] + width))
