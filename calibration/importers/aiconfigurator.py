"""AIConfigurator tables (NVIDIA, Apache-2.0): operators timed one by one in vLLM's kernels, any shape.

A model's products are looked up by their own (n, k), interpolated between the shapes that were timed; its
attention by its heads per GPU. What the tables do not hold, and how it is filled:

- Products were timed in 16 bits and in fp8, the quantization of their inputs included; KV is 16 bits here.
- Times are ms per call. A prompt's attention was timed without context only: a chunk on a context takes its
  part, by (query, key) pairs, of the prompt that ends where it ends.
- Norms, rotary embedding, activation and KV writes were not timed; they move their bytes at the part of the
  memory bandwidth, and take the constant each, that the system file states.
- The custom all-reduce has two rows a size, inside a CUDA graph and outside: that of the graph is taken.
  `message_size` counts elements: as bytes it would be half of what the links carry.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from calibration.cuda_graphs import VLLM_0_11_0
from calibration.grids import NOT_TIMED, Floats, holdout_error, rising, straight_on, term, to_grid
from calibration.host import WORK_ON_THE_HOST
from calibration.importers.aiconfigurator_files import Files, installed
from calibration.models import load_plain_model, plain_name
from calibration.plausible import check_plausible
from sim.cost.artifact import Artifact, Shape, Term
from sim.errors import ArtifactError
from sim.gpu import gpus
from sim.model import Model

if TYPE_CHECKING:
    import pandas as pd

_MS_TO_US = 1e3
_LARGEST_ROWS = 16384
_PLAIN, _FP8 = "bfloat16", "fp8"
"""What the tables call the types of products."""


def import_tables(folder: Path | None, model: str, gpu: str = "h100_sxm", tensor_parallel: int = 1) -> Artifact:
    """The artifact of one model on one kind of GPU. Raises ArtifactError for tables that are missing or no times.

    `folder` has CSV tables, or is the `systems` folder of the package; None: that of the installed package.
    `gpu` is the name of the GPU there.
    """
    files = installed(gpu) if folder is None else Files(folder, gpu)
    described = load_plain_model(model, may_be_fp8=True)
    described.check_tensor_parallel(tensor_parallel, place="--tp")
    dtype = _PLAIN if described.quantization is None else _FP8
    gemm = files.read("gemm", ["gemm_dtype", "m", "n", "k"])
    terms = [*_products(gemm, described, dtype, tensor_parallel, str(files.folder))]
    terms += [_elementwise(files, described, tensor_parallel)]
    terms += _attention(files, described, tensor_parallel)
    if tensor_parallel > 1:
        terms.append(_allreduce(files, described, tensor_parallel))
    attention = [own for own in terms if own.kind.endswith("attention")]
    artifact = Artifact(
        hardware=gpu,
        gpu=_known(gpu),
        model=described.name,
        shape=Shape.of(described),
        dtype=dtype,
        kv_dtype_bytes=2.0,
        tensor_parallel=tensor_parallel,
        measured_on="at an unstated date",
        versions={"vllm": files.vllm_version()},
        source=files.source,
        licence="Apache-2.0",
        cuda_graph_sizes=VLLM_0_11_0,
        terms=terms,
        missing=["sampling", "gaps between kernels", WORK_ON_THE_HOST],
        holdout_error={
            own.name: round(
                holdout_error(np.array(own.points[-1]), np.reshape(own.us, [len(axis) for axis in own.points])), 5
            )
            for own in attention
        },
    )
    check_plausible(artifact, described, str(files.folder))
    return artifact


def _known(gpu: str) -> str | None:
    """The bundled GPU that is meant: one of the two names begins with the other."""
    name = plain_name(gpu)
    own = {known.name: plain_name(known.name) for known in gpus()}
    longer = [key for key, plain in own.items() if plain.startswith(name)]
    shorter = sorted((key for key, plain in own.items() if name.startswith(plain)), key=len, reverse=True)
    return next(iter(longer + shorter), None)


def _products(rows: pd.DataFrame, model: Model, dtype: str, tensor_parallel: int, place: str) -> list[Term]:
    """The matrix products of a layer in `dtype`, and the LM head, which fp8 checkpoints leave in 16 bits."""
    tp, hidden = tensor_parallel, model.hidden_size
    heads, kv_heads = model.num_attention_heads // tp, model.kv_heads_per_gpu(tp)
    intermediate = -(-model.intermediate_size // tp)
    shapes = {
        "qkv_proj": ((heads + 2 * kv_heads) * model.head_dim, hidden),
        "o_proj": (hidden, heads * model.head_dim),
        "gate_up_proj": (model.num_mlp_inputs * intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    layers, (axes, table) = model.num_hidden_layers, _gemm(rows, dtype, place)
    terms = [
        term("tokens", name, axes[:1], rising(_at_shape(axes, table, *shape)), layers, _note(axes, *shape))
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


class _Memory(NamedTuple):
    """What the system file states of a GPU's memory."""

    bytes_per_us: float
    part: float
    """Of the bandwidth, what kernels are seen to reach."""
    constant_us: float
    """Of every kernel."""


