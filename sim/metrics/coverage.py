"""How much of a run's cost was measured, how much lies between measured points, how much beyond them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.base import Coverage
from sim.record import Columns


def coverage_shares(levels: NDArray[np.int8], iterations: Columns) -> dict[str, dict[str, float]]:
    """Shares of the iterations and of their device time at each level, all of the run; each adds up to 1.

    `levels` has the `Coverage` of every iteration. A run without iterations counts as measured.
    """
    time_ns = iterations["end_ns"] - iterations["start_ns"]
    return {"iterations": _shares(levels, np.ones(len(levels))), "time": _shares(levels, time_ns)}


def _shares(levels: NDArray[np.int8], weights: NDArray[Any]) -> dict[str, float]:
    total = float(weights.sum())
    if not total:
        return {level.name.lower(): float(level is Coverage.MEASURED) for level in Coverage}
    return {level.name.lower(): float(weights[levels == level].sum()) / total for level in Coverage}


def first_beyond(levels: NDArray[np.int8]) -> int | None:
    """The first iteration that lies beyond what was measured, or None."""
    beyond = np.flatnonzero(levels == Coverage.EXTRAPOLATED)
    return int(beyond[0]) if len(beyond) else None


def coverage_line(cost: Mapping[str, Any]) -> str:
    """What a reader must know of the measurements that the times rest on, in one sentence."""
    by_iteration, by_time = cost["coverage"]["iterations"], cost["coverage"]["time"]
    shares = ", ".join(
        f"{100 * share:.1f} % of iterations ({100 * by_time[level]:.1f} % of time) {level}"
        for level, share in by_iteration.items()
    )
    errors = cost["holdout_error"]
    what, found = ("iterations", [errors["iteration"]]) if "iteration" in errors else ("points", [*errors.values()])
    error = f"; {what} left out were missed by {100 * sum(found) / len(found):.1f} % on average" if found else ""
    return f"{cost['artifact']}, measured {cost['measured_on']}: {shares}{error}"


def uncertainty_line(uncertainty: Mapping[str, Any], number: Callable[[float], str]) -> str:
    """How far the cost's own errors move TTFT and ITL, in one sentence; `number` writes a figure."""
    bands = ", ".join(
        f"{name.removesuffix('_ms').upper()} {statistic} {number(band[0])} to {number(band[1])} ms"
        for name in ("ttft_ms", "itl_ms")
        for statistic in ("p50", "p99")
        if (band := uncertainty["metrics"][name][statistic]) is not None
    )
    level, num = uncertainty["level"], uncertainty["num_reruns"]
    return f"with times off as their fit was, {100 * level:.0f} % of {num} reruns have {bands}"
