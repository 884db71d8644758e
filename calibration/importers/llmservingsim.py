"""LLMServingSim profiles (casys-kaist, MIT): vLLM's kernels timed layer by layer, one CSV for each kind.

`dense` (µs per call by rows computed), `per_sequence` (µs by rows sampled), `attention` (µs per layer by prompt
chunk, its context, decodes and their context, mixed batches included), `moe` (µs per layer of experts by rows
computed and experts touched) and `skew` (batches of unequal contexts). What the files do not say of themselves,
and was checked against their own contents:

- A zero coordinate means that this half of the batch is absent.
- The times in `skew` are sums over the repeats, those in the other files means: its equal-length rows are
  so many times what `attention` says of the same batch.
- Profiled eagerly with one layer: gaps between kernels and work on the host are not in the times. Under
  tensor parallelism one GPU was timed: nothing in the tables is an all-reduce.

Between timed points tables go on as `calibration/known_kernels.py` says of products and of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from calibration import csv_table
from calibration.grids import Floats, fill_gaps, holdout_error, rising, term, to_grid
from calibration.host import WORK_ON_THE_HOST
from calibration.known_kernels import after_whole_tiles, by_pairs, changing_after, largest_split_batch
from calibration.models import bundled_name, known_gpu, load_plain_model
from calibration.plausible import check_plausible
from calibration.ring import Link, between_gpus
from sim.cost.artifact import Artifact, Shape, Term
from sim.errors import ArtifactError
from sim.model import Model

if TYPE_CHECKING:
    import pandas as pd

CALLS_PER_LAYER = {"layernorm": 2}
"""Layers that occur otherwise than once per decoder layer: before attention and before the MLP."""
CALLED_ONCE = ("embedding", "final_layernorm")
PRODUCT = "_proj"
"""How the names of matrix products end."""
MLP = ("gate_up_proj", "act_fn", "down_proj")
"""Layers that decoder layers with experts do not have."""
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
SKEW = ("n", "ratio", "skew", "pc", "kp", "kvs", "kv_mean", "t_mean_us", "t_skew_us")
SKEW_FACTOR = 4.0
"""How many times the short contexts the long ones are, in nearly all rows of `skew`."""
WITH_EXPERTS = "expected times of experts (`moe`) for a mixture of experts, and for no other model"


def import_profile(
    folder: Path, tensor_parallel: int = 1, model: str | None = None, link: Link | None = None
) -> Artifact:
    """The artifact of one bundle. Raises ArtifactError for files that are missing, incomplete or no times.

    `model` is a bundled name or the path of a config.json, for bundles whose model is not recognized.
    `link` prices the all-reduces of tensor parallelism, which no bundle has timed; without it they are
    missing, and named so.
    """
    meta = _meta(folder)
    described = _model(model or bundled_name(str(meta["model"])), folder, tensor_parallel)
    layers = described.num_hidden_layers
    dense = _times(folder, tensor_parallel, "dense", ("layer", "tokens"))
    sequences = _times(folder, tensor_parallel, "per_sequence", ("layer", "sequences"))
    attention = _times(folder, tensor_parallel, "attention", ATTENTION)
    terms = [
        _curve("tokens", str(name), rows, "tokens", _calls(str(name), described))
        for name, rows in dense.groupby("layer")
    ]
    terms += _experts(folder, tensor_parallel, described)
    terms += [_curve("sequences", str(name), rows, "sequences", 1) for name, rows in sequences.groupby("layer")]
    terms += _attention(attention, layers, str(folder))
    kv_heads = described.kv_heads_per_gpu(tensor_parallel)
    split = largest_split_batch(
        known_gpu(str(meta["hardware"])), described.num_attention_heads // tensor_parallel, kv_heads
    )
    skew = _skew(folder, tensor_parallel, meta, terms, layers, split)
    missing = ["gaps between kernels", WORK_ON_THE_HOST, *([] if skew else ["spread of contexts"])]
    if described.experts and described.experts.shared_intermediate_size:
        missing += [] if dense["layer"].str.contains("shared").any() else ["shared experts"]
    terms += skew
    if tensor_parallel > 1:
        terms += [] if link is None else between_gpus(described, tensor_parallel, link)
        missing += [] if link is not None else ["all-reduce between GPUs"]
    artifact = Artifact(
        hardware=str(meta["gpu"]),
        gpu=known_gpu(str(meta["hardware"])),
        model=str(meta["model"]),
        shape=Shape.of(described),
        dtype="bfloat16",
        kv_dtype_bytes=2.0,
        tensor_parallel=tensor_parallel,
        measured_on=str(meta["profiled_at"])[:10],
        versions={"vllm": str(meta["vllm_version"]), "cuda": str(meta["cuda_version"])},
        source="LLMServingSim, github.com/casys-kaist/LLMServingSim, profiler/perf",
        licence="MIT",
        cuda_graph_sizes=[],
        terms=terms,
        missing=missing,
        holdout_error=_holdout(terms),
    )
    check_plausible(artifact, described, str(folder))
    return artifact


def _meta(folder: Path) -> dict[str, Any]:
    path = csv_table.find([folder / "meta.yaml", folder / "meta.yaml.txt"], str(folder))
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ArtifactError(str(path), f"cannot be read as YAML ({error})") from error
    needed = ("model", "gpu", "hardware", "profiled_at", "vllm_version", "cuda_version", "variant")
    absent = [key for key in needed if not isinstance(meta, dict) or key not in meta]
    if absent:
        raise ArtifactError(str(path), f"does not say {', '.join(absent)}", valid="expected an LLMServingSim profile")
    if meta["variant"] not in ("bf16", "fp16"):
        raise ArtifactError(str(path), f"variant is {meta['variant']!r}", valid="expected bf16 or fp16")
    return dict(meta)


def _model(name_or_path: str, folder: Path, tensor_parallel: int) -> Model:
    """A dense model, or a mixture of experts whose experts were timed."""
    model = load_plain_model(name_or_path, may_have_experts=True)
    has_times = _exists(folder, tensor_parallel, "moe")
    if has_times and model.experts is None:
        raise ArtifactError(str(folder), f"has times of experts, and {model.name} has none", valid=WITH_EXPERTS)
    if model.experts and not has_times:
        raise ArtifactError(str(folder), f"has no times of the experts of {model.name}", valid=WITH_EXPERTS)
    return model


def _experts(folder: Path, tensor_parallel: int, model: Model) -> list[Term]:
    if model.experts is None:
        return []
    rows = _times(folder, tensor_parallel, "moe", ("tokens", "activated_experts"))
    points = [rows[name].to_numpy(dtype=float) for name in ("tokens", "activated_experts")]
    axes, table = to_grid(points, rows["time_us"].to_numpy(dtype=float))
    if min(map(len, axes)) < 2:
        raise ArtifactError(str(folder), "moe: timed at less than two points along an axis", valid="expected a grid")
    if axes[1][-1] > model.experts.num_experts:
        raise ArtifactError(
            str(folder), f"moe: {axes[1][-1]:g} experts", valid=f"{model.name} has {model.experts.num_experts}"
        )
    note = "at the experts that so many rows are expected to touch, each being as likely: an upper bound"
    filled = fill_gaps(axes, table, [0, 1], f"{folder}: moe")
    return [term("experts", "experts", axes, rising(filled), model.experts.num_layers, note)]


def _exists(folder: Path, tensor_parallel: int, name: str) -> bool:
    return any(
        path.with_name(path.name + ending).is_file()
        for path in _paths(folder, tensor_parallel, name)
        for ending in ("", ".gz")
    )


def _paths(folder: Path, tensor_parallel: int, name: str) -> list[Path]:
    return [folder / f"tp{tensor_parallel}_{name}.csv", folder / f"tp{tensor_parallel}" / f"{name}.csv"]


def _times(folder: Path, tensor_parallel: int, name: str, keys: Sequence[str]) -> pd.DataFrame:
    path = csv_table.find(_paths(folder, tensor_parallel, name), str(folder))
    return csv_table.read(path, [*keys, "time_us"], ["time_us"], ["layer"])


def _calls(layer: str, model: Model) -> int:
    if layer in CALLED_ONCE:
        return 1
    with_experts = model.experts.num_layers if model.experts and layer in MLP else 0
    if with_experts == model.num_hidden_layers:
        raise ArtifactError(
            "dense", f"{layer} was timed, and every layer of {model.name} has experts in its place", valid=WITH_EXPERTS
        )
    return CALLS_PER_LAYER.get(layer, 1) * (model.num_hidden_layers - with_experts)


def _curve(kind: str, name: str, rows: pd.DataFrame, column: str, calls: int) -> Term:
    (points,), times = to_grid([rows[column].to_numpy(dtype=float)], rows["time_us"].to_numpy(dtype=float))
    if len(points) < 2:
        raise ArtifactError(name, f"was timed at {len(points)} point only", valid="expected two or more")
    times = rising(times)
    if kind == "tokens" and name.endswith(PRODUCT):
        points, times = after_whole_tiles(points, times)
    return term(kind, name, [points], times, calls)


def _attention(rows: pd.DataFrame, layers: int, place: str) -> list[Term]:
    """Decodes alone, a prompt chunk alone, and both in one call."""
    has_chunk, has_decodes = rows["prefill_chunk"] > 0, rows["n_decode"] > 0
    note = "points between two interleaved grids are interpolated"
    parts = {
        "decode_attention": (rows[has_decodes & ~has_chunk], ["n_decode", "kv_decode"], [1, 0]),
        "prefill_attention": (rows[has_chunk & ~has_decodes], ["prefill_chunk", "kv_prefill"], [1, 0]),
        "mixed_attention": (
            rows[has_chunk & has_decodes],
            ["n_decode", "prefill_chunk", "kv_prefill", "kv_decode"],
            [2, 3, 1],
        ),
    }
    terms = []
    for kind, (own, columns, order) in parts.items():
        axes, table = to_grid([own[c].to_numpy(dtype=float) for c in columns], own["time_us"].to_numpy(dtype=float))
        if min(map(len, axes)) < 2:
            raise ArtifactError(place, f"{kind} was timed along {len(axes)} axes at less than two points each")
        has_gaps = np.isnan(table).any()
        table = rising(fill_gaps(axes, table, order, f"{place}: {kind}"))
        if "prefill_chunk" in columns:
            axes, table = by_pairs(axes, table, columns.index("prefill_chunk"))
        terms.append(term(kind, kind, axes, table, layers, note if has_gaps else ""))
    return terms


def _skew(
    folder: Path, tensor_parallel: int, meta: dict[str, Any], terms: list[Term], layers: int, split: int | None
) -> list[Term]:
    """What unequal contexts add, unless the bundle's own description leaves it out.

    `split` is the largest batch of decodes whose contexts are split; together with prompts none ever is.
    """
    declared = meta.get("skew_fit")
    if not isinstance(declared, dict) or not declared.get("enabled", False):
        return []
    if not _exists(folder, tensor_parallel, "skew"):
        return []
    path = csv_table.find(_paths(folder, tensor_parallel, "skew"), str(folder))
    rows = csv_table.read(path, SKEW, ["t_mean_us", "t_skew_us"])
    repeats = _repeats(rows, terms, str(path))
    rows = rows[(rows["skew"] == SKEW_FACTOR) & (rows["kp"] == 0)]
    note = (
        "time of two groups of contexts less that of equal ones with the same mean, prompts without context; "
        "never less than none"
    )
    found = []
    for kind, own in (("decode_skew", rows[rows["pc"] == 0]), ("mixed_skew", rows[rows["pc"] > 0])):
        excess = (own["t_skew_us"] - own["t_mean_us"]).to_numpy(dtype=float) / repeats
        spread = own["kvs"].to_numpy(dtype=float) * (SKEW_FACTOR - 1)
        points = [own["n"].to_numpy(dtype=float), own["ratio"].to_numpy(dtype=float), spread]
        axes, table = to_grid(points, excess)
        table = np.clip(fill_gaps(axes, table, [2, 1], f"{path}: {kind}"), 0.0, None)
        axes[2] = np.concatenate([[0.0], axes[2]])
        table = np.concatenate([np.zeros((*table.shape[:2], 1)), table], axis=2)
        if kind == "decode_skew" and split is not None:
            axes, table = changing_after(split, axes, table)
        found.append(term(kind, kind, axes, table, layers, note))
    return found


def _repeats(rows: pd.DataFrame, terms: list[Term], place: str) -> int:
    """How many repeats the times of `skew` are sums of: what they are of equal contexts, against `attention`."""
    table = next(own for own in terms if own.kind == "decode_attention")
    batch, context = (np.array(points) for points in table.points)
    times = np.reshape(table.us, (len(batch), len(context)))
    own = rows[(rows["pc"] == 0) & rows["n"].isin(batch)]
    if own.empty:
        raise ArtifactError(place, "has no rows without prompts")
    expected = [
        np.interp(mean, context, times[np.searchsorted(batch, n)])
        for n, mean in zip(own["n"], own["kv_mean"], strict=True)
    ]
    ratio = float(np.median(own["t_mean_us"].to_numpy(dtype=float) / np.array(expected)))
    if abs(ratio / max(round(ratio), 1) - 1) > 0.1:
        raise ArtifactError(place, f"t_mean_us is {ratio:.2f} times what attention says of the same batches")
    return round(ratio)


def _holdout(terms: list[Term]) -> dict[str, float]:
    errors = {}
    for own in terms:
        if own.kind.endswith("attention") or own.kind == "tokens":
            table: Floats = np.reshape(own.us, [len(points) for points in own.points])
            errors[own.name] = round(holdout_error(np.array(own.points[-1]), table), 5)
    return errors
