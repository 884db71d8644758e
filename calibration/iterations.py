"""Whole iterations against the sum of their operators: what company does to them, and what is left between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from calibration.grids import Floats, term
from calibration.residuals import residual
from calibration.surface import LEAST_NOISE, NUM_FOLDS, Points, fit_surface
from sim.cost.artifact import ITERATION, Artifact, Residual, Term
from sim.cost.grids import multilinear_all
from sim.cost.table import Table
from sim.step import StepArrays

if TYPE_CHECKING:
    import pandas as pd

LEAST_ITERATIONS = 10
"""Fewer do not tell five causes apart."""
LEAST_OF_A_KIND = 6
"""Fewer do not say how attention of a kind departs from its time alone."""
UNEXPLAINED, LEAST_UNEXPLAINED = 0.02, 0.01
"""What no coefficient explains outweighs noise: iterations count alike but for the noisiest. The second is what
attention by its kind, size and context leaves.
"""
LEAST_FACTOR, MOST_FACTOR = 0.25, 4.0
FACTOR_PRIOR = 0.25
"""Prior: how far from one an operator's time in company is from its time alone."""
GAPS = "gaps between kernels"
PER_SEQUENCE, PER_PROMPT = "work per sequence", "work per iteration with prompts"


def correct(artifact: Artifact, steps: pd.DataFrame, num_layers: int) -> Artifact:
    """The artifact with what whole iterations say: factors on its terms, terms for what is left, their errors.

    `steps`: timed iterations of `num_layers` layers, rows of a raw file. With too few of them the artifact stays as
    it is and names what is missing.
    """
    if len(steps) < LEAST_ITERATIONS:
        return artifact.model_copy(update={"missing": [GAPS, *artifact.missing]})
    timed = _with_layers(artifact, num_layers)
    own = _corrected(timed, steps)
    errors = _held_out(timed, steps)
    grown = artifact.shape.num_hidden_layers / num_layers
    calls = {term.name: term.calls for term in artifact.terms}
    missing = list(artifact.missing)
    if grown > 1:
        missing.insert(0, f"layers beyond the {num_layers} timed together: {GAPS} are taken to grow with layers")
    return own.model_copy(
        update={
            "step_us": _rounded(own.step_us * grown),
            "terms": [term.model_copy(update={"calls": calls.get(term.name, term.calls)}) for term in own.terms],
            "missing": missing,
            "residuals": [*artifact.residuals, *_residuals(steps, errors)],
            "holdout_error": artifact.holdout_error | {ITERATION: round(float(np.abs(errors).mean()), 5)},
        }
    )


def _corrected(artifact: Artifact, steps: pd.DataFrame) -> Artifact:
    """The artifact of the layers timed, its terms as they are within iterations."""
    arrays, times = step_arrays_of(steps), steps["median_ns"].to_numpy(dtype=float)
    parts = _parts(artifact, arrays)
    noise = np.maximum((steps["ci_high_ns"] - steps["ci_low_ns"]).to_numpy(dtype=float) / times / 3.92, LEAST_NOISE)
    found = _solve(parts, times, np.hypot(noise, UNEXPLAINED))
    factored = _factored(artifact.terms, found[0], found[1])
    attention_ns = times - parts @ np.array([found[0], 0.0, *found[2:]])
    terms = [_within(own, steps, attention_ns, np.hypot(noise, LEAST_UNEXPLAINED) * times) for own in factored]
    left = _left(found[3:] * 1e-3, arrays, len(steps))
    return artifact.model_copy(update={"step_us": _rounded(found[2] * 1e-3), "terms": [*terms, *left]})


def _within(own: Term, steps: pd.DataFrame, attention_ns: Floats, noise_ns: Floats) -> Term:
    """Attention as iterations of its kind took it, where enough of them did; the term as it is for everything else.

    `attention_ns`: what iterations took beyond all else, `noise_ns` how well that is known.
    """
    has_decodes, has_chunk = steps["num_decodes"] > 0, steps["chunk_tokens"] > 0
    kinds = {
        "decode_attention": (has_decodes & ~has_chunk, ("num_decodes", "mean_context")),
        "prefill_attention": (has_chunk & ~has_decodes, ("chunk_tokens", "chunk_context_tokens")),
        "mixed_attention": (
            has_decodes & has_chunk,
            ("num_decodes", "chunk_tokens", "chunk_context_tokens", "mean_context"),
        ),
    }
    of, columns = kinds.get(own.kind, (has_decodes & ~has_decodes, ()))
    rows = np.flatnonzero(of)
    if len(rows) < LEAST_OF_A_KIND:
        return own
    at = tuple(steps[column].to_numpy(dtype=float)[rows] for column in columns)
    table_us = np.reshape(own.us, [len(points) for points in own.points])

    def alone(places: Sequence[Floats]) -> Floats:
        return multilinear_all(own.points, table_us, places) * (1e3 * own.calls)

    expected = alone(at)
    took = np.clip(attention_ns[rows], expected / MOST_FACTOR, expected * MOST_FACTOR)
    points = Points(at, took, noise_ns[rows] / took)
    surface = fit_surface(points, alone, [np.array(axis) for axis in own.points])
    us = [_rounded(value) for value in (surface.table / (1e3 * own.calls)).ravel().tolist()]
    return own.model_copy(update={"us": us, "note": f"{own.note}, and as {len(rows)} of them took it"})


