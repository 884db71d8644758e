"""Interpolation in measured tables: linear between points, constant before the first, straight on after the last.

Nothing is faster than the smallest thing that was measured, so tables do not fall below their first point;
beyond the last one they go on as steeply as they arrived there. What a table says outside its points is
an extrapolation, and reported as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    i = bisect_right(points, x, 1, len(points) - 1) - 1
    low = points[i]
    return i, (x - low) / (points[i + 1] - low) if x > low else 0.0


def along_first_axis(points: list[float], values: Floats, x: float) -> Floats:
    """A table with its first axis interpolated away at `x`. Shape: that of `values` without its first axis."""
    i, part = place(points, x)
    blended: Floats = values[i] * (1.0 - part) + values[i + 1] * part
    return blended


def bilinear(axes: Sequence[list[float]], rows: list[list[float]], x: float, y: float) -> float:
    """A table of two variables at one place; `axes` are their points."""
    xs, ys = axes
    i = bisect_right(xs, x, 1, len(xs) - 1) - 1  # `place`, written out: it is on the path of every decode step
    j = bisect_right(ys, y, 1, len(ys) - 1) - 1
    part = (x - xs[i]) / (xs[i + 1] - xs[i]) if x > xs[i] else 0.0
    share = (y - ys[j]) / (ys[j + 1] - ys[j]) if y > ys[j] else 0.0
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


def place_all(points: list[float], x: NDArray[Any]) -> tuple[NDArray[np.int64], Floats]:
    """`place` of many."""
    grid = np.array(points)
    i = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
    return i, np.maximum(x - grid[i], 0.0) / (grid[i + 1] - grid[i])


def multilinear_all(axes: Sequence[list[float]], table: Floats, places: Sequence[NDArray[Any]]) -> Floats:
    """A table of any number of variables at many places; the same as `bilinear` and `trilinear` up to rounding."""
    found = [place_all(points, x) for points, x in zip(axes, places, strict=True)]
    total = np.zeros(len(places[0]))
    for corner in range(1 << len(found)):
        weight, index = np.ones_like(total), []
        for axis, (i, part) in enumerate(found):
            is_high = corner >> axis & 1
            weight = weight * (part if is_high else 1.0 - part)
            index.append(i + is_high)
        total = total + weight * table[tuple(index)]
    return total
