"""From a raw file of timed points to an artifact: a table per operator, and what whole iterations take beyond them.

Every operator becomes a table (`calibration.surface`) over what its time depends on. Attention of both halves at
once departs from the sum of the halves, which remains where nothing was timed. Whole iterations then say how
the operators do in company: a factor for the dense ones, one for attention, and what is left, which is gaps
between kernels and work per iteration, per sequence and per iteration with a prompt. Each of those is named in the
artifact. All errors are of points that the fit did not see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from calibration.cuda_graphs import VLLM_0_19_0
from calibration.grids import Floats, term
from calibration.host import WORK_ON_THE_HOST
from calibration.iterations import correct
from calibration.models import gpu_of_driver
from calibration.raw import Metadata, RawFile
from calibration.residuals import by_region
from calibration.screening import check_points
from calibration.surface import (
    LEAST_NOISE,
    Points,
    Reference,
    Surface,
    fit_surface,
    held_out,
    nodes_of,
    physical,
    with_midpoints,
)
from sim.cost.artifact import AXES, Artifact, Residual, Shape, Term
from sim.errors import ArtifactError
from sim.model import Model, parse_config

if TYPE_CHECKING:
    import pandas as pd

DENSE = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "moe", "norm", "rotary", "all_reduce")
SAMPLED = ("lm_head", "sampling")
ATTENTION = ("prefill_attention", "decode_attention", "mixed_attention")
_NEEDED = {"qkv_proj", "o_proj", "lm_head", "prefill_attention", "decode_attention"}
_EXPECTED = {"norm": "norms", "rotary": "rotary embedding", "sampling": "sampling"}
_BYTES = {"float32": 4.0}
"""Bytes per element of types that models are not served in."""
MOST_NODES = {1: (64,), 2: (20, 20), 4: (6, 6, 4, 5)}
"""Nodes an axis of tables with so many axes: enough for the grids of a profile, few enough to be read fast."""
UNEQUAL = 1.02
"""From here on, a longest context this much above the mean makes a batch one of unequal contexts."""
UNKNOWN = 1.0
"""Relative uncertainty where too little was timed to say anything."""


class Operator(NamedTuple):
    """What an operator's time depends on, and what physics says of it."""

    kind: str
    columns: tuple[str, ...]
    features: Callable[[Sequence[Floats]], list[Floats]]
    """Work of each sort by coordinates; a time is at least about a sum of them."""


def _per_row(at: Sequence[Floats]) -> list[Floats]:
    return [np.ones_like(at[0]), at[0]]


def _prompt_work(at: Sequence[Floats]) -> list[Floats]:
    tokens, context = at
    return [np.ones_like(tokens), tokens, tokens + context, tokens * context + tokens * (tokens + 1) / 2]


def _decode_work(at: Sequence[Floats]) -> list[Floats]:
    batch, context = at
    return [np.ones_like(batch), batch, context, batch * context]


def _mixed_work(at: Sequence[Floats]) -> list[Floats]:
    return [*_decode_work((at[0], at[3])), *_prompt_work(at[1:3])[1:]]


def _step_work(at: Sequence[Floats]) -> list[Floats]:
    return [np.ones_like(at[0]), at[0], at[1], at[0] * at[1]]


OPERATORS = (
    {name: Operator("tokens", ("num_tokens",), _per_row) for name in DENSE}
    | {name: Operator("sequences", ("num_seqs",), _per_row) for name in SAMPLED}
    | {
        "prefill_attention": Operator("prefill_attention", ("chunk_tokens", "chunk_context_tokens"), _prompt_work),
        "decode_attention": Operator("decode_attention", ("num_decodes", "mean_context"), _decode_work),
        "mixed_attention": Operator(
            "mixed_attention", ("num_decodes", "chunk_tokens", "chunk_context_tokens", "mean_context"), _mixed_work
        ),
        "step": Operator("", ("num_tokens", "all_context"), _step_work),
    }
)


