"""What to time: a coarse grid that spans everything, and the many points from which the profiler picks more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.errors import ArtifactError

DENSE = ("norm", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "moe", "rotary")
"""Operators of `num_tokens` rows."""
SAMPLED = ("lm_head", "sampling")
"""Operators of `num_seqs` rows."""
SPREADS = (0.0, 1.0, 3.0)
"""How unequal the contexts of a batch are: one request in eight is longer than the others by so many means."""
PART_OF_LONGER = 8
NO_LIMIT = 10**12
"""More tokens than any cache has pages for."""


@dataclass(frozen=True)
class Limits:
    """How far to measure; vLLM's names."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    cache_tokens: int
    """Tokens that the cache has pages for: batches that hold more cannot exist here."""

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 2:
                raise ArtifactError(f"--{name.replace('_', '-')}", f"is {getattr(self, name)}", valid="at least 2")


@dataclass(frozen=True)
class Point:
    """One thing to time."""

    operator: str
    mode: str = "eager"
    num_tokens: int = 0
    num_seqs: int = 0
    chunk_tokens: int = 0
    chunk_context_tokens: int = 0
    contexts: tuple[int, ...] = ()
    """Of each decode: tokens cached before the one that it computes."""

    @property
    def key(self) -> dict[str, Any]:
        """The raw file's columns that identify it."""
        return {
            "operator": self.operator,
            "mode": self.mode,
            "num_tokens": self.num_tokens,
            "num_seqs": self.num_seqs,
            "chunk_tokens": self.chunk_tokens,
            "chunk_context_tokens": self.chunk_context_tokens,
            "num_decodes": len(self.contexts),
            "decode_context_tokens": sum(self.contexts),
            "decode_context_max": max(self.contexts, default=0),
            "decode_context_sq": float(sum(context * context for context in self.contexts)),
        }

    @property
    def cached_tokens(self) -> int:
        """Tokens that the cache must hold for it."""
        return sum(self.contexts) + len(self.contexts) + self.chunk_context_tokens + self.chunk_tokens


def coarse(limits: Limits, has_experts: bool, modes: Sequence[str]) -> list[Point]:
    """Points that span everything, so that all of the rest is interpolated: four times further at each step."""
    return _points(limits, has_experts, modes, ratio=4.0, spreads=SPREADS[:1], most_mixed=64)


def candidates(limits: Limits, has_experts: bool, modes: Sequence[str]) -> list[Point]:
    """Every point that may be worth its time: those of `coarse`, finer steps, and unequal contexts."""
    return _points(limits, has_experts, modes, ratio=2.0, spreads=SPREADS, most_mixed=512)


def spread_contexts(num_decodes: int, mean: int, spread: float) -> tuple[int, ...]:
    """Contexts with this mean (rounded): equal, or a part of them `spread` means longer than the others."""
    num_longer = num_decodes // PART_OF_LONGER
    if not spread or not num_longer:
        return (mean,) * num_decodes
    longer_by = round(spread * mean)
    shorter = max(1, mean - longer_by * num_longer // num_decodes)
    return (shorter + longer_by,) * num_longer + (shorter,) * (num_decodes - num_longer)


def _points(
    limits: Limits, has_experts: bool, modes: Sequence[str], ratio: float, spreads: Sequence[float], most_mixed: int
) -> list[Point]:
    tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    rows, batches = _steps(1, tokens, ratio), _steps(1, seqs, ratio)
    longest = limits.max_model_len - 1
    contexts = _steps(min(16, -(-longest // 4)), longest, ratio)
    chunks = _chunks(_steps(1, min(tokens, longest), ratio), contexts, limits)
    decodes = [
        spread_contexts(batch, context, spread)
        for batch in batches
        for context in contexts
        for spread in (spreads if batch >= PART_OF_LONGER else spreads[:1])
    ]
    dense = [name for name in DENSE if name not in (("gate_up_proj", "down_proj") if has_experts else ("moe",))]
    points = [Point(name, num_tokens=n) for name in dense for n in rows]
    points += [Point(name, num_seqs=n) for name in SAMPLED for n in batches]
    points += [Point("prefill_attention", chunk_tokens=n, chunk_context_tokens=c) for n, c in chunks]
    points += [Point("decode_attention", contexts=c) for c in decodes]
    mixed = list(_mixed(chunks, decodes, tokens, most_mixed))
    points += [Point("mixed_attention", chunk_tokens=n, chunk_context_tokens=c, contexts=d) for n, c, d in mixed]
    points += [Point("step", mode, len(d), len(d), contexts=d) for mode in modes for d in decodes]
    points += [Point("step", "eager", n, 1, n, c) for n, c in chunks]
    points += [Point("step", "eager", n + len(d), 1 + len(d), n, c, d) for n, c, d in mixed]
    possible = [
        point
        for point in points
        if point.cached_tokens <= limits.cache_tokens and max(point.contexts, default=0) < limits.max_model_len
    ]
    return list(dict.fromkeys(possible))


def _chunks(lengths: Iterable[int], contexts: Iterable[int], limits: Limits) -> list[tuple[int, int]]:
    return [(n, c) for n in lengths for c in (0, *contexts) if n + c <= limits.max_model_len]


def _mixed(
    chunks: Sequence[tuple[int, int]], decodes: Sequence[tuple[int, ...]], max_tokens: int, most: int
) -> Iterable[tuple[int, int, tuple[int, ...]]]:
    """Chunks beside decodes, about `most` of all pairs: each chunk and each batch of decodes occurs in some.

    The times of both apart say most of what they take together, so that not all pairs are worth their time.
    """
    stride = max(1, len(chunks) * len(decodes) // most)
    for i, chunk in enumerate(chunks):
        for j, contexts in enumerate(decodes):
            if (i + j) % stride == 0 and chunk[0] + len(contexts) <= max_tokens:
                yield (*chunk, contexts)


def _steps(low: int, high: int, ratio: float) -> list[int]:
    """Whole numbers from `low` to `high`, both included, each about `ratio` times the last."""
    count = max(2, int(np.ceil(np.log(high / low) / np.log(ratio))) + 1) if high > low else 1
    return sorted({round(value) for value in np.geomspace(low, high, count)})
