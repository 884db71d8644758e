"""Models as HF `config.json` describes them, and the arithmetic that follows: parameters, bytes, KV."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A dense or GQA decoder. Field names are those of HF `config.json`."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    dtype_bytes: int
    max_position_embeddings: int
    source: str
