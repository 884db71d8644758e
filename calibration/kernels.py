"""The operations of a serving iteration, with random weights in a model's own shapes, on any device.

One object holds one GPU's share of a decoder as tensor parallelism splits it. Each of its operators is what one
row of a raw file times; `forward` is all of them in the order of a real iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of torch's documentation uses
from torch import Tensor

from calibration.attention import Backend, Batch
from sim.errors import ArtifactError
from sim.model import Model

_ROPE_BASE = 500_000.0
"""Of Llama 3; it changes which numbers are multiplied, not how many."""


@dataclass(frozen=True)
class Shard:
    """Sizes of one GPU's share of a decoder, and of the whole where they are not split."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Of the MLP, or of each expert."""
    vocab_size: int
    num_layers: int
    num_experts: int = 0
    """0: an MLP."""
    num_experts_per_tok: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def of(cls, model: Model, tensor_parallel: int, num_layers: int | None = None) -> Shard:
        """One GPU's share, with all layers or the first `num_layers`.

        Raises ArtifactError for what has no kernels here, ScenarioError for a model that cannot be split so.
        """
        model.check_tensor_parallel(tensor_parallel, place="--tp")
        experts = model.experts
        unknown = {
            "multi-head latent attention": model.latent is not None,
            "quantized weights": model.quantization is not None,
            "a sliding window": model.sliding_window is not None,
            "an MLP of two matrices": not model.gated_mlp,
            "layers without experts beside others with them": experts is not None
            and experts.num_layers != model.num_hidden_layers,
            "shared experts": experts is not None and experts.shared_intermediate_size > 0,
        }
        found = [feature for feature, has in unknown.items() if has]
        if found:
            raise ArtifactError(
                "--model",
                f"{model.name} has {', '.join(found)}",
                valid="timed are decoders like Llama, Mistral, Qwen and Mixtral with 16-bit weights",
            )
        return cls(
            hidden_size=model.hidden_size,
            num_heads=model.num_attention_heads // tensor_parallel,
            num_kv_heads=model.kv_heads_per_gpu(tensor_parallel),
            head_dim=model.head_dim,
            intermediate_size=-(
                -(experts.intermediate_size if experts else model.intermediate_size) // tensor_parallel
            ),
            vocab_size=-(-model.vocab_size // tensor_parallel),
            num_layers=num_layers or model.num_hidden_layers,
            num_experts=experts.num_experts if experts else 0,
            num_experts_per_tok=experts.num_experts_per_tok if experts else 0,
            qkv_bias=model.qkv_bias,
            qk_norm=model.qk_norm,
        )

    @property
    def layer_elements(self) -> int:
        """Weights of one layer, vectors left out."""
        mlp = 3 * self.hidden_size * self.intermediate_size
        inner = self.num_heads * self.head_dim
        attention = self.hidden_size * (2 * inner + 2 * self.num_kv_heads * self.head_dim)
        return attention + mlp * max(self.num_experts, 1) + self.num_experts * self.hidden_size

    @property
    def other_elements(self) -> int:
        """Embeddings and LM head."""
        return 2 * self.hidden_size * self.vocab_size

    @property
    def kv_elements(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim


class KVCache:
    """Pages for keys and values, one pair of pools a layer, filled with random numbers."""

    def __init__(self, shard: Shard, num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (num_pages, page_size, shard.num_kv_heads, shard.head_dim)
        self.num_pages, self.page_size = num_pages, page_size
        self.keys = [torch.empty(size, device=device, dtype=dtype).normal_() for _ in range(shard.num_layers)]
        self.values = [torch.empty(size, device=device, dtype=dtype).normal_() for _ in range(shard.num_layers)]

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put the keys and values (T, KV heads, head_dim) of T tokens where `slots` say."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value)


class Decoder:
    """Random weights in the shapes of a shard, and the operators over them.

    T rows of activations are (T, hidden_size). `layer` picks the weights, so that calling one operator for layer
    after layer reads them from memory as an iteration does.
    """

    def __init__(self, shard: Shard, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.shard, self.device, self.dtype = shard, device, dtype
        generator = torch.Generator(device).manual_seed(seed)

        def weight(*size: int) -> Tensor:
            scale = size[-1] ** -0.5
            return torch.empty(size, device=device, dtype=dtype).normal_(0.0, scale, generator=generator)

        def weights(*size: int) -> list[Tensor]:
            return [weight(*size) for _ in range(shard.num_layers)]

        hidden, intermediate = shard.hidden_size, shard.intermediate_size
        inner, self._kv_size = shard.num_heads * shard.head_dim, shard.num_kv_heads * shard.head_dim
        experts = (shard.num_experts,) if shard.num_experts else ()
        self._inner = inner
        self._embedding = weight(shard.vocab_size, hidden)
        self._qkv = weights(inner + 2 * self._kv_size, hidden)
        self._qkv_bias = weights(inner + 2 * self._kv_size) if shard.qkv_bias else [None] * shard.num_layers
        self._o = weights(hidden, inner)
        self._router = weights(shard.num_experts, hidden) if experts else []
        self._gate_up = weights(*experts, 2 * intermediate, hidden)
        self._down = weights(*experts, hidden, intermediate)
        self._lm_head = weight(shard.vocab_size, hidden)
        self._ones = torch.ones(hidden, device=device, dtype=dtype)
        half = torch.arange(0, shard.head_dim, 2, device=device, dtype=torch.float32)
        self._frequencies = _ROPE_BASE ** (-half / shard.head_dim)

    def norm(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add to the residual stream and take its RMS norm; returns both."""
        residual = residual + hidden
        return F.rms_norm(residual, (self.shard.hidden_size,), self._ones), residual

    def qkv_proj(self, layer: int, hidden: Tensor) -> Tensor:
        """Queries, keys and values of T rows, side by side."""
        return F.linear(hidden, self._qkv[layer], self._qkv_bias[layer])

    def rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of T positions: once an iteration, for all layers."""
        angles = positions[:, None].float() * self._frequencies
        return angles.cos()[:, None].to(self.dtype), angles.sin()[:, None].to(self.dtype)

    def rotary(
        self, layer: int, qkv: Tensor, rotations: tuple[Tensor, Tensor], cache: KVCache, slots: Tensor
    ) -> Tensor:
        """Rotate queries and keys by their positions and put keys and values into the cache; returns the queries."""
        head_dim = self.shard.head_dim
        query, key, value = (
            part.unflatten(-1, (-1, head_dim))
            for part in qkv.split([self._inner, self._kv_size, self._kv_size], dim=-1)
        )
        if self.shard.qk_norm:
            query, key = F.rms_norm(query, (head_dim,)), F.rms_norm(key, (head_dim,))
        cache.store(layer, slots, _rotate(key, rotations), value)
        return _rotate(query, rotations)

    def o_proj(self, layer: int, attended: Tensor) -> Tensor:
        """From T rows of all heads back to the hidden size."""
        return F.linear(attended, self._o[layer])

    def gate_up_proj(self, layer: int, hidden: Tensor) -> Tensor:
        """The first half of the MLP, with its activation."""
        gate, up = F.linear(hidden, self._gate_up[layer]).chunk(2, dim=-1)
        return F.silu(gate) * up

    def down_proj(self, layer: int, inner: Tensor) -> Tensor:
        """The second half of the MLP."""
        return F.linear(inner, self._down[layer])

    def moe(self, layer: int, hidden: Tensor) -> Tensor:
        """Route T rows to their experts, sorted so that each expert is one group of a grouped product."""
        shard = self.shard
        scores, chosen = F.linear(hidden, self._router[layer]).topk(shard.num_experts_per_tok, dim=-1)
        order = chosen.flatten().argsort()
        ends = F.one_hot(chosen.flatten(), shard.num_experts).sum(0).cumsum(0).to(torch.int32)
        rows = order // shard.num_experts_per_tok
        gate, up = F.grouped_mm(hidden[rows], self._gate_up[layer].transpose(1, 2), offs=ends).chunk(2, dim=-1)
        outputs = F.grouped_mm(F.silu(gate) * up, self._down[layer].transpose(1, 2), offs=ends)
        shares = scores.softmax(dim=-1).flatten()[order]
        return torch.zeros_like(hidden).index_add_(0, rows, outputs * shares[:, None])

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits of S rows."""
        return F.linear(hidden, self._lm_head)

    def sampling(self, logits: Tensor) -> Tensor:
        """Draw a token for each of S rows (softmax and exponential noise, as vLLM does: without a synchronization)."""
        probabilities = logits.float().softmax(dim=-1)
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)

    def forward(self, batch: Batch, cache: KVCache, backend: Backend) -> Tensor:
        """One iteration: a token for each of the S sampled rows. Fills the cache with the batch's own tokens."""
        shard = self.shard
        backend.prepare(batch, shard.num_heads, shard.num_kv_heads, shard.head_dim, self.dtype)
        rotations = self.rotations(batch.positions)
        hidden, residual = F.embedding(batch.token_ids, self._embedding), self._ones.new_zeros(())
        for layer in range(shard.num_layers):
            hidden, residual = self.norm(hidden, residual)
            query = self.rotary(layer, self.qkv_proj(layer, hidden), rotations, cache, batch.slots)
            attended = backend.attend(query, cache.keys[layer], cache.values[layer], batch)
            hidden, residual = self.norm(self.o_proj(layer, attended.flatten(1)), residual)
            if shard.num_experts:
                hidden = self.moe(layer, hidden)
            else:
                hidden = self.down_proj(layer, self.gate_up_proj(layer, hidden))
        hidden, _ = self.norm(hidden, residual)
        return self.sampling(self.lm_head(hidden[batch.sampled]))


def _rotate(heads: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = rotations
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
