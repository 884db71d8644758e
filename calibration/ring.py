"""What GPUs that share a model send each other over a ring, computed from their link where nobody timed it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibration.grids import NOT_TIMED, term
from sim.cost.artifact import Term
from sim.model import Model


@dataclass(frozen=True)
class Link:
    """What connects the GPUs that share a model."""

    bytes_per_us: float
    latency_us: float


def between_gpus(model: Model, tensor_parallel: int, link: Link) -> list[Term]:
    """What vLLM sends over a ring: sums of hidden states, and every GPU's part of the logits to all others.

    Two sums per layer and one for the embeddings, in 2(tp - 1) steps that each send a tp-th; the logits, in the
    model's type, in tp - 1 steps (`linear.py`, `vocab_parallel_embedding.py`, `logits_processor.py`, 0.19.0).
    """
    rows = np.array([1.0, 16384.0])
    note = f"{NOT_TIMED}: a ring over links of {link.bytes_per_us * 1e-3:g} GB/s with {link.latency_us:g} µs"
    found = []
    for kind, name, row_elements, steps, calls in (
        ("tokens", "allreduce", model.hidden_size, 2 * (tensor_parallel - 1), 2 * model.num_hidden_layers + 1),
        ("sequences", "logits_gather", model.vocab_size, tensor_parallel - 1, 1),
    ):
        sent_bytes = rows * row_elements * model.dtype_bytes / tensor_parallel
        own = term(kind, name, [rows], steps * (link.latency_us + sent_bytes / link.bytes_per_us), calls, note)
        found.append(own.model_copy(update={"is_communication": True}))
    return found
