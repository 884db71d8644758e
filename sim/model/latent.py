"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), as vLLM computes it.

The cache holds one latent vector and one rotary key per token and layer, the same for all heads, so every
GPU keeps all of it. Prefill chunks expand the latents of all tokens that they attend to, those in cache
included, into keys and values of every head. Decodes instead fold the expansion into their queries and
outputs ("absorbed") and attend to the latents themselves: more arithmetic, far fewer bytes
(vllm/model_executor/layers/attention/mla_attention.py explains both).
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.model.products import Product, Rows


@dataclass(frozen=True)
class LatentAttention:
    """Shapes of multi-head latent attention. Field names are those of HF `config.json`."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    """Rank of the queries' own compression; none in DeepSeek-V2-Lite."""

    @property
    def qk_head_dim(self) -> int:
        """Of queries and expanded keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_elements(self) -> int:
        """Per token and layer, however many heads and GPUs there are."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expanded_elements(self) -> int:
        """Keys and values of one token, layer and head, when expanded."""
        return self.qk_head_dim + self.v_head_dim

    @property
    def norm_parameters(self) -> int:
        """Norms of the compressed queries and of the latents, per layer."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank

    @property
    def prefill_pair_flops(self) -> int:
        """Per (query, key) pair and head: 2 FLOPs per element for its score, 2 for its value."""
        return 2 * self.expanded_elements

    @property
    def decode_pair_flops(self) -> int:
        """As `prefill_pair_flops`, on the latents: they are keys (with the rotary part) and values at once."""
        return 2 * (self.cached_elements + self.kv_lora_rank)

    def products(self, hidden_size: int, heads: int, num_layers: int) -> tuple[Product, ...]:
        """With `heads` heads on the GPU. Compressions are replicated, what follows them is split by heads."""
        q_rank, latents, queries = self.q_lora_rank, self.cached_elements, heads * self.qk_head_dim
        q_parameters = q_rank * (hidden_size + queries) if q_rank else hidden_size * queries
        values, rank = heads * self.v_head_dim, self.kv_lora_rank
        expansion = rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return (
            Product(
                "qkv",
                Rows.TOKENS,
                num_layers,
                q_parameters + hidden_size * latents,
                hidden_size + 2 * (q_rank or 0) + queries + latents,
            ),
            Product("o", Rows.TOKENS, num_layers, values * hidden_size, values + hidden_size),
            Product(
                "KV expansion",
                Rows.PREFILL_CONTEXTS,
                num_layers,
                expansion,
                latents + heads * self.expanded_elements,
            ),
            Product(
                "absorbed KV expansion",
                Rows.DECODES,
                num_layers,
                expansion,
                heads * (self.qk_nope_head_dim + rank) + heads * (rank + self.v_head_dim),
                is_quantized=False,
                is_derived=True,
            ),
        )
