"""What stands for a batch where tables were measured of simpler ones: one chunk, two groups, a padded size."""

from __future__ import annotations

from bisect import bisect_left
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.cost.grids import Floats
from sim.step import StepArrays


class Chunks(NamedTuple):
    """The one chunk that stands for each of many iterations' prompts; all zero where there are none."""

    num_tokens: NDArray[np.int64]
    """Tokens of all its chunks."""
    chunk: Floats
    context: Floats


def one_chunk(prefills: tuple[tuple[int, int], ...]) -> tuple[int, float, float]:
    """The tokens of all chunks, and the one chunk and its context that stand for them.

    A chunk of n on a context of c has n·c + n(n+1)/2 (query, key) pairs. The one has as many pairs as all of
    them together, on their mean context, weighted by tokens; for a single chunk it is that chunk.
    """
    if len(prefills) == 1:
        num_tokens, own_context = prefills[0]
        return num_tokens, num_tokens, own_context
    num_tokens = weighted = twice_pairs = 0
    for tokens, own_context in prefills:
        num_tokens += tokens
        weighted += tokens * own_context
        twice_pairs += tokens * (2 * own_context + tokens + 1)
    context = weighted / num_tokens
    half = context + 0.5
    return num_tokens, sqrt(half * half + twice_pairs) - half, context


def one_chunks(steps: StepArrays) -> Chunks:
    """`one_chunk` of many iterations."""
    tokens, contexts, size = steps.prefill_num_tokens, steps.prefill_context, len(steps.num_decode)
    count, num_tokens, weighted, twice_pairs = (np.zeros(size, dtype=np.int64) for _ in range(4))
    for total, value in (
        (count, np.ones_like(tokens)),
        (num_tokens, tokens),
        (weighted, tokens * contexts),
        (twice_pairs, tokens * (2 * contexts + tokens + 1)),
    ):
        np.add.at(total, steps.prefill_iteration, value)
    context = weighted / np.maximum(num_tokens, 1)
    half = context + 0.5
    several = np.sqrt(half * half + twice_pairs) - half
    return Chunks(num_tokens, np.where(count > 1, several, num_tokens), context)


def two_groups(num_decode: int, context_sum: int, context_sum_sq: int, context_max: int) -> tuple[float, float]:
    """The part of a batch that is longer, and by how many tokens, if it were two groups of equal contexts.

    They have the batch's mean, variance and longest context: with d the distance from the mean to the longest,
    the longer group is the part v/(v + d²). A spread of 0 means that all are equal. Everything is kept as
    integers times the batch size, so that it stays the same to the last bit while the batch decodes on.
    """
    variance = num_decode * context_sum_sq - context_sum * context_sum
    distance = num_decode * context_max - context_sum
    if variance <= 0 or distance <= 0:
        return 0.0, 0.0
    ratio = variance / (variance + distance * distance)
    return ratio, distance / num_decode / (1.0 - ratio)


def two_groups_of(steps: StepArrays) -> tuple[Floats, Floats]:
    """`two_groups` of many iterations."""
    num_decode, context_sum, context_sum_sq, context_max = steps[:4]
    variance = (num_decode * context_sum_sq - context_sum * context_sum).astype(np.float64)
    distance = (num_decode * context_max - context_sum).astype(np.float64)
    is_spread = (variance > 0) & (distance > 0)
    ratio = np.divide(variance, variance + distance * distance, out=np.zeros_like(variance), where=is_spread)
    spread = np.where(is_spread, distance / np.maximum(num_decode, 1) / (1.0 - ratio), 0.0)
    return ratio, spread


def padded_sizes(captured: list[int], largest: int) -> list[int]:
    """For every number of rows up to the largest captured size, the captured size that it runs as."""
    sizes = sorted(size for size in captured if size <= largest)
    return [0, *(sizes[bisect_left(sizes, rows)] for rows in range(1, sizes[-1] + 1))] if sizes else []
