"""Where the KV pool goes: tokens, room for tokens to come, and the two kinds of fragmentation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.metrics.distribution import Ints
from sim.metrics.occupancy import Spans
from sim.metrics.summary import KVSplit
from sim.record import Columns, Tables
from sim.request import NEVER
from sim.step import BlockedBy


def kv_split(tables: Tables, spans: Spans, usable_blocks: int, block_size: int) -> KVSplit:
    """Shares of the pool, averaged over the time that iterations own in the window.

    Requests fill what they hold up to their last token; where they hold less than that (paged KV), all of it
    gets filled. What a request will hold is known from how it ended.
    """
    iterations = tables.iterations
    used_tokens = iterations["used_blocks"] * block_size
    tokens = np.minimum(iterations["live_tokens"], used_tokens)
    filled_in_the_end = np.clip(_final_tokens(iterations, tables.requests), tokens, used_tokens)
    is_short = iterations["blocked_by"] == BlockedBy.KV
    weights = spans.owned_ns / max(int(spans.owned_ns.sum()), 1) / max(usable_blocks * block_size, 1)

    def share(num_tokens: Ints) -> float | None:
        return float(np.sum(num_tokens * weights)) if spans.owned_ns.any() else None

    return KVSplit(
        token_share=share(tokens),
        reserved_share=share(filled_in_the_end - tokens),
        internal_fragmentation_share=share(used_tokens - filled_in_the_end),
        external_fragmentation_share=share((usable_blocks * block_size - used_tokens) * is_short),
    )


def _final_tokens(iterations: Columns, requests: Columns) -> NDArray[np.int64]:
    """Per iteration: tokens that the requests which hold KV in it will have had when they are over."""
    num_iterations = len(iterations["end_ns"])
    is_admitted = requests["admitted_iteration"] != NEVER
    first = requests["admitted_iteration"][is_admitted]
    gone_ns = np.maximum(requests["released_ns"], requests["cancelled_ns"])[is_admitted]
    ends_ns = np.maximum.accumulate(iterations["end_ns"])
    after = np.where(gone_ns == NEVER, num_iterations, np.searchsorted(ends_ns, gone_ns, side="right"))
    final = (requests["prompt_tokens"] + requests["output_tokens"])[is_admitted]
    changes = np.zeros(num_iterations + 1, dtype=np.int64)
    np.add.at(changes, first, final)
    np.subtract.at(changes, np.maximum(first, after), final)
    return np.cumsum(changes)[:num_iterations]
