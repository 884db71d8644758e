"""Work of the host, which tables of kernels do not hold: put into an artifact as two figures, however known."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from calibration import csv_table
from sim.cost.artifact import Artifact
from sim.errors import ArtifactError

WORK_ON_THE_HOST = "work on the host"
"""What artifacts without these figures call missing."""
VIDUR_PARTS = ("prepare_inputs_e2e", "sampler_e2e", "model_execution_launch")
"""Of an iteration's time on the CPU in Vidur's engine, what vLLM V1 does likewise while the GPU has nothing to do."""
SCHEDULER_US_PER_REQUEST = 14.0
"""`schedule()` and `update_from_output()` of vLLM 0.33's own scheduler objects, all requests decoding, without prefix
caching, on two cores of a server: 446, 1754 and 3571 µs a step with 32, 128 and 256 requests."""


def with_host(artifact: Artifact, host_us: float, host_us_per_request: float) -> Artifact:
    """The artifact with so much time of the host before every iteration, µs."""
    return artifact.model_copy(
        update={
            "host_us": host_us,
            "host_us_per_request": host_us_per_request,
            "missing": [part for part in artifact.missing if part != WORK_ON_THE_HOST],
        }
    )


def vllm_host_us(path: Path, tensor_parallel: int = 1) -> tuple[float, float]:
    """Host time of one of vLLM V1's iterations, µs, and of each request in it.

    V1's scheduler was timed by itself (`SCHEDULER_US_PER_REQUEST`). Preparing inputs, sampling and launching are
    those of `path`, Vidur's CPU timings (Microsoft, MIT; ms): a straight line through the medians of every
    batch size of all models, on as many GPUs or the next smaller number that was timed. Column names differ in
    case between versions of that file. Raises ArtifactError for a file that holds no such timings.
    """
    rows = csv_table.load(path)
    spelled = {str(name).lower(): name for name in rows.columns}
    wanted = ["batch_size", "tensor_parallel_degree", *(f"{part}_median" for part in VIDUR_PARTS)]
    columns = [spelled.get(name, name) for name in wanted]
    csv_table.check(rows, path, columns, columns[2:])
    timed = rows.loc[rows[columns[1]] <= tensor_parallel, columns[1]]
    rows = rows[rows[columns[1]] == timed.max()]
    if rows[columns[0]].nunique() < 2:
        raise ArtifactError(str(path), f"fewer than two batch sizes on {tensor_parallel} GPUs")
    total_us = rows[columns[2:]].sum(axis=1).to_numpy(dtype=float) * 1e3
    per_request, fixed = np.polyfit(rows[columns[0]].to_numpy(dtype=float), total_us, 1)
    return round(float(fixed), 1), round(float(per_request) + SCHEDULER_US_PER_REQUEST, 2)
