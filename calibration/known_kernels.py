"""What lies between timed points where it is known how the kernel works: points that nobody timed, computed from those.

A line between two points is right for what grows evenly. Products grow in tiles, attention of prompts with the
(query, key) pairs, and attention of decodes changes its way of working at one batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import numpy as np

from calibration.cuda_graphs import VLLM_0_19_0
from calibration.grids import Floats

TILE_TOKENS = 64
"""Rows after whose multiples products take longer: in LLMServingSim's tables, which are 16 rows apart, 89 to 96 % of
what a product's time rises by from 128 to 2048 rows lies in the quarter of the steps that begin at such a multiple."""
NUM_SMS = {
    "a10g": 80,
    "a30": 56,
    "a100-sxm-80gb": 108,
    "a100-sxm-40gb": 108,
    "a100-pcie-80gb": 108,
    "l4": 58,
    "l40s": 142,
    "rtx-3090": 82,
    "rtx-4090": 128,
    "rtx-pro-6000": 188,
}
"""Multiprocessors (NVIDIA's data sheets) of the GPUs on which vLLM's attention is FlashAttention 2."""
_FULL = 0.8
"""Part of two thread blocks a multiprocessor from which FlashAttention 2 leaves contexts whole (`flash_api.cpp`,
`num_splits_heuristic`)."""
_PARTS = 4
"""Into which a gap between timed chunks is divided: what then remains of a parabola above its chord is a 16th."""


def after_whole_tiles(points: Floats, times: Floats) -> tuple[Floats, Floats]:
    """A product's times by rows, with what they rise by after a whole tile rising at once.

    The first row of the next tile costs what the next timed point does, if that lies no further than a tile.
    """
    gaps = np.diff(points)
    begins = np.flatnonzero((points[:-1] % TILE_TOKENS == 0) & (gaps > 1) & (gaps <= TILE_TOKENS))
    return np.insert(points, begins + 1, points[begins] + 1), np.insert(times, begins + 1, times[begins + 1])


def by_pairs(axes: Sequence[Floats], table: Floats, chunk_axis: int) -> tuple[list[Floats], Floats]:
    """Attention with points between chunks that were timed a factor of two or more apart; contexts are the axis after.

    Between two chunks the time follows their (query, key) pairs: n·c + n(n+1)/2 for n tokens on a context of c.
    """
    chunks = axes[chunk_axis]
    contexts = axes[chunk_axis + 1].reshape(-1, *[1] * (table.ndim - chunk_axis - 2))
    rows = np.moveaxis(table, chunk_axis, 0)
    points, filled = [chunks[0]], [rows[0]]
    for i, (low, high) in enumerate(pairwise(chunks)):
        for point in np.linspace(low, high, _PARTS + 1)[1:-1] if high >= 2 * low else []:
            share = _pairs(point, contexts) - _pairs(low, contexts)
            share = share / (_pairs(high, contexts) - _pairs(low, contexts))
            points.append(point)
            filled.append(rows[i] + share * (rows[i + 1] - rows[i]))
        points.append(high)
        filled.append(rows[i + 1])
    own = [*axes[:chunk_axis], np.array(points), *axes[chunk_axis + 1 :]]
    return own, np.moveaxis(np.stack(filled), 0, chunk_axis)


def _pairs(num_tokens: float, contexts: Floats) -> Floats:
    return num_tokens * contexts + num_tokens * (num_tokens + 1) / 2


def largest_split_batch(gpu: str | None, heads: int, kv_heads: int) -> int | None:
    """The largest batch of decodes whose contexts FlashAttention 2 divides among thread blocks; None if unknown.

    While (request, KV head) pairs do not fill the GPU, every context is split, so that none takes longer than
    the rest; from `num_splits_heuristic`'s bound on it is one block's work. Without grouped heads nothing is split.
    The kernel sees batches padded to captured sizes: by default, vLLM 0.19's.
    """
    if gpu not in NUM_SMS or heads <= kv_heads:
        return None
    first_whole = ceil(_FULL * 2 * NUM_SMS[gpu] / kv_heads)
    return max((size for size in VLLM_0_19_0 if size < first_whole), default=None)


def changing_after(batch: int, axes: Sequence[Floats], skew: Floats) -> tuple[list[Floats], Floats]:
    """What unequal contexts add (by batch, ratio and spread), changing after `batch` instead of along a line.

    Up to there as at the largest timed batch that is no larger; right after as at the smallest larger one with
    as many long contexts, because the longest is what all others then wait for.
    """
    batches, ratios = axes[0], axes[1]
    after = int(np.searchsorted(batches, batch, side="right"))
    if after in (0, len(batches)):
        return list(axes), skew
    points, rows = [*batches[:after]], [*skew[:after]]
    if batch not in batches:
        points.append(float(batch))
        rows.append(skew[after - 1])
    if batch + 1 not in batches:
        same_number = ratios * (batch + 1) / batches[after]
        points.append(float(batch + 1))
        rows.append(np.stack([np.interp(same_number, ratios, spread) for spread in skew[after].T], axis=1))
    return [np.array([*points, *batches[after:]]), *axes[1:]], np.stack([*rows, *skew[after:]])
