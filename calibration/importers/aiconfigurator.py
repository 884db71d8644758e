"""AIConfigurator tables (NVIDIA, Apache-2.0): operators timed one by one in vLLM's kernels, any shape.

A model's products are looked up by their own (n, k), interpolated between the shapes that were timed; its
attention by its heads per GPU. What the tables do not hold, and how it is filled:

- Times are ms per call. A prompt's attention was timed without context only: a chunk on a context takes its
  part, by (query, key) pairs, of the prompt that ends where it ends.
- Norms, rotary embedding, activation and KV writes were not timed; they move their bytes at the part of the
  memory bandwidth, and take the constant each, that the system file states.
- The custom all-reduce has two rows a size, inside a CUDA graph and outside: that of the graph is taken.
  `message_size` counts elements: as bytes it would be half of what the links carry.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml

from calibration import csv_table
from calibration.grids import Floats, holdout_error, rising, straight_on, term, to_grid
from calibration.host import WORK_ON_THE_HOST
from sim.cost.artifact import Artifact, Shape, Term
from sim.errors import ArtifactError
from sim.gpu import gpus
from sim.model import Model, load_model

if TYPE_CHECKING:
    import pandas as pd

_MS_TO_US = 1e3
CUDA_GRAPH_SIZES = [1, 2, 4, *range(8, 513, 8)]
"""Batch sizes that vLLM 0.11 captures by default, up to 512 (`vllm/config`)."""
_PLAIN = "bfloat16"
_LARGEST_ROWS = 16384


def import_tables(folder: Path, model: str, gpu: str = "h100_sxm", tensor_parallel: int = 1) -> Artifact:
    """The artifact of one model on one kind of GPU. Raises ArtifactError for tables that are missing or no times.

    `gpu` is the prefix of the files' names.
    """
    described = load_model(model, place="--model")
    described.check_tensor_parallel(tensor_parallel, place="--tp")
    dtype = _weight_dtype(described)
    gemm = _read(folder, f"{gpu}_vllm*_gemm.csv", ["m", "n", "k", "latency_ms"])
    terms = [*_products(gemm, described, dtype, tensor_parallel, str(folder))]
    terms += [_elementwise(folder, gpu, described, tensor_parallel)]
    terms += _attention(folder, gpu, described, tensor_parallel)
    if tensor_parallel > 1:
        terms.append(_allreduce(folder, gpu, described, tensor_parallel))
    name = next((own.name for own in gpus() if own.name.startswith(gpu.replace("_", "-"))), None)
    attention = [own for own in terms if own.kind.endswith("attention")]
    return Artifact(
        hardware=gpu,
        gpu=name,
        model=described.name,
        shape=Shape.of(described),
        dtype=dtype,
        kv_dtype_bytes=2.0,
        tensor_parallel=tensor_parallel,
        measured_on="at an unstated date",
        versions={"vllm": _version(folder, gpu)},
        source="AIConfigurator, aiconfigurator-core 0.12.0 on PyPI, systems/data",
        licence="Apache-2.0",
        cuda_graph_sizes=CUDA_GRAPH_SIZES,
        terms=terms,
        missing=["sampling", "gaps between kernels", WORK_ON_THE_HOST],
        holdout_error={
            own.name: round(
                holdout_error(np.array(own.points[-1]), np.reshape(own.us, [len(axis) for axis in own.points])), 5
            )
            for own in attention
        },
    )


def _weight_dtype(model: Model) -> str:
    """The type of the model's products, as the tables call it."""
    if model.quantization is None:
        return _PLAIN
    if model.quantization.has_fp8_activations:
        return "fp8"
    raise ArtifactError(
        "--model",
        f"{model.name} is quantized by {model.quantization.method} with 16-bit activations",
        valid="imported: 16-bit weights, and fp8 weights with fp8 activations",
    )


def _read(folder: Path, pattern: str, columns: list[str]) -> pd.DataFrame:
    found = sorted([*folder.glob(pattern), *folder.glob(pattern + ".gz")])
    if not found:
        raise ArtifactError(str(folder), f"there is no {pattern}", remedy="Name the folder of AIConfigurator tables.")
    return csv_table.read(found[0], columns, [columns[-1]])


