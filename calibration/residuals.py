"""Errors at points that a fit was made without, by the region in which they lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from calibration.grids import Floats
from sim.cost.artifact import Residual


def by_region(name: str, axes: Sequence[str], at: Sequence[Floats], errors: Floats) -> list[Residual]:
    """The residuals of one term: each axis is cut at its middle, in the logarithm; a single one at its thirds."""
    if not len(errors):
        return []
    cuts = []
    for values in at:
        low, high = np.log1p(values.min()), np.log1p(values.max())
        cuts.append(np.expm1(np.linspace(low, high, 4 if len(at) == 1 else 3))[1:-1])
    places = [np.searchsorted(cut, values, side="left") for cut, values in zip(cuts, at, strict=True)]
    found = []
    for region in product(*(range(len(cut) + 1) for cut in cuts)):
        own = np.all([place == i for place, i in zip(places, region, strict=True)], axis=0)
        if own.any():
            bounds = [
                f"{axis} {values[own].min():.6g} to {values[own].max():.6g}"
                for axis, values in zip(axes, at, strict=True)
            ]
            found.append(residual(name, ", ".join(bounds), errors[own]))
    return found


def residual(name: str, region: str, errors: NDArray[np.float64]) -> Residual:
    """The residual of one region."""
    return Residual(
        term=name,
        region=region,
        num_points=len(errors),
        mean_error=round(float(errors.mean()), 5),
        mean_absolute_error=round(float(np.abs(errors).mean()), 5),
        spread=round(float(errors.std()), 5),
    )
