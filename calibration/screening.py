"""What is wrong with timed points before anything is fitted to them, and which of them count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calibration.raw import KEY, RawFile
from sim.errors import ArtifactError
from sim.model import Model

if TYPE_CHECKING:
    import pandas as pd

LEAST_NS = 50.0
"""No kernel of any operator ends sooner."""
FASTEST_BYTES_PER_S = {"cuda": 2e13, "cpu": 1e12}
"""More than twice what the memory of any bundled GPU gives, and any socket."""
SLOWEST_BYTES_PER_S = {"cuda": 2e10, "cpu": 5e7}
"""A tenth of what the slowest GPU of a data center gives, and of what a loaded core does."""
LONGEST_LAUNCH_NS = 1e6
"""What a call may take however few bytes it moves."""


def check_points(raw: RawFile, model: Model, place: str) -> pd.DataFrame:
    """The points that count, sorted, so that their order in the file does not matter.

    Left out: what was throttled, and eager kernels in the range in which a graph was timed: there they wait for
    their launch. Raises ArtifactError for times that are no numbers above zero, or in another unit.
    """
    points = raw.points
    if points.empty:
        raise ArtifactError(place, "has no points", remedy="Profile first.")
    for column in ("median_ns", "ci_low_ns", "ci_high_ns"):
        values = points[column].to_numpy(dtype=float)
        bad = np.flatnonzero(~np.isfinite(values) | (values <= 0))
        if len(bad):
            name = points["operator"].iloc[bad[0]]
            raise ArtifactError(
                place, f"row {bad[0]} ({name}): {column} is {values[bad[0]]}", valid="expected a time above zero"
            )
    negative = [column for column in KEY if column not in ("operator", "mode") and (points[column] < 0).any()]
    if negative:
        raise ArtifactError(place, f"{negative[0]} is negative", valid="expected zero or more")
    _check_unit(raw, model, place)
    kept = points[~points["throttled"].fillna(False).astype(bool)]
    if kept.empty:
        raise ArtifactError(place, "all points were timed on a throttled GPU", remedy="Let it cool and profile again.")
    return _as_launched(kept).sort_values([*KEY, "median_ns"], kind="stable", ignore_index=True)


def _check_unit(raw: RawFile, model: Model, place: str) -> None:
    """Weights are read at a rate that memory can give; times in µs or s would be a thousand times off."""
    metadata, points = raw.metadata, raw.points
    fastest = points["median_ns"].min()
    remedy = "Times are in nanoseconds; convert them."
    if fastest < LEAST_NS:
        raise ArtifactError(
            place, f"a time of {fastest:g} ns", valid=f"no kernel takes less than {LEAST_NS:g}", remedy=remedy
        )
    head = points[points["operator"] == "lm_head"]
    if head.empty:
        return
    num_bytes = model.products(metadata.tensor_parallel)[-1].parameters * model.dtype_bytes
    least_ns = num_bytes / FASTEST_BYTES_PER_S[metadata.device] * 1e9
    most_ns = num_bytes / SLOWEST_BYTES_PER_S[metadata.device] * 1e9 + LONGEST_LAUNCH_NS
    num_rows = int(head["num_seqs"].min())
    took_ns = float(head.loc[head["num_seqs"] == num_rows, "median_ns"].min())
    if not least_ns <= took_ns <= most_ns:
        raise ArtifactError(
            place,
            f"the LM head took {took_ns:g} ns for {num_rows} rows and {num_bytes:.3g} bytes of weights",
            valid=f"on {metadata.hardware.name} that takes {least_ns:.2g} to {most_ns:.2g}",
            remedy=remedy,
        )


def _as_launched(points: pd.DataFrame) -> pd.DataFrame:
    size = points[["num_tokens", "num_seqs", "num_decodes"]].max(axis=1)
    is_graph = points["mode"] == "graph"
    largest = size[is_graph].groupby(points["operator"]).max()
    waits = ~is_graph & (points["chunk_tokens"] == 0) & (size <= points["operator"].map(largest).fillna(-1))
    return points[~waits]
