"""How many KV blocks a GPU has room for, term by term, and how many requests those hold.

The rule is vLLM's: `gpu_memory_utilization` of the GPU's memory, minus the weights, minus what a forward
pass over `max_num_batched_tokens` tokens and `max_num_seqs` sampled rows needs at its peak, is KV. vLLM
measures that peak at start-up; here it is a formula with one constant for each thing that no shape
tells, checked against two public records (a 3090 and a 4090 with Llama-3.1-8B; see the constants). What
experts and latent attention need at their peak follows vLLM's sources, and no record was at hand.

Every block holds its tokens for all layers until the request ends. Where some layers attend to a window
only, that is vLLM with `--disable-hybrid-kv-cache-manager`; where all do, vLLM frees what falls out of the
window, and contexts longer than the window are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sim.errors import ScenarioError
from sim.gpu import Gpu
from sim.kv.base import blocks_for
from sim.model import Model
from sim.policies.base import EngineOptions

GIB = 2**30

CONTEXT_BYTES = round(0.3 * GIB)
"""CUDA context and libraries. What is left of vLLM's log for Llama-3.1-8B on a 3090 (vllm#10517: 3.81 GiB of
KV with 20,000 tokens in the pass) after the other terms, at the default utilization."""

CUDA_GRAPH_BYTES = round(0.45 * GIB)
"""CUDA graphs, which vLLM counts since 0.19. What is left of a recorded vLLM 0.19 run with Llama-3.1-8B on
a 4090 (LLMServingSim, casys-kaist, MIT: 2,588 blocks of 16) after the other terms."""

NCCL_PAIR_BYTES = 342 * 2**20
"""NCCL's buffers between two GPUs (AIConfigurator systems/h100_sxm.yaml, as the next)."""

NCCL_MANY_BYTES = 392 * 2**20
"""NCCL's buffers between more than two GPUs."""


MAX_EXPANDED_TOKENS = 64 * 1024
"""Tokens in cache whose latents a pass expands at once (vLLM 0.11, `MLACommonMetadataBuilder`)."""


MAX_BLOCKS = 10**7
"""More blocks than the memory of any GPU holds, at 16 tokens each; every one of them costs memory here."""


class KVSource(StrEnum):
    """What decided the size of the KV pool."""

    DERIVED = "derived"
    NUM_GPU_BLOCKS = "num_gpu_blocks"
    KV_CACHE_MEMORY_BYTES = "kv_cache_memory_bytes"