@dataclass(frozen=True)
class FittedOperator:
    """One operator's table, and how it met points that it was made without."""

    surface: Surface
    points: Points
    held_out: Points
    errors: Floats
    expected: Floats


def fit(raw: RawFile, place: str = "RAW") -> Artifact:
    """The artifact of a profile; the same points in any order give the same artifact.

    Raises ArtifactError for times that cannot be, and for operators that are missing or were timed at one point.
    """
    model = described_model(raw.metadata, place)
    points = prepare(check_points(raw, model, place))
    fitted = fit_operators(points, place)
    num_layers = model.num_hidden_layers
    terms = [_term(name, own, num_layers, raw.metadata) for name, own in sorted(fitted.items())]
    terms += _skew(points, fitted, num_layers)
    residuals = [residual for name, own in sorted(fitted.items()) for residual in _residuals(name, own)]
    artifact = _artifact(raw.metadata, model, terms, residuals, points)
    return correct(artifact, points[points["operator"] == "step"], raw.metadata.num_layers)


def worst_regions(raw: pd.DataFrame, candidates: pd.DataFrame) -> Floats:
    """Relative uncertainty of the fit at points that were not timed, one for each row of `candidates`.

    Both have the columns of `calibration.raw.KEY`; `raw` also the times. It is what noise and distance leave,
    scaled to the errors at points left out, and those errors themselves near where they were found. 1.0 where
    an operator was timed too little to be fitted. Nothing is changed.
    """
    found = np.full(len(candidates), UNKNOWN)
    prepared, wanted = prepare(raw), prepare(candidates)
    for name in sorted(set(wanted["operator"])):
        own = prepared[prepared["operator"] == name]
        if len(own) < 2 or any(own[column].nunique() < 2 for column in OPERATORS[name].columns):
            continue
        rows = np.flatnonzero(wanted["operator"] == name)
        found[rows] = _uncertainty(_fit_operator(own, OPERATORS[name]), _coordinates(wanted.iloc[rows], name))
    return found


def fit_operators(points: pd.DataFrame, place: str) -> dict[str, FittedOperator]:
    """A table for every operator in prepared points but `step`. Raises ArtifactError."""
    timed = set(points["operator"])
    absent = sorted(_NEEDED - timed) + ([] if timed & {"down_proj", "moe"} else ["down_proj"])
    if absent:
        raise ArtifactError(place, f"has no times of {', '.join(absent)}", remedy="Profile longer.")
    fitted: dict[str, FittedOperator] = {}
    for name, operator in OPERATORS.items():
        own = points[points["operator"] == name]
        if name == "decode_attention":
            own = _equal(own)
        if own.empty or name == "step":
            continue
        for column in operator.columns:
            if own[column].nunique() < 2:
                raise ArtifactError(
                    place, f"{name} was timed at one {column} only", valid="expected two or more", remedy="Profile on."
                )
        fitted[name] = _fit_operator(own, operator, _sum_of_halves(fitted, own) if name == "mixed_attention" else None)
    return fitted


def prepare(points: pd.DataFrame) -> pd.DataFrame:
    """Points with coordinates that follow from the others: the mean context of decodes (themselves included), and
    all context of an iteration.
    """
    num_decodes = points["num_decodes"].clip(lower=1)
    return points.assign(
        mean_context=points["decode_context_tokens"] / num_decodes + 1.0,
        all_context=points["decode_context_tokens"] + points["chunk_context_tokens"],
    )


def described_model(metadata: Metadata, place: str) -> Model:
    """The model that a profile is of. Raises ArtifactError."""
    return parse_config(metadata.model, metadata.config, place)