def step_arrays_of(steps: pd.DataFrame) -> StepArrays:
    """Iterations of a raw file as a cost model sees them: at most one prompt chunk each."""
    columns = {
        name: steps[name].to_numpy(dtype=np.int64) for name in steps.columns if name.startswith(("num_", "chunk_"))
    }
    none = np.zeros(len(steps), dtype=np.int64)
    with_prompt = np.flatnonzero(columns["chunk_tokens"])
    return StepArrays(
        num_decode=columns["num_decodes"],
        decode_context_sum=steps["decode_context_tokens"].to_numpy(dtype=np.int64),
        decode_context_sum_sq=np.rint(steps["decode_context_sq"].to_numpy(dtype=float)).astype(np.int64),
        decode_context_max=steps["decode_context_max"].to_numpy(dtype=np.int64),
        num_sampled=columns["num_seqs"],
        num_padding_tokens=none,
        num_swapped_blocks=none,
        num_new_requests=none,
        prefill_iteration=with_prompt,
        prefill_num_tokens=columns["chunk_tokens"][with_prompt],
        prefill_context=columns["chunk_context_tokens"][with_prompt],
    )


def _with_layers(artifact: Artifact, num_layers: int) -> Artifact:
    """The same model with fewer layers."""
    whole = artifact.shape.num_hidden_layers
    terms = [
        own if own.calls == 1 else own.model_copy(update={"calls": own.calls // whole * num_layers + own.calls % whole})
        for own in artifact.terms
    ]
    return artifact.model_copy(update={"terms": terms})


def _parts(artifact: Artifact, arrays: StepArrays) -> Floats:
    """Columns: dense operators, attention, one, sequences, whether there is a prompt. One row per iteration; ns."""
    dense = [own for own in artifact.terms if not _is_attention(own)]
    silent = [own.model_copy(update={"us": [0.0] * len(own.us)}) for own in dense]
    attention = [own for own in artifact.terms if _is_attention(own)]
    whole = sum(Table(artifact).breakdown(arrays).values())
    alone = sum(Table(artifact.model_copy(update={"terms": [*silent, *attention]})).breakdown(arrays).values())
    has_prompt = np.zeros(len(arrays.num_decode))
    has_prompt[arrays.prefill_iteration] = 1.0
    return np.column_stack([whole - alone, alone, np.ones_like(has_prompt), arrays.num_sampled, has_prompt])


def _solve(parts: Floats, times: Floats, noise: Floats) -> Floats:
    """The five coefficients that miss the times least, relative to how well each is known."""
    from scipy.optimize import lsq_linear

    weight = 1 / (times * noise)
    prior = np.zeros((2, parts.shape[1]))
    prior[0, 0] = prior[1, 1] = 1 / FACTOR_PRIOR
    table = np.vstack([parts * weight[:, None], prior])
    wanted = np.concatenate([times * weight, [1 / FACTOR_PRIOR] * 2])
    scale = np.maximum(np.abs(table).max(axis=0), np.finfo(float).tiny)
    low = np.array([LEAST_FACTOR, LEAST_FACTOR, 0.0, 0.0, 0.0]) * scale
    high = np.array([MOST_FACTOR, MOST_FACTOR, np.inf, np.inf, np.inf]) * scale
    found: Floats = lsq_linear(table / scale, wanted, bounds=(low, high), method="bvls").x / scale
    return found


def _held_out(artifact: Artifact, steps: pd.DataFrame) -> Floats:
    """Relative error of each iteration under a correction that did not see it."""
    errors = np.empty(len(steps))
    for fold in range(NUM_FOLDS):
        own = np.arange(len(steps)) % NUM_FOLDS == fold
        table = Table(_corrected(artifact, steps[~own]))
        prices = sum(table.breakdown(step_arrays_of(steps[own])).values())
        errors[own] = prices / steps["median_ns"].to_numpy(dtype=float)[own] - 1
    return errors


def _residuals(steps: pd.DataFrame, errors: Floats) -> list[Residual]:
    has_decodes, has_prompt = (steps[name].to_numpy() > 0 for name in ("num_decodes", "chunk_tokens"))
    regions = {
        "decodes alone": has_decodes & ~has_prompt,
        "a prompt alone": has_prompt & ~has_decodes,
        "decodes and a prompt": has_prompt & has_decodes,
    }
    return [residual(ITERATION, name, errors[own]) for name, own in regions.items() if own.any()]


def _factored(terms: list[Term], dense: float, attention: float) -> list[Term]:
    made = []
    for own in terms:
        factor = attention if _is_attention(own) else dense
        note = "; ".join(filter(None, [own.note, f"{factor:.3f} of its time alone, as within whole iterations"]))
        made.append(own.model_copy(update={"us": [_rounded(us * factor) for us in own.us], "note": note}))
    return made


def _left(found: Floats, arrays: StepArrays, num_steps: int) -> list[Term]:
    """Terms for what is left per sequence and per iteration with prompts, where anything is."""
    per_sequence, per_prompt = found
    note = f"what {num_steps} whole iterations took beyond their operators"
    made = []
    if per_sequence > 0:
        points = np.array([1.0, max(2.0, float(arrays.num_sampled.max()))])
        made.append(term("sequences", PER_SEQUENCE, [points], points * per_sequence, 1, note))
    if per_prompt > 0:
        points = np.array([1.0, max(2.0, float(arrays.prefill_num_tokens.max()))])
        made.append(term("prefill_tokens", PER_PROMPT, [points], np.full(2, per_prompt), 1, note))
    return made


def _is_attention(own: Term) -> bool:
    return own.kind.endswith(("attention", "skew"))


def _rounded(us: float) -> float:
    return float(f"{us:.6g}")
