"""Published times of whole iterations, as an artifact's terms.

Such tables say what a batch took and nothing of its kernels. What they give is linear: a fixed time, and times
for each decode, each token of KV that decodes read, each token of a prompt and each (query, key) pair of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibration.grids import Floats, term
from sim.cost.artifact import Artifact, Shape, Term
from sim.errors import ArtifactError
from sim.model import Model

NUM_FOLDS = 5
_POINTS_PER_OCTAVE = 4
"""Of prompts: pairs grow with the square of a prompt, which is at most 1 % below the line between two points."""

_FIRST_CONTEXT = 128.0


class Step(NamedTuple):
    """One timed iteration. `context_tokens`: KV that its decodes read; `pairs`: (query, key) pairs of its prompts."""

    num_decode: int
    context_tokens: float
    prefill_tokens: int
    pairs: float
    time_ms: float


class Linear(NamedTuple):
    """Time of an iteration, ms: fixed, and for each of what it holds."""

    base: float
    per_decode: float
    per_context_token: float
    per_prefill_token: float
    per_pair: float


class Origin(NamedTuple):
    """Where published times come from. `hardware` is its name there, `gpu` the bundled one that it is, if any."""

    hardware: str
    gpu: str | None
    tensor_parallel: int
    source: str
    licence: str


def artifact_of(
    origin: Origin,
    model: Model,
    terms: list[Term],
    step_ms: float = 0.0,
    holdout_error: Mapping[str, float] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Artifact:
    """The artifact of a model in 16 bit whose whole iterations were timed: nothing is missing or padded once more."""
    return Artifact(
        hardware=origin.hardware,
        gpu=origin.gpu,
        model=model.name,
        shape=Shape.of(model),
        dtype="float16",
        kv_dtype_bytes=2.0,
        tensor_parallel=origin.tensor_parallel,
        measured_on="at an unstated date",
        versions=dict(versions or {}),
        source=origin.source,
        licence=origin.licence,
        cuda_graph_sizes=[],
        step_us=step_ms * 1e3,
        terms=terms,
        missing=[],
        holdout_error=dict(holdout_error or {}),
    )


def prompts(prompt_tokens: int, batch: int, time_ms: float) -> Step:
    """An iteration of `batch` equal prompts without context."""
    return Step(0, 0.0, batch * prompt_tokens, batch * prompt_tokens * (prompt_tokens + 1) / 2, time_ms)


def fit_linear(steps: Sequence[Step], place: str) -> tuple[Linear, dict[str, float]]:
    """Coefficients for timed iterations, and their error at points that they were fitted without.

    Least squares of the relative error, none below zero. The error is the mean absolute one, as a part, of
    decodes and of prompts, under the names of the terms that `terms` makes; every point, with all its
    repeats, is left out once. Raises ArtifactError when there are fewer points than coefficients.
    """
    table = np.array(steps, dtype=float).reshape(-1, len(Step._fields))
    points, which = np.unique(table[:, :4], axis=0, return_inverse=True)
    if len(points) < len(Linear._fields):
        raise ArtifactError(place, f"{len(points)} different iterations timed", valid=f"{len(Linear._fields)} or more")
    errors = np.zeros(len(table))
    fold = which.reshape(-1) % NUM_FOLDS
    for left_out in range(NUM_FOLDS):
        out = fold == left_out
        errors[out] = np.abs(_times(table[out], _coefficients(table[~out])) / table[out, 4] - 1)
    is_decode = table[:, 0] > 0
    held_out = {
        name: round(float(errors[own].mean()), 5)
        for name, own in (("decode_attention", is_decode), ("prefill_tokens", ~is_decode))
        if own.any()
    }
    return Linear(*_coefficients(table).tolist()), held_out


def terms(linear: Linear, steps: Sequence[Step], place: str) -> list[Term]:
    """Terms of coefficients that were fitted to `steps`, within what those timed; the base is not among them.

    Raises ArtifactError when they hold only one size of something.
    """
    decodes, chunks = [step for step in steps if step.num_decode], [step for step in steps if step.prefill_tokens]
    batch = _ends([step.num_decode for step in decodes], place, "batches of decodes")
    context = _ends([step.context_tokens / step.num_decode for step in decodes], place, "contexts of decodes")
    tokens = _ends([step.prefill_tokens for step in chunks], place, "prompts")
    us = linear.per_decode * batch[:, None] + linear.per_context_token * batch[:, None] * context
    return [
        term("decode_attention", "decode_attention", [batch, context], us * 1e3, 1, "all that decodes cost"),
        *prompt_terms(0.0, linear.per_prefill_token, linear.per_pair, (tokens[0], tokens[1])),
    ]


def prompt_terms(fixed_ms: float, per_token_ms: float, per_pair_ms: float, tokens: tuple[float, float]) -> list[Term]:
    """What prompts cost: a line over their tokens, and a grid of their (query, key) pairs.

    `tokens`: the smallest and the largest prompt that is known of. The line begins at one token.
    """
    first, last = tokens
    row = np.array([1.0, last])
    size = np.unique(np.geomspace(first, last, 2 + int(_POINTS_PER_OCTAVE * np.log2(last / first))).round())
    context = np.array([0.0, _FIRST_CONTEXT])
    pairs = size[:, None] * context + (size * (size + 1) / 2)[:, None]
    note = "prompts without context were timed: straight on from those by (query, key) pairs"
    return [
        term("prefill_tokens", "prefill_tokens", [row], (fixed_ms + per_token_ms * row) * 1e3, 1),
        term("prefill_attention", "prefill_attention", [size, context], pairs * per_pair_ms * 1e3, 1, note),
    ]


def _coefficients(table: Floats) -> Floats:
    from scipy.optimize import nnls

    relative = _features(table) / table[:, 4:]
    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0
    found: Floats = nnls(relative / scale, np.ones(len(table)))[0] / scale
    return found


def _times(table: Floats, coefficients: Floats) -> Floats:
    times: Floats = _features(table) @ coefficients
    return times


def _features(table: Floats) -> Floats:
    return np.column_stack([np.ones(len(table)), table[:, :4]])


def _ends(values: Sequence[float], place: str, what: str) -> Floats:
    ends = np.unique(values)[[0, -1]] if values else np.zeros(2)
    if ends[0] == ends[1]:
        raise ArtifactError(
            place, f"{what} were timed at {min(len(values), 1)} size only", valid="expected two or more"
        )
    return ends
