"""Vidur profiles (Microsoft, MIT): operators of one transformer layer, attention, and collectives, in ms.

- `mlp` holds every operator of a layer but attention, by tokens and tensor parallelism, per GPU; keys that
  were timed twice get the mean.
- `attention` has decodes (batch, KV) and prompts (chunk, KV) of one model's shape; the sums of contexts and
  chunks were limited to 4,096, and longer ones go on straight.
- `all_reduce` counts bytes of the 16-bit payload, and has a row for every rank.
- Nothing holds the LM head or sampling.
- Kernels were timed one by one; that an engine pads batches to the sizes of its CUDA graphs is vLLM's doing, and
  the artifact has its sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calibration import csv_table
from calibration.cuda_graphs import VLLM_0_11_0
from calibration.grids import Floats, holdout_error, rising, straight_on, term, to_grid
from calibration.host import WORK_ON_THE_HOST
from calibration.models import load_plain_model
from calibration.plausible import check_plausible
from sim.cost.artifact import Artifact, Shape, Term
from sim.errors import ArtifactError
from sim.gpu import gpus
from sim.model import Model

if TYPE_CHECKING:
    import pandas as pd

_MS_TO_US = 1e3
LAYER_OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
_HEADS = ("n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers")


def import_profile(
    mlp: Path, attention: Path, model: str, tensor_parallel: int = 1, all_reduce: Path | None = None
) -> Artifact:
    """The artifact of one model. Raises ArtifactError for files that are no times or of another shape.

    Without `all_reduce`, tensor parallelism has no communication, and the artifact says so.
    """
    described = load_plain_model(model)
    layers = described.num_hidden_layers
    terms = _operators(mlp, described, tensor_parallel)
    terms += _attention(attention, described, tensor_parallel)
    missing = ["LM head", "sampling", "gaps between kernels", WORK_ON_THE_HOST]
    if tensor_parallel > 1:
        terms += [] if all_reduce is None else [_all_reduce(all_reduce, described, tensor_parallel, 2 * layers)]
        missing += [] if all_reduce is not None else ["all-reduce between GPUs"]
    hardware = mlp.name.partition("_")[0]
    artifact = Artifact(
        hardware=hardware,
        gpu=next((gpu.name for gpu in gpus() if gpu.name.startswith(hardware)), None),
        model=described.name,
        shape=Shape.of(described),
        dtype="float16",
        kv_dtype_bytes=2.0,
        tensor_parallel=tensor_parallel,
        measured_on="at an unstated date",
        versions={},
        source="Vidur, github.com/microsoft/vidur, data/profiling",
        licence="MIT",
        cuda_graph_sizes=VLLM_0_11_0,
        terms=terms,
        missing=missing,
        holdout_error={
            own.name: round(holdout_error(np.array(own.points[-1]), _table(own)), 5)
            for own in terms
            if own.kind.endswith("attention")
        },
    )
    check_plausible(artifact, described, f"{mlp}, {attention}")
    return artifact


def _table(own: Term) -> Floats:
    return np.reshape(np.array(own.us), [len(points) for points in own.points])


def _operators(path: Path, model: Model, tensor_parallel: int) -> list[Term]:
    columns = [f"time_stats.{name}.median" for name in LAYER_OPERATORS]
    shape = {
        "n_embd": model.hidden_size,
        "n_expanded_embd": model.intermediate_size,
        "n_head": model.num_attention_heads,
    }
    rows = csv_table.read(path, ["num_tokens", "num_tensor_parallel_workers", *shape, *columns], columns)
    _check_shape(path, rows, shape | {"n_kv_head": model.num_key_value_heads}, model)
    rows = rows[rows["num_tensor_parallel_workers"] == tensor_parallel]
    if rows["num_tokens"].nunique() < 2:
        raise ArtifactError(str(path), f"fewer than two numbers of tokens on {tensor_parallel} GPUs")
    terms = []
    for name, column in zip(LAYER_OPERATORS, columns, strict=True):
        points, us = to_grid([rows["num_tokens"].to_numpy(dtype=float)], rows[column].to_numpy(dtype=float) * _MS_TO_US)
        terms.append(term("tokens", name, points, rising(us), model.num_hidden_layers))
    return terms


def _check_shape(path: Path, rows: pd.DataFrame, shape: dict[str, int], model: Model) -> None:
    for column, wanted in shape.items():
        timed = sorted(set(rows[column])) if column in rows else [wanted]
        if timed != [wanted]:
            raise ArtifactError(str(path), f"{column} is {timed}", valid=f"{model.name} has {wanted}")


def _attention(path: Path, model: Model, tensor_parallel: int) -> list[Term]:
    decode, prompt = "time_stats.attn_decode.median", "time_stats.attn_prefill.median"
    reshape = "time_stats.attn_output_reshape.median"
    keys = ["batch_size", "prefill_chunk_size", "kv_cache_size"]
    raw = csv_table.read(path, [*_HEADS, *keys, "is_prefill", reshape], [reshape])
    shape = dict(zip(_HEADS, (model.hidden_size, model.num_attention_heads, model.num_key_value_heads), strict=False))
    _check_shape(path, raw, shape | {"num_tensor_parallel_workers": tensor_parallel}, model)
    found = []
    for kind, is_prefill, column, axis in (
        ("decode_attention", False, decode, "batch_size"),
        ("prefill_attention", True, prompt, "prefill_chunk_size"),
    ):
        rows = raw[raw["is_prefill"] == is_prefill]
        csv_table.check(rows, path, [column], [column])
        us = (rows[column].astype(float) + rows[reshape]).to_numpy() * _MS_TO_US
        axes, table = to_grid([rows[name].to_numpy(dtype=float) for name in (axis, "kv_cache_size")], us)
        note = "contexts that were not timed: straight on from those that were" if np.isnan(table).any() else ""
        found.append(term(kind, kind, axes, rising(straight_on(axes[1], table)), model.num_hidden_layers, note))
    return found


def _all_reduce(path: Path, model: Model, tensor_parallel: int, calls: int) -> Term:
    """Within one server, the mean of the ranks' medians."""
    column = "time_stats.all_reduce.median"
    rows = csv_table.read(path, ["num_workers", "devices_per_node", "size", column], [column])
    rows = rows[(rows["num_workers"] == tensor_parallel) & (rows["devices_per_node"] == tensor_parallel)]
    if rows["size"].nunique() < 2:
        raise ArtifactError(str(path), f"no all-reduce of {tensor_parallel} GPUs in one server")
    (num_bytes,), us = to_grid([rows["size"].to_numpy(dtype=float)], rows[column].to_numpy(dtype=float) * _MS_TO_US)
    points = num_bytes / (model.hidden_size * model.dtype_bytes)
    ring = term("tokens", "allreduce", [points], rising(us), calls, "all-reduce between the GPUs of one server")
    return ring.model_copy(update={"is_communication": True})