def _fit_operator(own: pd.DataFrame, operator: Operator, reference: Reference | None = None) -> FittedOperator:
    at = tuple(own[column].to_numpy(dtype=float) for column in operator.columns)
    points = Points(at, own["median_ns"].to_numpy(dtype=float), _noise(own))
    most = MOST_NODES[len(at)]

    def fitted(some: Points) -> Surface:
        axes = [nodes_of(values, num) for values, num in zip(some.at, most, strict=True)]
        axes = [
            with_midpoints(axis) if column == "chunk_tokens" else axis
            for axis, column in zip(axes, operator.columns, strict=True)
        ]
        return fit_surface(some, reference or physical(operator.features, some), axes)

    places, errors, expected = held_out(points, fitted)
    return FittedOperator(fitted(points), points, points.take(places), errors, expected)


def _noise(own: pd.DataFrame) -> Floats:
    """Relative standard error of each median: its 95 % interval is some four of them wide."""
    width = (own["ci_high_ns"] - own["ci_low_ns"]).to_numpy(dtype=float) / own["median_ns"].to_numpy(dtype=float)
    noise: Floats = np.maximum(np.nan_to_num(width) / 3.92, LEAST_NOISE)
    return noise


def _sum_of_halves(fitted: dict[str, FittedOperator], own: pd.DataFrame) -> Reference:
    """What both halves take one after the other, times the part of it that they take together on average."""
    prompt, decode = fitted["prefill_attention"].surface, fitted["decode_attention"].surface

    def in_turn(at: Sequence[Floats]) -> Floats:
        return prompt.at(at[1:3]) + decode.at((at[0], at[3]))

    part = np.exp(np.log(own["median_ns"].to_numpy(dtype=float) / in_turn(_coordinates(own, "mixed_attention"))).mean())
    return lambda at: part * in_turn(at)


def _is_unequal(own: pd.DataFrame) -> pd.Series[bool]:
    return own["decode_context_max"] * own["num_decodes"] > UNEQUAL * own["decode_context_tokens"]


def _equal(own: pd.DataFrame) -> pd.DataFrame:
    """Batches of equal contexts, or all of them where few are: then spread is in the times."""
    equal = own[~_is_unequal(own)]
    return equal if len(equal) >= len(own) / 4 else own


def _skew(points: pd.DataFrame, fitted: dict[str, FittedOperator], num_layers: int) -> list[Term]:
    """What unequal contexts add to decodes: `spread · (a + b · batch · ratio)`, the least that explains them."""
    from scipy.optimize import nnls

    decodes = points[points["operator"] == "decode_attention"]
    own = decodes[_is_unequal(decodes)]
    if len(_equal(decodes)) == len(decodes) or len(own) < 3:
        return []
    batch, total = own["num_decodes"].to_numpy(dtype=float), own["decode_context_tokens"].to_numpy(dtype=float)
    distance = own["decode_context_max"].to_numpy(dtype=float) - total / batch
    variance = np.maximum(own["decode_context_sq"].to_numpy(dtype=float) / batch - (total / batch) ** 2, 1e-9)
    ratio = variance / (variance + distance**2)
    spread = distance / (1 - ratio)
    equal_ns = fitted["decode_attention"].surface.at((batch, total / batch + 1))
    times = own["median_ns"].to_numpy(dtype=float)
    weight = 1 / (times * _noise(own))
    features = np.column_stack([spread, batch * ratio * spread]) * weight[:, None]
    found, _ = nnls(features, (times - equal_ns) * weight)
    axes = [_ends(batch), _ends(ratio), np.array([0.0, float(spread.max())])]
    n, part, by = np.meshgrid(*axes, indexing="ij")
    excess = by * (found[0] + found[1] * n * part)
    note = f"fitted to {len(own)} batches of unequal contexts"
    return [term("decode_skew", "decode_skew", axes, excess * 1e-3, num_layers, note)] if excess.any() else []


def _ends(values: Floats) -> Floats:
    low, high = float(values.min()), float(values.max())
    return np.array([low, high if high > low else low + 1.0])


