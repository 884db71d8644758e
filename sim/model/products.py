"""Matrix products: what a forward pass is made of, per layer and GPU."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Rows(StrEnum):
    """Which rows of an iteration pass a product."""

    TOKENS = "tokens"
    """Every token that the iteration computes."""
    ROUTED = "routed"
    """Every token once for each expert that it is sent to."""
    DECODES = "decodes"
    """The tokens of decodes."""
    PREFILL_CONTEXTS = "prefill contexts"
    """Every token that a prefill chunk attends to: those it computes, and those in cache before them."""
    SAMPLED = "sampled"
    """Tokens whose logits are needed."""


class Product(NamedTuple):
    """Matrix products that the same rows pass; figures are those of one layer on one GPU."""

    name: str
    rows: Rows
    num_layers: int
    """Layers that have it; 1 for what comes once."""
    parameters: int
    """Weights, biases not counted, of each copy; rounded up where they do not divide over the GPUs."""
    row_elements: int
    """Elements that a row reads and writes: inputs and outputs."""
    activation_elements: int = 0
    """Elements that a row's activation function reads and writes between the products."""
    num_copies: int = 1
    """Experts, of which a row passes one."""
    is_quantized: bool = True
    """Whether a quantized checkpoint stores these weights in few bits."""
    is_derived: bool = False
    """Whether its weights are those of another product in another order, not more parameters."""