@dataclass(frozen=True)
class KVMemory:
    """The KV pool of one replica and how it came about. Bytes are per GPU."""

    lines: tuple[tuple[str, int], ...]
    """The derivation: `(label, bytes)`, what is taken away is negative; the sum is `available_bytes`."""
    source: KVSource
    kv_bytes: int
    """Memory of the pool: its whole blocks."""
    kv_bytes_per_token: int
    block_size: int
    num_gpu_blocks: int
    """Counts vLLM's null block, as vLLM's own figure does."""
    max_model_len: int

    @property
    def available_bytes(self) -> int:
        """What the derivation leaves for KV; negative when the model does not fit."""
        return sum(num_bytes for _, num_bytes in self.lines)

    @property
    def block_bytes(self) -> int:
        """One block on one GPU."""
        return self.block_size * self.kv_bytes_per_token

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` tokens that the pool holds: what vLLM prints as maximum concurrency."""
        return self.num_gpu_blocks / blocks_for(self.max_model_len, self.block_size)


def max_concurrent(num_blocks: int, num_tokens: int, block_size: int) -> int:
    """Requests of `num_tokens` tokens each that `num_blocks` blocks hold at once."""
    return num_blocks // blocks_for(num_tokens, block_size)


def kv_dtype_bytes(model: Model, kv_cache_dtype: str) -> float:
    """Bytes per element of KV for the engine option `kv_cache_dtype`."""
    if kv_cache_dtype == "auto":
        return float(model.dtype_bytes)
    return 1.0 if kv_cache_dtype.startswith("fp8") else 2.0


def derive_kv_memory(
    model: Model,
    gpu: Gpu,
    tensor_parallel: int,
    options: EngineOptions,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    place: str = "engine",
) -> KVMemory:
    """The KV pool that `options` ask for, or that the GPU's memory leaves. Pure.

    `max_num_batched_tokens` and `max_num_seqs` are the largest pass of the policy; `place` is the key of
    the engine's options in messages. Raises ScenarioError when the model does not fit the GPU (by how
    much), when the pool is smaller than one request of `max_model_len` (the largest that fits), when it
    has more than `MAX_BLOCKS` blocks, or `max_model_len` exceeds a window that all layers attend to.
    A given `num_gpu_blocks` is taken as it is: the derivation is shown beside it, and refuses nothing.
    """
    model.check_tensor_parallel(tensor_parallel)
    max_model_len = _max_model_len(model, options, place)
    bytes_per_token = model.kv_bytes_per_token(kv_dtype_bytes(model, options.kv_cache_dtype), tensor_parallel)
    block_bytes = bytes_per_token * options.block_size
    lines = _lines(model, gpu, tensor_parallel, options, max_num_batched_tokens, max_num_seqs, max_model_len)
    available = sum(num_bytes for _, num_bytes in lines)
    if options.num_gpu_blocks != "auto":
        if options.kv_cache_memory_bytes is not None:
            raise ScenarioError(
                f"{place}.kv_cache_memory_bytes",
                f"given together with num_gpu_blocks {options.num_gpu_blocks}",
                remedy="Give one of them.",
            )
        source, num_blocks = KVSource.NUM_GPU_BLOCKS, options.num_gpu_blocks
    elif options.kv_cache_memory_bytes is not None:
        source, num_blocks = KVSource.KV_CACHE_MEMORY_BYTES, options.kv_cache_memory_bytes // block_bytes
    else:
        if available <= 0:
            raise _does_not_fit(model, gpu, tensor_parallel, -available, lines)
        source, num_blocks = KVSource.DERIVED, available // block_bytes
    if num_blocks > MAX_BLOCKS:
        raise ScenarioError(
            f"{place}.num_gpu_blocks",
            f"the pool would have {num_blocks:,} blocks",
            valid=f"at most {MAX_BLOCKS:,}",
            remedy="Raise block_size, or give the engine less memory.",
        )
    memory = KVMemory(
        lines=lines,
        source=source,
        kv_bytes=num_blocks * block_bytes,
        kv_bytes_per_token=bytes_per_token,
        block_size=options.block_size,
        num_gpu_blocks=num_blocks,
        max_model_len=max_model_len,
    )
    if source != KVSource.NUM_GPU_BLOCKS:
        _check_one_request_fits(memory, place)
    return memory


def activation_bytes_per_token(model: Model, tensor_parallel: int) -> int:
    """Peak activations of a forward pass per token and GPU: inside the MLP, where most tensors live at once.

    Three hidden states (residual, normalised input and the block's input), the output of the products
    that read the hidden state, and the activation of it. For Llama-3.1-8B: 110,592 bytes; vLLM's log on
    a 3090 (vllm#10517: 0.92 GiB less KV for 9,000 more tokens in the pass) gives 109,760 +- 1 %.
    Experts need two workspaces of one row per token and expert, and an output (vLLM 0.11,
    `TritonExperts.workspace_shapes`).
    """
    hidden, experts = model.hidden_size, model.experts
    inside = 0
    if experts is None or experts.num_layers < model.num_hidden_layers:
        inside = (model.num_mlp_inputs + 1) * -(-model.intermediate_size // tensor_parallel)
    if experts is not None:
        intermediate = -(-experts.intermediate_size // tensor_parallel)
        workspaces = max(intermediate, hidden) + max(2 * intermediate, hidden)
        inside = max(inside, experts.num_experts_per_tok * workspaces + hidden)
    return (3 * hidden + inside) * model.dtype_bytes


def expansion_bytes(model: Model, tensor_parallel: int, max_model_len: int, max_num_seqs: int, block_size: int) -> int:
    """What latent attention reserves per GPU to expand tokens in cache into keys and values; else 0.

    The gathered latents and their expansion (vLLM 0.11, `MLACommonMetadataBuilder`, `MLACommonImpl.forward`).
    """
    if model.latent is None:
        return 0
    latent, heads = model.latent, -(-model.num_attention_heads // tensor_parallel)
    num_tokens = min(max(8 * max_model_len, 4 * max_num_seqs * block_size), MAX_EXPANDED_TOKENS)
    elements = latent.cached_elements + heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    return num_tokens * elements * model.dtype_bytes


def _lines(
    model: Model,
    gpu: Gpu,
    tensor_parallel: int,
    options: EngineOptions,
    num_tokens: int,
    num_rows: int,
    max_model_len: int,
) -> tuple[tuple[str, int], ...]:
    utilization = options.gpu_memory_utilization
    usable = int(gpu.memory_bytes * utilization)
    # the logits in the model's type and their float32 copy, gathered from all GPUs
    logits = num_rows * model.vocab_size * (model.dtype_bytes + 4)
    lines = [
        (f"memory of one {gpu.name}", gpu.memory_bytes),
        (f"left to others (gpu_memory_utilization {utilization:g})", usable - gpu.memory_bytes),
        (f"weights of {model.name}" + _share(tensor_parallel), -model.weight_bytes(tensor_parallel)),
        (f"activations of {num_tokens} tokens", -num_tokens * activation_bytes_per_token(model, tensor_parallel)),
        (f"logits of {num_rows} rows", -logits),
        ("CUDA context and libraries", -CONTEXT_BYTES),
        ("CUDA graphs", -CUDA_GRAPH_BYTES),
    ]
    expansion = expansion_bytes(model, tensor_parallel, max_model_len, num_rows, options.block_size)
    if expansion:
        lines.append(("expansion of latents in cache", -expansion))
    if tensor_parallel > 1:
        lines.append(("NCCL buffers", -(NCCL_PAIR_BYTES if tensor_parallel == 2 else NCCL_MANY_BYTES)))
    return tuple(lines)


def _max_model_len(model: Model, options: EngineOptions, place: str) -> int:
    longest = model.max_position_embeddings if options.max_model_len is None else options.max_model_len
    if longest > model.max_position_embeddings:
        raise ScenarioError(
            f"{place}.max_model_len",
            f"{longest} is more than {model.name} supports",
            valid=f"at most {model.max_position_embeddings}",
        )
    window = model.sliding_window
    if window is not None and longest > window and model.num_sliding_layers == model.num_hidden_layers:
        raise ScenarioError(
            f"{place}.max_model_len",
            f"{longest} is more than the window that every layer of {model.name} attends to, and freeing the KV "
            "behind a window is not modelled",
            valid=f"at most {window}",
        )
    return longest


def _does_not_fit(
    model: Model, gpu: Gpu, tensor_parallel: int, excess_bytes: int, lines: tuple[tuple[str, int], ...]
) -> ScenarioError:
    usable = lines[0][1] + lines[1][1]
    weights = model.weight_bytes(tensor_parallel)
    return ScenarioError(
        "hardware.gpu",
        f"{model.name}{_share(tensor_parallel)} does not fit {gpu.name}: weights {_gib(weights)}, activations and "
        f"overhead {_gib(usable + excess_bytes - weights)}, usable {_gib(usable)}, so {_gib(excess_bytes)} too much "
        "before any KV",
        remedy="Raise tensor_parallel or gpu_memory_utilization, lower max_num_batched_tokens, or take a larger GPU.",
    )


def _check_one_request_fits(memory: KVMemory, place: str) -> None:
    if memory.max_concurrency >= 1:
        return
    largest = memory.num_gpu_blocks * memory.block_size
    needed = blocks_for(memory.max_model_len, memory.block_size) * memory.block_bytes
    raise ScenarioError(
        f"{place}.max_model_len",
        f"{memory.max_model_len} tokens need {_gib(needed)} of KV per GPU, there is {_gib(memory.kv_bytes)}",
        valid=f"the largest max_model_len that fits is {largest}" if largest else "not even one block fits",
        remedy="Lower max_model_len, or raise gpu_memory_utilization or tensor_parallel.",
    )


def _share(tensor_parallel: int) -> str:
    return f" / {tensor_parallel}" if tensor_parallel > 1 else ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
