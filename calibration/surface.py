"""Scattered timed points → a table: a physical reference, and how measurements depart from it.

The table is the reference at the nodes of a grid times a ratio per node. Ratios are found by least squares of the
relative errors, weighted by how well each point is known, under the prior that a ratio wanders by some
`WANDER` a doubling along an axis. So points that were timed are reproduced, nodes between them are interpolated in
the ratio, and far from any point the reference remains. The same equations say how well each place is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.grids import Floats, rising
from sim.cost.grids import multilinear_all, place_all

if TYPE_CHECKING:
    from scipy.sparse import csr_array

WANDER = 0.1
"""Prior: how much the ratio to the reference changes from one point to another at twice its coordinate."""
TRUST = 0.5
"""Prior: how far the ratio is from one where nothing was timed."""
LEAST_NOISE = 3e-3
"""No time is known better than to this part: clocks and neighbours move it from one profile to the next."""
NUM_FOLDS = 5
LEAST_RATIO = 1e-9
"""Keeps times above zero where noise would have them below."""
FAR_APART = 1.5
"""Nodes with a larger ratio get another between them along a curved axis."""

Reference = Callable[[Sequence[Floats]], Floats]
"""Time by coordinates (one array an axis), ns, above zero."""


class Points(NamedTuple):
    """Timed points: one array of coordinates an axis, the times in ns, and their relative standard errors."""

    at: tuple[Floats, ...]
    ns: Floats
    noise: Floats

    def take(self, chosen: NDArray[Any]) -> Points:
        """Some of them."""
        return Points(tuple(axis[chosen] for axis in self.at), self.ns[chosen], self.noise[chosen])


@dataclass(frozen=True)
class Surface:
    """A fitted table. `axes`: its nodes; `table`: ns, one array axis an axis; falls along none."""

    axes: list[Floats]
    table: Floats
    reference: Floats
    _precision: csr_array

    def at(self, coordinates: Sequence[Floats]) -> Floats:
        """The times at some places, as the cost model reads them off."""
        return multilinear_all([axis.tolist() for axis in self.axes], self.table, [np.asarray(x) for x in coordinates])

    def spread_at(self, coordinates: Sequence[Floats]) -> Floats:
        """Relative standard error that noise and gaps leave at some places, if the prior holds."""
        from scipy.sparse import diags_array

        weights = diags_array(1 / self.at(coordinates)) @ _weights(self.axes, coordinates)
        weights = weights @ diags_array(self.reference.ravel())
        solved = self._solver.solve(weights.T.toarray())
        variance: Floats = np.einsum("ij,ji->i", weights.toarray(), solved)
        beyond = sum(
            np.log2((np.maximum(x, axis[-1]) + 1) / (axis[-1] + 1))
            for x, axis in zip(coordinates, self.axes, strict=True)
        )
        spread: Floats = np.sqrt(np.maximum(variance, 0.0) + WANDER**2 * beyond)
        return spread

    @cached_property
    def _solver(self) -> Any:
        from scipy.sparse.linalg import splu

        return splu(self._precision.tocsc())


def fit_surface(points: Points, reference: Reference, axes: Sequence[Floats]) -> Surface:
    """The table through points, at the nodes `axes` (two or more an axis)."""
    from scipy.sparse import csr_array, diags_array, eye_array
    from scipy.sparse.linalg import spsolve

    grid = [axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")]
    at_nodes = reference(grid)
    data = diags_array(1 / points.ns) @ _weights(axes, points.at) @ diags_array(at_nodes)
    smooth = _differences(axes)
    trust = 1 / TRUST**2
    precision = data.T @ diags_array(points.noise**-2.0) @ data + smooth.T @ smooth
    precision = csr_array(precision + trust * eye_array(len(at_nodes)))
    wanted = data.T @ points.noise**-2.0 + trust
    ratios = np.maximum(spsolve(precision.tocsc(), wanted), LEAST_RATIO)
    shape = [len(axis) for axis in axes]
    return Surface([*axes], rising((ratios * at_nodes).reshape(shape)), at_nodes.reshape(shape), precision)


def held_out(points: Points, fit: Callable[[Points], Surface]) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Points that a fit to the others met: their positions, the relative errors there, and those it expected.

    Every point is left out once, with a fifth of all that lie spread over the grid, unless only it reaches so far.
    """
    folds = folds_of(points)
    places, errors, expected = [], [], []
    for fold in range(NUM_FOLDS):
        left_out = (folds == fold) & _is_within(points, folds != fold)
        if not left_out.any() or any(len(np.unique(axis[~left_out])) < 2 for axis in points.at):
            continue
        surface, others = fit(points.take(~left_out)), points.take(left_out)
        places.append(np.flatnonzero(left_out))
        errors.append(surface.at(others.at) / others.ns - 1)
        expected.append(np.hypot(surface.spread_at(others.at), others.noise))
    if not places:
        return np.array([], dtype=np.int64), np.array([]), np.array([])
    return np.concatenate(places), np.concatenate(errors), np.concatenate(expected)


