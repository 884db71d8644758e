"""Work of the host, which tables of kernels do not hold: put into an artifact as two figures, however known."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from calibration import csv_table
from sim.cost.artifact import Artifact
from sim.errors import ArtifactError

WORK_ON_THE_HOST = "work on the host"
"""What artifacts without these figures call missing."""
VIDUR_PARTS = ("schedule", "prepare_inputs_e2e", "sampler_e2e", "process_model_outputs")
"""Of an iteration's time on the CPU, what does not overlap with the kernels that tables price."""


def with_host(artifact: Artifact, host_us: float, host_us_per_request: float) -> Artifact:
    """The artifact with so much time of the host before every iteration, µs."""
    return artifact.model_copy(
        update={
            "host_us": host_us,
            "host_us_per_request": host_us_per_request,
            "missing": [part for part in artifact.missing if part != WORK_ON_THE_HOST],
        }
    )


def fit_vidur_overheads(path: Path, tensor_parallel: int = 1) -> tuple[float, float]:
    """Host time of an iteration, µs, and of each request in it, from Vidur's CPU timings (Microsoft, MIT; ms).

    A straight line through the medians of every batch size of all models. Column names differ in case
    between versions of that file. Raises ArtifactError for a file that holds no such timings.
    """
    rows = csv_table.load(path)
    spelled = {str(name).lower(): name for name in rows.columns}
    wanted = ["batch_size", "tensor_parallel_degree", *(f"{part}_median" for part in VIDUR_PARTS)]
    columns = [spelled.get(name, name) for name in wanted]
    csv_table.check(rows, path, columns, columns[2:])
    rows = rows[rows[columns[1]] == tensor_parallel]
    if rows[columns[0]].nunique() < 2:
        raise ArtifactError(str(path), f"fewer than two batch sizes on {tensor_parallel} GPUs")
    total_us = rows[columns[2:]].sum(axis=1).to_numpy(dtype=float) * 1e3
    per_request, fixed = np.polyfit(rows[columns[0]].to_numpy(dtype=float), total_us, 1)
    return float(fixed), float(per_request)