def _term(name: str, own: FittedOperator, num_layers: int, metadata: Metadata) -> Term:
    calls = {"norm": 2 * num_layers + 1, "all_reduce": 2 * num_layers} | dict.fromkeys(SAMPLED, 1)
    backend = metadata.backends.get(name)
    note = f"kernel of {backend}" if backend else ""
    made = term(
        OPERATORS[name].kind, name, own.surface.axes, own.surface.table * 1e-3, calls.get(name, num_layers), note
    )
    return made.model_copy(update={"is_communication": name == "all_reduce", "corners": _corners(own.points)})


def _corners(points: Points) -> list[list[float]]:
    """The points that no other is as large as along every axis; none where one of them is the grid's last node."""
    found = np.unique(np.column_stack(points.at), axis=0)
    largest = [own for own in found if not ((found >= own).all(axis=1) & (found > own).any(axis=1)).any()]
    return [own.tolist() for own in largest] if len(largest) > 1 else []


def _residuals(name: str, own: FittedOperator) -> list[Residual]:
    return by_region(name, AXES[OPERATORS[name].kind], own.held_out.at, own.errors)


def _uncertainty(own: FittedOperator, at: Sequence[Floats]) -> Floats:
    """Expected spread, scaled to the errors found, with the errors of the neighbourhood."""
    spread = own.surface.spread_at(at)
    if not len(own.errors):
        return np.minimum(spread, UNKNOWN)
    spread = spread * max(float(np.sqrt(np.mean((own.errors / own.expected) ** 2))), 0.5)
    span = [float(np.ptp(np.log1p(axis))) or 1.0 for axis in own.points.at]

    def far(others: Points) -> Floats:
        steps = [
            (np.log1p(x)[:, None] - np.log1p(axis)[None]) / width
            for x, axis, width in zip(at, others.at, span, strict=True)
        ]
        distance: Floats = np.sqrt(np.sum(np.square(steps), axis=0))
        return distance

    weights = 1 / (far(own.held_out) ** 2 + 1e-3)
    nearby = (weights * np.abs(own.errors)).sum(axis=1) / weights.sum(axis=1)
    gap = far(own.points).min(axis=1)
    total: Floats = np.minimum(np.hypot(spread, nearby * gap / (gap + 0.05)), UNKNOWN)
    return total


def _coordinates(rows: pd.DataFrame, name: str) -> list[Floats]:
    return [rows[column].to_numpy(dtype=float) for column in OPERATORS[name].columns]


def _artifact(
    metadata: Metadata, model: Model, terms: list[Term], residuals: list[Residual], points: pd.DataFrame
) -> Artifact:
    timed = set(points["operator"])
    missing = [what for name, what in _EXPECTED.items() if name not in timed]
    if metadata.tensor_parallel > 1 and "all_reduce" not in timed:
        missing.append("all-reduce between GPUs")
    has_graphs = bool((points["mode"] == "graph").any())
    return Artifact(
        hardware=metadata.hardware.name,
        gpu=gpu_of_driver(metadata.hardware.name),
        model=model.name,
        shape=Shape.of(model),
        dtype=metadata.dtype,
        kv_dtype_bytes=_BYTES.get(metadata.dtype, float(model.dtype_bytes)),
        tensor_parallel=metadata.tensor_parallel,
        measured_on=metadata.date,
        versions=metadata.versions | ({"driver": metadata.driver} if metadata.driver else {}),
        source="servesim calibrate profile",
        licence="that of whoever timed it",
        cuda_graph_sizes=VLLM_0_19_0 if has_graphs else [],
        terms=terms,
        missing=[*missing, WORK_ON_THE_HOST],
        holdout_error={
            name: round(float(np.average([r.mean_absolute_error for r in own], weights=[r.num_points for r in own])), 5)
            for name in sorted({residual.term for residual in residuals})
            if (own := [residual for residual in residuals if residual.term == name])
        },
        residuals=residuals,
    )
