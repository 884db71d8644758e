"""Contiguous reservation: a request's KV is one stretch, as long as it can ever need, taken whole.

This is how KV was held before paging. What a request reserves but does not fill is lost to everybody
else, which is the memory that paging wins back (Kwon et al. 2023, "Efficient Memory Management for Large
Language Model Serving with PagedAttention", section 3.1). Only lengths are kept, not addresses: holes
between stretches of unequal length (external fragmentation) cost nothing here.
"""

from __future__ import annotations

from typing import Literal

from sim.errors import InvariantError
from sim.kv.base import KVCache, blocks_for
from sim.request import Request

Reserve = Literal["max_model_len", "max_tokens"]
"""How long a stretch is: the longest request that the engine takes, or the request's prompt + max_tokens."""


class ContiguousKV(KVCache):
    """A pool from which each request takes one stretch at its admission. No null block, no watermark."""

    def __init__(self, usable_blocks: int, block_size: int, max_model_len: int, reserve: Reserve) -> None:
        super().__init__(usable_blocks, block_size)
        self._max_model_len = max_model_len
        self._reserve = reserve

    def blocks_to_reserve(self, prompt_tokens: int, max_tokens: int) -> int:
        """Blocks of the stretch for such a request, rounded up. Pure."""
        num_tokens = self._max_model_len
        if self._reserve == "max_tokens":
            num_tokens = min(prompt_tokens + max_tokens, num_tokens)
        return blocks_for(num_tokens, self.block_size)

    def never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why such a request could not run even alone, as a sentence for the user, or None. Pure."""
        if prompt_tokens >= self._max_model_len:
            return (
                f"its prompt of {prompt_tokens} tokens leaves no room for an answer"
                f" within max_model_len {self._max_model_len}"
            )
        num_blocks = self.blocks_to_reserve(prompt_tokens, max_tokens)
        if num_blocks > self.usable_blocks:
            return (
                f"it reserves {num_blocks} KV blocks of {self.block_size} tokens"
                f" ({self._reserve}) and the pool has {self.usable_blocks}"
            )
        return None

    def allocate(self, request: Request, num_blocks: int) -> None:
        """Give the request its stretch. Raises InvariantError when it has one: a stretch cannot grow."""
        if request.num_blocks or not 0 < num_blocks <= self.free_blocks:
            raise InvariantError(
                f"{request} holds {request.num_blocks} blocks and takes {num_blocks} of {self.free_blocks} free ones"
            )
        request.num_blocks = num_blocks
        self.free_blocks -= num_blocks

    def free(self, request: Request) -> None:
        """Take back the request's stretch."""
        self.free_blocks += request.num_blocks
        request.num_blocks = 0
