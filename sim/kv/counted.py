"""A paged pool without prefix caching: which block is whose does not matter, only how many are free."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sim.errors import InvariantError
from sim.kv.base import KVCache
from sim.request import Request


class Hit(NamedTuple):
    """Leading full blocks of a request that a prefix cache holds."""

    blocks: tuple[int, ...]
    """Block ids, first block of the prompt first."""
    num_ownerless: int
    """How many of them nobody holds: they count as free now and will not when they are taken."""


NO_HIT = Hit((), 0)


class CountedCache(KVCache):
    """Counts blocks. Also the paged interface that the prefix cache refines."""

    num_evicted = 0
    """Cached blocks that were overwritten; stays 0 without prefix caching."""

    num_open = 0
    """Holders whose answers other requests may look for; stays 0 without prefix caching."""

    def lookup(self, request: Request, max_blocks: int) -> Hit:
        """The longest run of the request's first blocks, at most `max_blocks`, that is cached. Pure."""
        return NO_HIT

    def admit(self, request: Request, hit: Hit, num_new_blocks: int) -> None:
        """Give the hit blocks and `num_new_blocks` more to a request that holds none. Mutates both."""
        self.take(num_new_blocks)
        request.num_blocks = num_new_blocks

    def allocate(self, request: Request, num_blocks: int) -> None:
        self.take(num_blocks)
        request.num_blocks += num_blocks

    def allocate_each(self, requests: Collection[Request]) -> None:
        """Give one more block to each of these holders, in this order. Mutates the cache, and what it keeps of them;
        the caller writes their `num_blocks` before it frees one of them."""
        self.take(len(requests))

    def take(self, num_blocks: int) -> None:
        """Take blocks from the free ones. Mutates the cache alone."""
        if num_blocks > self.free_blocks:
            raise InvariantError(f"{num_blocks} of {self.free_blocks} free KV blocks are taken")
        self.free_blocks -= num_blocks

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks among the request's first `num_tokens` tokens hits for others. Mutates the cache."""

    def free(self, request: Request) -> None:
        self.free_blocks += request.num_blocks
        request.num_blocks = 0
