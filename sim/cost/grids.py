"""Interpolation in measured tables: linear between points, constant before the first, straight on after the last.

Nothing is faster than the smallest thing that was measured, so tables do not fall below their first point;
beyond the last one they go on as steeply as they arrived there. What a table says outside its points is
an extrapolation, and reported as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """A piecewise linear function of one variable, in the form that prices fastest: `base[i] + slope[i] · x`.

    `i = bisect_right(breaks, x)`. Scalars and arrays are computed by the same operations.
    """

    breaks: list[float]
    base: list[float]
    slope: list[float]

    @classmethod
    def through(cls, points: Floats, values: Floats) -> Line:
        """The function through measured points, sorted and at least two."""
        slope = np.diff(values) / np.diff(points)
        base = values[:-1] - slope * points[:-1]
        return cls(points[:-1].tolist(), [float(values[0]), *base.tolist()], [0.0, *slope.tolist()])

    def at(self, x: float) -> float:
        """The value at one place."""
        i = bisect_right(self.breaks, x)
        return self.base[i] + self.slope[i] * x

    def at_all(self, x: Floats) -> Floats:
        """The values at many places."""
        i = np.searchsorted(np.array(self.breaks), x, side="right")
        values: Floats = np.array(self.base)[i] + np.array(self.slope)[i] * x
        return values


def place(points: list[float], x: float) -> tuple[int, float]:
    """The interval of `points` (at least two) to interpolate `x` in, and how far into it (above 1: beyond the last)."""
    if x <= points[0]:
        return 0, 0.0
    i = bisect_right(points, x) - 1
    last = len(points) - 2
    i = min(i, last)
    return i, (x - points[i]) / (points[i + 1] - points[i])


def along_first_axis(points: list[float], values: Floats, x: float) -> Floats:
    """A table with its first axis interpolated away at `x`. Shape: that of `values` without its first axis."""
    i, part = place(points, x)
    blended: Floats = values[i] * (1.0 - part) + values[i + 1] * part
    return blended


def bilinear(axes: Sequence[list[float]], rows: list[list[float]], x: float, y: float) -> float:
    """A table of two variables at one place; `axes` are their points."""
    i, part = place(axes[0], x)
    j, share = place(axes[1], y)
    low, high = rows[i], rows[i + 1]
    below = low[j] + (low[j + 1] - low[j]) * share
    return below + (high[j] + (high[j + 1] - high[j]) * share - below) * part


def trilinear(axes: Sequence[list[float]], cube: list[list[list[float]]], x: float, y: float, z: float) -> float:
    """A table of three variables at one place; `axes` are their points."""
    i, part = place(axes[0], x)
    j, share = place(axes[1], y)
    k, weight = place(axes[2], z)
    (low, high), (deep_low, deep_high) = cube[i][j : j + 2], cube[i + 1][j : j + 2]
    below = low[k] + (low[k + 1] - low[k]) * weight
    below += (high[k] + (high[k + 1] - high[k]) * weight - below) * share
    above = deep_low[k] + (deep_low[k + 1] - deep_low[k]) * weight
    above += (deep_high[k] + (deep_high[k + 1] - deep_high[k]) * weight - above) * share
    return below + (above - below) * part