def _memory(files: Files) -> _Memory:
    path, stated = files.system()
    try:
        gpu = stated["gpu"]
        found = _Memory(
            bytes_per_us=float(gpu["mem_bw"]) / 1e6,
            part=float(gpu["mem_bw_empirical_scaling_factor"]),
            constant_us=float(gpu["mem_empirical_constant_latency"]) * 1e6,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            str(path), f"does not state the memory bandwidth and its corrections ({error!r})"
        ) from error
    if not (found.bytes_per_us > 0 and 0 < found.part <= 1 and found.constant_us >= 0):
        raise ArtifactError(
            str(path),
            f"states a memory bandwidth of {found.bytes_per_us:g} B/us, a part of {found.part:g} "
            f"and {found.constant_us:g} us",
            valid="expected a bandwidth above zero, a part of it and a constant",
        )
    return found


def _elementwise(files: Files, model: Model, tensor_parallel: int) -> Term:
    """Two norms with their residuals, rotary embedding, the KV write and the activation of every layer."""
    memory = _memory(files)
    rate, constant_us = memory.bytes_per_us * memory.part, memory.constant_us
    heads, kv_heads = model.num_attention_heads // tensor_parallel, model.kv_heads_per_gpu(tensor_parallel)
    intermediate = -(-model.intermediate_size // tensor_parallel)
    elements = 2 * 4 * model.hidden_size + 2 * (heads + kv_heads) * model.head_dim
    elements += 4 * kv_heads * model.head_dim + (model.num_mlp_inputs + 1) * intermediate
    num_tokens = np.array([1.0, float(_LARGEST_ROWS)])
    us = 5 * constant_us + num_tokens * elements * model.dtype_bytes / rate
    note = f"{NOT_TIMED}: five kernels of {constant_us:g} us and their bytes at {rate / 1e6:.2f} TB/s"
    return term("tokens", "elementwise", [num_tokens], us, model.num_hidden_layers, note)


def _attention(files: Files, model: Model, tensor_parallel: int) -> list[Term]:
    kinds = ("context", "generation")
    columns = ["batch_size", "isl", "step", "num_heads", "num_key_value_heads", "kv_cache_dtype"]
    heads, kv_heads = model.num_attention_heads // tensor_parallel, model.kv_heads_per_gpu(tensor_parallel)
    found: dict[str, pd.DataFrame] = {}
    for kind in kinds:
        rows = files.read(f"{kind}_attention", columns, model.head_dim)
        own = (rows["num_heads"] == heads) & (rows["num_key_value_heads"] == kv_heads)
        found[kind] = rows[own & (rows["kv_cache_dtype"] == "bfloat16")]
        if found[kind].empty:
            timed = sorted(set(zip(rows["num_heads"], rows["num_key_value_heads"], strict=True)))
            raise ArtifactError(
                str(files.folder),
                f"no {kind} attention of {heads} heads and {kv_heads} KV heads",
                valid=f"timed: {timed}",
            )
    layers = model.num_hidden_layers
    token_us = 2 * kv_heads * model.head_dim * model.dtype_bytes / _memory(files).bytes_per_us
    return [_decode(found["generation"], layers, token_us), _prompt(found["context"], layers)]


def _decode(rows: pd.DataFrame, layers: int, token_us: float) -> Term:
    """Batches of decodes; large ones were timed at short contexts only, and go on straight from there.

    `token_us` is what reading a token's KV takes at the full bandwidth: beyond what was timed, none takes less.
    """
    axes, table = to_grid(
        [rows["batch_size"].to_numpy(dtype=float), rows["step"].to_numpy(dtype=float) + 1],
        rows["latency_ms"].to_numpy(dtype=float) * _MS_TO_US,
    )
    table = straight_on(axes[1], table, axes[0] * token_us)
    note = "large batches at long contexts were not timed: straight on from the contexts that were"
    return term("decode_attention", "decode_attention", axes, rising(table), layers, note)


def _prompt(rows: pd.DataFrame, layers: int) -> Term:
    """One prompt by its tokens and its context."""
    alone = rows[rows["batch_size"] == 1]
    if alone["isl"].nunique() < 2:
        raise ArtifactError(
            "context_attention", "fewer than two prompts were timed alone", valid="expected two or more"
        )
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


def _allreduce(files: Files, model: Model, tensor_parallel: int) -> Term:
    rows = files.read("custom_allreduce", ["num_gpus", "message_size", "backend"])
    own = rows[(rows["num_gpus"] == tensor_parallel) & rows["backend"].str.endswith("_graph")]
    if own.empty:
        raise ArtifactError(str(files.folder), f"no all-reduce of {tensor_parallel} GPUs inside a CUDA graph")
    (elements,), us = to_grid(
        [own["message_size"].to_numpy(dtype=float)], own["latency_ms"].to_numpy(dtype=float) * _MS_TO_US
    )
    inside = elements / model.hidden_size
    calls = 2 * model.num_hidden_layers
    ring = term("tokens", "allreduce", [inside], rising(us), calls, "custom all-reduce inside a CUDA graph")
    return ring.model_copy(update={"is_communication": True})
