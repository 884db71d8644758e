"""From timed points to an artifact's tables: gaps filled, noise that contradicts physics taken out, errors known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.cost.artifact import AXES, Axis, Term
from sim.errors import ArtifactError

Floats = NDArray[np.float64]
NOT_TIMED = "not timed"
"""How the note of a term begins that was computed from a data sheet."""
_LARGEST = 1e14
"""Of a time in µs, and of what it depends on."""


def to_grid(points: Sequence[Floats], times: Floats) -> tuple[list[Floats], Floats]:
    """Scattered times as a table over every combination of their coordinates; NaN where nothing was timed.

    `points` has one array per axis, `times` the time at each point; a point timed twice gets the mean.
    """
    axes = [np.unique(values) for values in points]
    places = tuple(np.searchsorted(axis, values) for axis, values in zip(axes, points, strict=True))
    total = np.zeros([len(axis) for axis in axes])
    counts = np.zeros_like(total)
    np.add.at(total, places, times)
    np.add.at(counts, places, 1)
    table = np.divide(total, counts, out=np.full_like(total, np.nan), where=counts > 0)
    return axes, table


def fill_gaps(axes: Sequence[Floats], table: Floats, order: Sequence[int], place: str) -> Floats:
    """The table with points that were not timed interpolated from their neighbours, axis by axis in `order`.

    Nothing is extrapolated along an axis but by repeating its outermost time. Raises ArtifactError at
    `place` when a point has no neighbour along any axis, and for a table without any.
    """
    if not table.size:
        raise ArtifactError(place, "nothing was timed")
    for axis in order:
        table = np.apply_along_axis(_fill, axis, table, axes[axis])
    last = order[-1]
    table = np.apply_along_axis(_repeat_ends, last, table)
    if np.isnan(table).any():
        raise ArtifactError(place, f"{np.isnan(table).sum()} points of the grid cannot be interpolated")
    return table


def straight_on(points: Floats, table: Floats, least_slopes: Floats | None = None) -> Floats:
    """The table with its gaps along the last axis filled: interpolated inside, straight on beyond the last time.

    For what grows with that axis as attention does with contexts: the slope is that of the upper half of the
    times, which noise moves less than that of the last two, and no less than that row's of `least_slopes`. A row
    with a single time keeps it.
    """
    filled = np.apply_along_axis(_fill, -1, table, points)
    rows = filled.reshape(-1, len(points))
    least = np.zeros(len(rows)) if least_slopes is None else least_slopes
    for row, least_slope in zip(rows, least, strict=True):
        timed = np.flatnonzero(~np.isnan(row))
        upper, last = timed[-max(2, len(timed) // 2) :], timed[-1] if len(timed) else 0
        if len(upper) > 1 and last + 1 < len(points):
            slope = max(float(least_slope), float(np.polyfit(points[upper], row[upper], 1)[0]))
            row[last + 1 :] = row[last] + slope * (points[last + 1 :] - points[last])
    whole: Floats = np.apply_along_axis(_repeat_ends, -1, rows.reshape(table.shape))
    return whole


def rising(table: Floats) -> Floats:
    """The table made to fall along no axis: more work never takes less time.

    Halfway between the smallest such table that is nowhere below this one and the largest that is nowhere above
    it, so that noise moves it up as much as down.
    """
    above = below = table
    for axis in range(table.ndim):
        above = np.maximum.accumulate(above, axis=axis)
        below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis=axis), axis)
    halfway: Floats = (above + below) / 2
    return halfway


def holdout_error(points: Floats, table: Floats) -> float:
    """Mean absolute relative error of every other point along the last axis, interpolated from its neighbours."""
    inner = np.arange(1, len(points) - 1, 2)
    if not len(inner):
        return 0.0
    share = (points[inner] - points[inner - 1]) / (points[inner + 1] - points[inner - 1])
    predicted = table[..., inner - 1] * (1 - share) + table[..., inner + 1] * share
    return float(np.mean(np.abs(predicted / table[..., inner] - 1)))


def term(kind: str, name: str, axes: Sequence[Floats], table: Floats, calls: int, note: str = "") -> Term:
    """A term of an artifact, times in µs with six significant digits.

    Raises ArtifactError for a table that is none: one point along an axis, or times that are not known.
    """
    for axis, points in zip(AXES[kind], axes, strict=True):
        if len(points) < 2:
            raise ArtifactError(name, f"was timed at {len(points)} {axis} only", valid="expected two or more points")
        if not (points[0] >= 0 and points[-1] < _LARGEST):
            raise ArtifactError(
                name,
                f"was timed at {axis} {points[0]:g} to {points[-1]:g}",
                valid=f"expected zero or more, below {_LARGEST:g}",
            )
    bad = ~(np.isfinite(table) & (table >= 0) & (table < _LARGEST))
    if bad.any():
        raise ArtifactError(
            name,
            f"{bad.sum()} of {table.size} times do not follow from what was timed (the first: {table[bad][0]:g} us)",
            valid=f"expected zero or more, below {_LARGEST:g} us",
        )
    return Term.model_validate(
        {
            "name": name,
            "kind": kind,
            "calls": calls,
            "note": note,
            "axes": [Axis(name=axis, points=points.tolist()) for axis, points in zip(AXES[kind], axes, strict=True)],
            "us": [float(f"{value:.6g}") for value in table.ravel()],
        }
    )


def _fill(values: Floats, points: Floats) -> Floats:
    timed = ~np.isnan(values)
    if timed.sum() < 2:
        return values
    inside = (points >= points[timed][0]) & (points <= points[timed][-1])
    return np.where(inside, np.interp(points, points[timed], values[timed]), values)


def _repeat_ends(values: Floats) -> Floats:
    timed = np.flatnonzero(~np.isnan(values))
    if len(timed):
        values = values.copy()
        values[: timed[0]], values[timed[-1] :] = values[timed[0]], values[timed[-1]]
    return values