def _version(folder: Path, gpu: str) -> str:
    name = next(folder.glob(f"{gpu}_vllm*_gemm.csv*")).name
    return name.removeprefix(f"{gpu}_vllm").partition("_")[0]


def _products(rows: pd.DataFrame, model: Model, dtype: str, tensor_parallel: int, place: str) -> list[Term]:
    """The matrix products of a layer in `dtype`, and the LM head, which quantized checkpoints leave in 16 bits."""
    tp, hidden = tensor_parallel, model.hidden_size
    heads, kv_heads = model.num_attention_heads // tp, model.kv_heads_per_gpu(tp)
    intermediate = -(-model.intermediate_size // tp)
    shapes = {
        "qkv_proj": ((heads + 2 * kv_heads) * model.head_dim, hidden),
        "o_proj": (hidden, heads * model.head_dim),
        "gate_up_proj": (model.num_mlp_inputs * intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    axes, table = _gemm(rows, dtype, place)
    terms = [
        term(
            "tokens",
            name,
            axes[:1],
            rising(_at_shape(axes, table, *shape)),
            model.num_hidden_layers,
            _note(axes, *shape),
        )
        for name, shape in shapes.items()
    ]
    axes, table = _gemm(rows, _PLAIN, place)
    head = (-(-model.vocab_size // tp), hidden)
    us = rising(_at_shape(axes, table, *head))
    return [*terms, term("sequences", "lm_head", axes[:1], us, 1, _note(axes, *head))]


def _gemm(rows: pd.DataFrame, dtype: str, place: str) -> tuple[list[Floats], Floats]:
    """Rows, n and k of what was timed in one type, and the times, µs."""
    own = rows[rows["gemm_dtype"] == dtype]
    axes, table = to_grid(
        [own[name].to_numpy(dtype=float) for name in ("m", "n", "k")],
        own["latency_ms"].to_numpy(dtype=float) * _MS_TO_US,
    )
    if min(map(len, axes)) < 2:
        raise ArtifactError(place, f"gemm: {dtype} was timed at less than two points along an axis")
    return axes, table


def _note(axes: list[Floats], n: int, k: int) -> str:
    if n in axes[1] and k in axes[2]:
        return ""
    beyond = " and extrapolated" if n > axes[1][-1] or k > axes[2][-1] else ""
    return f"{n} x {k} was not timed: interpolated{beyond} between the shapes that were"


def _at_shape(axes: list[Floats], table: Floats, n: int, k: int) -> Floats:
    """Times by number of rows for one (n, k): linear in both, as reading weights and multiplying by them is."""
    for points, value in ((axes[1], float(n)), (axes[2], float(k))):
        i = int(np.clip(np.searchsorted(points, value, side="right") - 1, 0, len(points) - 2))
        part = (value - points[i]) / (points[i + 1] - points[i])
        low, high = table[:, i], table[:, i + 1]
        table = np.where(part == 0, low, low * (1 - part) + high * part)
    return table


def _elementwise(folder: Path, gpu: str, model: Model, tensor_parallel: int) -> Term:
    """Two norms with their residuals, rotary embedding, the KV write and the activation of every layer."""
    path = csv_table.find([folder / f"{gpu}_system.yaml", folder / f"{gpu}_system.yaml.txt"], str(folder))
    try:
        system = yaml.safe_load(path.read_text(encoding="utf-8"))["gpu"]
        rate = float(system["mem_bw"]) * float(system["mem_bw_empirical_scaling_factor"])
        constant_us = float(system["mem_empirical_constant_latency"]) * 1e6
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            str(path), f"does not state the memory bandwidth and its corrections ({error!r})"
        ) from error
    heads, kv_heads = model.num_attention_heads // tensor_parallel, model.kv_heads_per_gpu(tensor_parallel)
    intermediate = -(-model.intermediate_size // tensor_parallel)
    elements = 2 * 4 * model.hidden_size + 2 * (heads + kv_heads) * model.head_dim
    elements += 4 * kv_heads * model.head_dim + (model.num_mlp_inputs + 1) * intermediate
    num_tokens = np.array([1.0, float(_LARGEST_ROWS)])
    us = 5 * constant_us + num_tokens * elements * model.dtype_bytes / rate * 1e6
    note = f"not timed: five kernels of {constant_us:g} us and their bytes at {rate / 1e12:.2f} TB/s"
    return term("tokens", "elementwise", [num_tokens], us, model.num_hidden_layers, note)


def _attention(folder: Path, gpu: str, model: Model, tensor_parallel: int) -> list[Term]:
    kinds = ("context", "generation")
    columns = ["batch_size", "isl", "step", "num_heads", "num_key_value_heads", "latency_ms"]
    heads, kv_heads = model.num_attention_heads // tensor_parallel, model.kv_heads_per_gpu(tensor_parallel)
    found: dict[str, pd.DataFrame] = {}
    for kind in kinds:
        rows = _read(folder, f"{gpu}_vllm*_{kind}_attention_hd{model.head_dim}.csv", columns)
        own = (rows["num_heads"] == heads) & (rows["num_key_value_heads"] == kv_heads)
        found[kind] = rows[own & (rows["kv_cache_dtype"] == "bfloat16")]
        if found[kind].empty:
            timed = sorted(set(zip(rows["num_heads"], rows["num_key_value_heads"], strict=True)))
            raise ArtifactError(
                str(folder), f"no {kind} attention of {heads} heads and {kv_heads} KV heads", valid=f"timed: {timed}"
            )
    layers = model.num_hidden_layers
    return [_decode(found["generation"], layers), _prompt(found["context"], layers)]


def _decode(rows: pd.DataFrame, layers: int) -> Term:
    """Batches of decodes; large ones were timed at short contexts only, and go on straight from there."""
    axes, table = to_grid(
        [rows["batch_size"].to_numpy(dtype=float), rows["step"].to_numpy(dtype=float) + 1],
        rows["latency_ms"].to_numpy(dtype=float) * _MS_TO_US,
    )
    table = straight_on(axes[1], table)
    note = "large batches at long contexts were not timed: straight on from the contexts that were"
    return term("decode_attention", "decode_attention", axes, rising(table), layers, note)


def _prompt(rows: pd.DataFrame, layers: int) -> Term:
    """One prompt by its tokens and its context."""
    alone = rows[rows["batch_size"] == 1]
    (tokens,), us = to_grid([alone["isl"].to_numpy(dtype=float)], alone["latency_ms"].to_numpy(dtype=float) * _MS_TO_US)
    context = np.concatenate([[0.0], tokens[tokens >= 128]])
    n, c = np.meshgrid(tokens, context, indexing="ij")
    end = n + c
    pairs = n * c + n * (n + 1) / 2
    whole = np.interp(end, tokens, us)
    beyond = end > tokens[-1]
    whole[beyond] = us[-1] * (end[beyond] / tokens[-1]) ** 2
    table = np.maximum(whole * pairs / (end * (end + 1) / 2), us[0])
    note = "contexts were not timed: the part, by pairs, of the prompt that ends where the chunk ends"
    return term("prefill_attention", "prefill_attention", [tokens, context], rising(table), layers, note)


def _allreduce(folder: Path, gpu: str, model: Model, tensor_parallel: int) -> Term:
    rows = _read(folder, f"{gpu}_vllm*_custom_allreduce.csv", ["num_gpus", "message_size", "latency"])
    own = rows[(rows["num_gpus"] == tensor_parallel) & rows["backend"].str.endswith("_graph")]
    if own.empty:
        raise ArtifactError(str(folder), f"no all-reduce of {tensor_parallel} GPUs inside a CUDA graph")
    (elements,), us = to_grid(
        [own["message_size"].to_numpy(dtype=float)], own["latency"].to_numpy(dtype=float) * _MS_TO_US
    )
    inside = elements / model.hidden_size
    calls = 2 * model.num_hidden_layers
    ring = term("tokens", "allreduce", [inside], rising(us), calls, "custom all-reduce inside a CUDA graph")
    return ring.model_copy(update={"is_communication": True})
