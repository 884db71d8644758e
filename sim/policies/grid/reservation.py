"""How much KV a request must find free to be admitted: the axis of KV admission.

`prompt`: what is known of it, and a watermark of blocks stays free, so that those who run can grow. Growth
can fail, and then somebody is preempted. `max_tokens` and `max_model_len`: all that it can ever need, by its
own limit or by the engine's; nobody is ever preempted, and what is reserved but not filled is lost.

Sources: vLLM V0 and Sarathi-Serve, `can_allocate` (prompt and watermark); Orca's paper (max_tokens);
Sarathi-Serve's `orca` and `faster_transformer` (max_model_len).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.kv.base import blocks_for
from sim.request import Request

ReservationKind = Literal["prompt", "max_tokens", "max_model_len"]


@dataclass(frozen=True)
class Reservation:
    """What admission asks of the pool."""

    kind: ReservationKind
    block_size: int
    max_model_len: int
    watermark_blocks: int = 0
    """Blocks that admission leaves free."""
    needs_free_block: bool = True
    """Whether a decode wants one free block even when its last block has room."""

    def blocks(self, request: Request) -> int:
        """Blocks that a waiting request takes at its admission. Pure."""
        num_tokens = request.num_tokens
        if self.kind == "prompt":
            return -(-num_tokens // self.block_size)
        if self.kind == "max_tokens":
            num_tokens = max(num_tokens, min(request.prompt_tokens + request.max_tokens, self.max_model_len))
        else:
            num_tokens = max(num_tokens, self.max_model_len)
        return blocks_for(num_tokens, self.block_size)

    def never_fits(self, request: Request, longest_answer: int, usable_blocks: int) -> str | None:
        """Why the request could not run to its end even alone, as a sentence for the user, or None. Pure."""
        size = self.block_size
        longest = request.prompt_tokens + longest_answer - 1
        needed = max(blocks_for(longest, size), self.blocks(request)) + self.watermark_blocks
        if self.needs_free_block and longest_answer > 1:
            needed = max(needed, blocks_for(longest - 1, size) + 1)
        if needed <= usable_blocks:
            return None
        return f"it may need {needed} KV blocks of {size} tokens (watermark included) and the pool has {usable_blocks}"
