"""Contract of the KV caches: who may hold cache.

Counts are in blocks of `block_size` tokens. A request's holdings are kept in `request.num_blocks`; only
the cache that granted them may change that. Nothing here decides who gets blocks: policies ask, then act.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from sim.errors import InvariantError
from sim.request import Request


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class KVCache(ABC):
    """A pool of blocks of one engine."""

    def __init__(self, usable_blocks: int, block_size: int) -> None:
        self.usable_blocks = usable_blocks
        """Blocks that requests can hold, the null block (where there is one) not counted."""
        self.block_size = block_size
        self.free_blocks = usable_blocks
        """Blocks without an owner; cached ones that a hit could revive are among them."""

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold now."""
        return self.usable_blocks - self.free_blocks

    @abstractmethod
    def allocate(self, request: Request, num_blocks: int) -> None:
        """Give `num_blocks` (>= 0, <= `free_blocks`) more blocks to the request. Mutates both."""

    @abstractmethod
    def free(self, request: Request) -> None:
        """Take back all that the request holds (nothing is fine). Mutates both."""

    def check_drained(self) -> None:
        """Raise InvariantError unless every block is free again."""
        if self.free_blocks != self.usable_blocks:
            raise InvariantError(
                f"{self.used_blocks} of {self.usable_blocks} KV blocks are still held after the last request"
            )
