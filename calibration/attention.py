"""Attention over a paged KV cache, by whichever library's kernel is there: torch's own, or one that engines use.

A batch is a list of rows, each a piece of one request: how many tokens it computes, how many are cached before
them, and the pages that hold its keys and values. Decodes are rows of one token.
"""

from __future__ import annotations

import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of torch's documentation uses

from sim.errors import ArtifactError


class Row(NamedTuple):
    """One request's part of a batch."""

    token_ids: Sequence[int]
    """The tokens to compute."""
    context: int
    """Tokens cached before them."""
    pages: Sequence[int]
    """Pages of the cache for both, in order."""
    is_sampled: bool = True
    """Whether its last token's logits are needed."""


class Batch:
    """The tensors of one iteration. All live on `device`; N rows, T tokens, S sampled rows."""

    def __init__(self, rows: Sequence[Row], page_size: int, device: torch.device) -> None:
        lengths = np.array([len(row.token_ids) for row in rows])
        contexts = np.array([row.context for row in rows])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        of_token = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(starts[-1]) - starts[of_token] + contexts[of_token]
        pages = np.zeros((len(rows), max(len(row.pages) for row in rows)), dtype=np.int64)
        for i, row in enumerate(rows):
            pages[i, : len(row.pages)] = row.pages
        slots = pages[of_token, positions // page_size] * page_size + positions % page_size
        self.lengths = lengths.tolist()
        self.totals = (contexts + lengths).tolist()
        """Keys that each row's last token attends to."""
        self.num_tokens = len(positions)

        def put(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values), dtype=dtype).to(device, non_blocking=True)

        self.token_ids = put([token for row in rows for token in row.token_ids], torch.int64)
        self.positions = put(positions, torch.int64)
        self.slots = put(slots, torch.int64)
        """Where in the flattened cache each token's key and value go."""
        self.starts = put(starts, torch.int32)
        self.key_lengths = put(self.totals, torch.int32)
        self.pages = put(pages, torch.int32)
        self.sampled = put(
            [start - 1 for start, row in zip(starts[1:], rows, strict=True) if row.is_sampled], torch.int64
        )
        """The tokens whose logits are needed."""


class Backend(ABC):
    """One library's attention kernel. `name` goes into the raw file."""

    name: ClassVar[str]
    page_size: ClassVar[int]
    can_capture: ClassVar[bool]
    """Whether a CUDA graph of one batch serves all batches of its size."""

    def prepare(  # noqa: B027  # most libraries need nothing
        self, batch: Batch, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        """What the library does once for an iteration, before its layers."""

    @abstractmethod
    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Causal attention of one layer.

        `query` is (T, heads, head_dim), `keys` and `values` are (pages, page_size, KV heads, head_dim) and hold the
        batch's own tokens already. Returns (T, heads, head_dim).
        """


class TorchSdpa(Backend):
    """Gather a row's pages, then `scaled_dot_product_attention`, row by row: runs anywhere."""

    name = "torch gather + scaled_dot_product_attention"
    page_size = 16
    can_capture = False

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        outputs = []
        for i, part in enumerate(query.split(batch.lengths)):
            length, total = batch.lengths[i], batch.totals[i]
            pages = batch.pages[i, : -(-total // self.page_size)]
            own_keys, own_values = (
                cache[pages].flatten(0, 1)[:total].transpose(0, 1)[None] for cache in (keys, values)
            )
            mask = None
            if 1 < length < total:
                mask = torch.ones(length, total, dtype=torch.bool, device=query.device).tril(total - length)
            output = F.scaled_dot_product_attention(
                part.transpose(0, 1)[None],
                own_keys,
                own_values,
                attn_mask=mask,
                is_causal=1 < length == total,
                enable_gqa=True,
            )
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)


class TorchVarlen(Backend):
    """The FlashAttention kernels that torch >= 2.11 carries, over pages."""

    name = "torch varlen_attn (FlashAttention)"
    page_size = 256  # FlashAttention 2 reads pages of multiples of 256 tokens
    can_capture = True

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            query,
            keys,
            values,
            batch.starts,
            None,
            max(batch.lengths),
            batch.pages.shape[1] * self.page_size,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=batch.key_lengths,
            block_table=batch.pages,
        )


class VllmFlashAttention(Backend):
    """vLLM's build of FlashAttention, as its own `flash_attn` backend calls it."""

    name = "vllm flash_attn_varlen_func"
    page_size = 16
    can_capture = True

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            cu_seqlens_q=batch.starts,
            max_seqlen_q=max(batch.lengths),
            seqused_k=batch.key_lengths,
            max_seqlen_k=batch.pages.shape[1] * self.page_size,
            causal=True,
            block_table=batch.pages,
        )


class FlashInfer(Backend):
    """FlashInfer's paged kernels, planned anew for every iteration."""

    name = "flashinfer"
    page_size = 16
    can_capture = False  # its plan is made for one batch

    def __init__(self) -> None:
        self._wrapper: Any = None
        self._workspace: torch.Tensor | None = None

    def prepare(self, batch: Batch, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        import flashinfer

        if self._wrapper is None:
            self._workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device=batch.pages.device)
            self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        num_pages = [-(-total // self.page_size) for total in batch.totals]
        used = torch.cat([batch.pages[i, :number] for i, number in enumerate(num_pages)])
        self._wrapper.plan(
            batch.starts,
            torch.tensor(np.concatenate([[0], np.cumsum(num_pages)]), dtype=torch.int32, device=used.device),
            used,
            (batch.key_lengths - 1) % self.page_size + 1,
            num_heads,
            num_kv_heads,
            head_dim,
            self.page_size,
            causal=True,
            q_data_type=dtype,
        )

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._wrapper.run(query, (keys, values))


def choose_backend(device: torch.device, name: str = "auto") -> Backend:
    """The backend called `name`, or the one nearest to a serving engine that is importable here.

    Raises ArtifactError for one that is not.
    """
    on_gpu = device.type == "cuda"
    available: dict[str, type[Backend]] = {
        **({"vllm": VllmFlashAttention} if on_gpu and importlib.util.find_spec("vllm") else {}),
        **({"flashinfer": FlashInfer} if on_gpu and importlib.util.find_spec("flashinfer") else {}),
        **({"varlen": TorchVarlen} if on_gpu and _has_paged_varlen() else {}),
        "sdpa": TorchSdpa,
    }
    if name == "auto":
        return next(iter(available.values()))()
    if name not in available:
        raise ArtifactError(
            "--attention", f"{name!r} cannot run here", valid=f"importable for {device.type}: {', '.join(available)}"
        )
    return available[name]()


def _has_paged_varlen() -> bool:
    """Whether this torch's kernel reads pages: those before 2.11 either have none or want keys side by side."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "block_table" in inspect.signature(varlen_attn).parameters
