"""Published times of whole iterations, turned into the coefficients of `cost: {kind: linear}`.

Such tables say what a batch took and nothing of its kernels, so they give five figures, not an artifact: least
squares of the relative error, none below zero.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from calibration import csv_table
from calibration.grids import Floats
from sim.errors import ArtifactError

COEFFICIENTS = ("base_ms", "per_decode_us", "per_context_token_ns", "per_prefill_token_us", "per_prefill_pair_ns")
NUM_FOLDS = 5
LEAST_PREDICTED = 0.1
"""Part of its time below which a prediction is no measure of an error."""
_UNITS = (1.0, 1e3, 1e6, 1e3, 1e6)
"""From ms to the unit of each coefficient."""


class Step(NamedTuple):
    """One timed iteration. `context_tokens`: KV that its decodes read; `pairs`: (query, key) pairs of its prompts."""

    num_decode: int
    context_tokens: float
    prefill_tokens: int
    pairs: float
    time_ms: float


class Fit(NamedTuple):
    """Options of the linear cost model, and how well they give the times that they were fitted to."""

    options: dict[str, float]
    errors: Floats
    """Relative, one for each iteration."""
    spread: float
    """Typical (root mean square) relative error at iterations that the fit did not see."""

    @property
    def mean_absolute_error(self) -> float:
        """Relative."""
        return float(np.abs(self.errors).mean())


def fit_linear(steps: Sequence[Step], place: str, is_noisy: bool = False) -> Fit:
    """Coefficients for timed iterations. Raises ArtifactError when there are fewer than coefficients.

    Errors count relative to the times; of noisy ones relative to a first fit, because those that noise made short
    would weigh more.
    """
    if len(steps) < len(COEFFICIENTS):
        raise ArtifactError(place, f"{len(steps)} timed iterations", valid=f"{len(COEFFICIENTS)} or more")
    table = np.array(steps, dtype=float)
    relative = np.column_stack([np.ones(len(table)), table[:, :4]]) / table[:, 4:]
    coefficients = _least_squares(relative, is_noisy)
    folds = np.arange(len(table)) % NUM_FOLDS
    unseen = [
        relative[folds == fold] @ _least_squares(relative[folds != fold], is_noisy) - 1 for fold in range(NUM_FOLDS)
    ]
    options = {
        name: float(f"{value * unit:.6g}") for name, value, unit in zip(COEFFICIENTS, coefficients, _UNITS, strict=True)
    }
    errors = relative @ coefficients - 1
    return Fit(options, errors, float(np.sqrt(np.mean(np.concatenate(unseen) ** 2))))


def _least_squares(relative: Floats, is_noisy: bool) -> Floats:
    """Coefficients, none below zero, with which the features of each iteration add up to one."""
    from scipy.optimize import nnls

    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0
    weight = np.ones(len(relative))
    for _ in range(2 if is_noisy else 1):
        found, _ = nnls(relative / scale * weight[:, None], weight)
        weight = 1 / np.maximum(relative / scale @ found, LEAST_PREDICTED)
    coefficients: Floats = found / scale
    return coefficients


def splitwise_steps(path: Path, model: str, hardware: str, tensor_parallel: int) -> list[Step]:
    """Splitwise's `perf_model.csv` (Microsoft, MIT; ms): a batch of equal prompts, and a step of their decodes.

    Its end-to-end times are not used: long generations were cut short in them.
    """
    columns = ["prompt_size", "batch_size", "token_size", "tensor_parallel", "prompt_time", "token_time"]
    rows = csv_table.read(path, ["model", "hardware", *columns], ["prompt_time", "token_time"])
    own = (rows["model"] == model) & (rows["hardware"] == hardware) & (rows["tensor_parallel"] == tensor_parallel)
    if not own.any():
        timed = sorted(set(zip(rows["model"], rows["hardware"], rows["tensor_parallel"], strict=True)))
        raise ArtifactError(
            str(path), f"no times of {model} on {tensor_parallel} x {hardware}", valid=f"timed: {timed}"
        )
    steps = []
    for prompt, batch, output, _, prompt_ms, token_ms in rows.loc[own, columns].itertuples(index=False):
        steps.append(_prefill(int(prompt), int(batch), float(prompt_ms)))
        steps.append(Step(int(batch), batch * (prompt + output / 2), 0, 0.0, float(token_ms)))
    return steps


def vtc_steps(path: Path) -> list[Step]:
    """VTC's `cost_profile.json` (Apache-2.0): by prompt and output length, a batch and its seconds per request."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            (int(prompt), int(output), int(batch), float(prefill_s), float(decode_s))
            for prompt, outputs in profile.items()
            for output, (batch, prefill_s, decode_s) in outputs.items()
        ]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ArtifactError(str(path), f"is no cost profile ({error})") from error
    steps = []
    for prompt, output, batch, prefill_s, decode_s in rows:
        steps.append(_prefill(prompt, batch, batch * prefill_s * 1e3))
        if output > 1:  # the first token is the prefill's
            steps.append(Step(batch, batch * (prompt + output / 2), 0, 0.0, batch * decode_s * 1e3 / (output - 1)))
    return steps


def _prefill(prompt_tokens: int, batch: int, time_ms: float) -> Step:
    return Step(0, 0.0, batch * prompt_tokens, batch * prompt_tokens * (prompt_tokens + 1) / 2, time_ms)
