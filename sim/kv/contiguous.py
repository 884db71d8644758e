"""Contiguous reservation: a request's KV is one stretch, as long as it can ever need, taken whole.

This is how KV was held before paging. What a request reserves but does not fill is lost to everybody
else, which is the memory that paging wins back (Kwon et al. 2023, "Efficient Memory Management for Large
Language Model Serving with PagedAttention", section 3.1). Only lengths are kept, not addresses: holes
between stretches of unequal length (external fragmentation) cost nothing here; in `buddy` they do.
"""

from __future__ import annotations

from typing import Literal

from sim.errors import InvariantError
from sim.kv.base import KVCache, blocks_for
from sim.request import Request

Reserve = Literal["max_model_len", "max_tokens", "power_of_two", "output_tokens"]
"""How long a stretch is: the longest request that the engine takes, or the request's prompt and the room for its
answer: `max_tokens`; its true length, which no engine knows (`output_tokens`); or the power of two above that. The
vLLM paper calls the baselines that reserve these Orca (Max), (Oracle) and (Pow2)."""


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number` (>= 1)."""
    return 1 << (number - 1).bit_length()


class ContiguousKV(KVCache):
    """A pool from which each request takes one stretch at its admission. No null block, no watermark."""

    def __init__(self, usable_blocks: int, block_size: int, max_model_len: int, reserve: Reserve) -> None:
        super().__init__(usable_blocks, block_size)
        self._max_model_len = max_model_len
        self._reserve = reserve

    def room_for_answer(self, request: Request) -> int:
        """Tokens that the request reserves beside its prompt, `max_model_len` apart. Pure."""
        if self._reserve == "max_tokens":
            return request.max_tokens
        num_tokens = min(request.output_tokens, request.max_tokens)
        return next_power_of_two(num_tokens) if self._reserve == "power_of_two" else num_tokens

    def blocks_to_reserve(self, prompt_tokens: int, answer_tokens: int) -> int:
        """Blocks of the stretch for a prompt and the room for its answer, rounded up. Pure."""
        num_tokens = self._max_model_len
        if self._reserve != "max_model_len":
            num_tokens = min(prompt_tokens + answer_tokens, num_tokens)
        return blocks_for(num_tokens, self.block_size)

    @property
    def longest_stretch(self) -> int:
        """Blocks of the longest stretch that an empty pool holds."""
        return self.usable_blocks

    def fits(self, num_blocks: int) -> bool:
        """Whether such a stretch can be had now. Pure."""
        return num_blocks <= self.free_blocks

    def never_fits(self, prompt_tokens: int, answer_tokens: int) -> str | None:
        """Why such a request could not run even alone, as a sentence for the user, or None. Pure."""
        if prompt_tokens >= self._max_model_len:
            return (
                f"its prompt of {prompt_tokens} tokens leaves no room for an answer"
                f" within max_model_len {self._max_model_len}"
            )
        num_blocks = self.blocks_to_reserve(prompt_tokens, answer_tokens)
        if num_blocks > self.longest_stretch:
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