def folds_of(points: Points) -> NDArray[np.int64]:
    """The fold of each point: in turns along every axis, whatever the order of the rows; equal points share one."""
    ranks = [np.unique(axis, return_inverse=True)[1].ravel() for axis in points.at]
    turns = sum(((i + 1) * rank for i, rank in enumerate(ranks)), start=np.zeros(len(points.ns), dtype=np.int64))
    return np.asarray(turns % NUM_FOLDS, dtype=np.int64)


def nodes_of(values: Floats, most: int) -> Floats:
    """Different values, thinned to at most so many, spread evenly over their logarithms, both ends among them."""
    found = np.unique(values)
    if len(found) <= most:
        return found
    scale = np.log1p(found)
    even = np.linspace(scale[0], scale[-1], most)
    nearest = np.abs(scale[:, None] - even).argmin(axis=0)
    kept: Floats = found[np.unique(nearest)]
    return kept


def with_midpoints(axis: Floats) -> Floats:
    """The axis with a node between any two that lie far apart, for what is curved along it.

    The reference says how it is curved. New nodes are halves, so that no whole number counts as timed there.
    """
    low, high = axis[:-1], axis[1:]
    far = (low > 0) & (high > FAR_APART * low)
    nodes: Floats = np.union1d(axis, np.floor(np.sqrt(low[far] * high[far])) + 0.5)
    return nodes


def physical(features: Callable[[Sequence[Floats]], list[Floats]], points: Points) -> Reference:
    """The non-negative combination of features that misses the points least, in relative terms."""
    from scipy.optimize import nnls

    table = np.column_stack([np.broadcast_to(column, len(points.ns)) for column in features(points.at)])
    table = table / points.ns[:, None]
    scale = np.maximum(table.max(axis=0), np.finfo(float).tiny)
    found, _ = nnls(table / scale / points.noise[:, None], 1 / points.noise)
    coefficients = found / scale
    floor = float(points.ns.min()) * 1e-3

    def reference(at: Sequence[Floats]) -> Floats:
        total = np.full(len(at[0]), floor)
        for coefficient, column in zip(coefficients, features(at), strict=True):
            total = total + coefficient * column
        return total

    return reference


def _is_within(points: Points, others: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether points lie in the box of the others."""
    inside = np.ones(len(points.ns), dtype=np.bool_)
    for axis in points.at:
        rest = axis[others]
        inside &= (axis >= rest.min(initial=np.inf)) & (axis <= rest.max(initial=-np.inf))
    return inside


def _weights(axes: Sequence[Floats], coordinates: Sequence[Floats]) -> csr_array:
    """What each node (row-major) weighs in the interpolation at each place. Shape: places × nodes."""
    from scipy.sparse import coo_array

    found = [place_all(axis.tolist(), np.asarray(x)) for axis, x in zip(axes, coordinates, strict=True)]
    num, shape = len(coordinates[0]), tuple(len(axis) for axis in axes)
    rows, columns, values = [], [], []
    for corner in range(1 << len(axes)):
        weight, index = np.ones(num), []
        for axis, (i, part) in enumerate(found):
            is_high = corner >> axis & 1
            weight = weight * (part if is_high else 1 - part)
            index.append(i + is_high)
        rows.append(np.arange(num))
        columns.append(np.ravel_multi_index(index, shape))
        values.append(weight)
    entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
    return coo_array(entries, shape=(num, int(np.prod(shape)))).tocsr()


def _differences(axes: Sequence[Floats]) -> csr_array:
    """Ratios of neighbouring nodes less each other, in units of what the prior expects. Shape: pairs × nodes."""
    from scipy.sparse import coo_array, vstack

    shape = [len(axis) for axis in axes]
    index = np.arange(int(np.prod(shape))).reshape(shape)
    blocks = []
    for axis, points in enumerate(axes):
        low, high = np.delete(index, -1, axis).ravel(), np.delete(index, 0, axis).ravel()
        doublings = np.diff(np.log2(points + 1))
        along = np.moveaxis(np.broadcast_to(doublings, [*np.delete(shape, axis), len(doublings)]), -1, axis)
        scale = 1 / (WANDER * np.sqrt(along.ravel()))
        rows = np.arange(len(low))
        entries = (np.concatenate([-scale, scale]), (np.tile(rows, 2), np.concatenate([low, high])))
        blocks.append(coo_array(entries, shape=(len(low), index.size)))
    return vstack(blocks).tocsr()
