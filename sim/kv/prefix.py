"""vLLM V1's prefix cache: full blocks are found again by the identity of everything up to their end.

There is one free list. Blocks are taken from its front. A freed block that carries a key stays in the
cache, waits at the back and can be revived until it reaches the front; one without a key goes to the front
and is used first. So eviction is LRU by time of release, the deepest block of a request first. (Rules and
versions: vLLM 0.33.0 `v1/core/block_pool.py`, `v1/core/kv_cache_utils.py`; up to 0.22 every freed block
went to the back.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from itertools import islice

from sim.errors import InvariantError
from sim.kv.counted import NO_HIT, CountedCache, Hit
from sim.request import Request
from sim.tokens import BlockKeys, RequestKeys


class _Holding:
    """What one request keeps: its blocks, how many of them are published, and the keys of its tokens."""

    __slots__ = ("blocks", "keys", "num_published")

    def __init__(self, keys: RequestKeys) -> None:
        self.blocks: list[int] = []
        self.num_published = 0
        self.keys = keys


class PrefixCache(CountedCache):
    """A paged pool whose freed blocks can be hit again."""

    def __init__(self, usable_blocks: int, block_size: int, *, keyless_to_front: bool = True) -> None:
        """`keyless_to_front`: freed blocks that nobody can hit are used before any cached one."""
        super().__init__(usable_blocks, block_size)
        self.num_evicted = 0
        self._keyless_to_front = keyless_to_front
        self._identities = BlockKeys(block_size)
        self._free_list: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, usable_blocks + 1))
        self._num_owners = [0] * (usable_blocks + 1)
        self._key_of: list[int | None] = [None] * (usable_blocks + 1)
        self._cached: dict[int, int | dict[int, None]] = {}
        """Key -> the block that carries it, or the blocks, oldest first: nothing is de-duplicated."""

    def lookup(self, request: Request, max_blocks: int) -> Hit:
        cached, num_owners = self._cached, self._num_owners
        blocks: list[int] = []
        num_ownerless = 0
        for key in islice(self._holding(request).keys.first(max_blocks), max_blocks):
            carrier = cached.get(key)
            if carrier is None:
                break
            block = carrier if isinstance(carrier, int) else next(iter(carrier))
            blocks.append(block)
            num_ownerless += num_owners[block] == 0
        return Hit(tuple(blocks), num_ownerless) if blocks else NO_HIT

    def admit(self, request: Request, hit: Hit, num_new_blocks: int) -> None:
        holding = self._holding(request)
        for block in hit.blocks:
            if self._num_owners[block] == 0:
                del self._free_list[block]
            self._num_owners[block] += 1
        self.free_blocks -= hit.num_ownerless
        holding.blocks.extend(hit.blocks)
        holding.num_published = request.num_blocks = len(hit.blocks)
        self.allocate(request, num_new_blocks)

    def allocate(self, request: Request, num_blocks: int) -> None:
        self.take(num_blocks)
        request.num_blocks += num_blocks
        blocks = self._holding(request).blocks
        for _ in range(num_blocks):
            blocks.append(self._take_free())

    def allocate_each(self, requests: Collection[Request]) -> None:
        self.take(len(requests))
        take_free = self._take_free
        for request in requests:
            request.num_blocks += 1
            request.kv_state.blocks.append(take_free())

    def _take_free(self) -> int:
        """The block at the front of the free list, for a new owner."""
        block, _ = self._free_list.popitem(last=False)
        key = self._key_of[block]
        if key is not None:
            self._evict(block, key)
        self._num_owners[block] = 1
        return block

    def publish(self, request: Request, num_tokens: int) -> None:
        holding = self._holding(request)
        num_published, num_full = holding.num_published, num_tokens // self.block_size
        if num_full <= num_published:
            return
        cached, key_of, blocks = self._cached, self._key_of, holding.blocks
        keys = holding.keys.first(num_full)
        for index in range(num_published, num_full):
            key, block = keys[index], blocks[index]
            key_of[block] = key
            carrier = cached.setdefault(key, block)
            if carrier is block:
                continue
            if isinstance(carrier, dict):
                carrier[block] = None
            elif carrier != block:
                cached[key] = {carrier: None, block: None}
        holding.num_published = num_full

    def free(self, request: Request) -> None:
        holding, num_owners, key_of = self._holding(request), self._num_owners, self._key_of
        free_list = self._free_list
        keyless: list[int] = []
        num_freed = 0
        for block in reversed(holding.blocks):
            num_owners[block] -= 1
            if num_owners[block]:
                continue
            num_freed += 1
            if key_of[block] is None and self._keyless_to_front:
                keyless.append(block)
            else:
                free_list[block] = None
        for block in reversed(keyless):
            free_list[block] = None
            free_list.move_to_end(block, last=False)
        self.free_blocks += num_freed
        holding.blocks.clear()
        holding.num_published = request.num_blocks = 0

    def check_drained(self) -> None:
        super().check_drained()
        if len(self._free_list) != self.usable_blocks or any(self._num_owners):
            raise InvariantError("the prefix cache's free list and its owners disagree after the last request")

    def _evict(self, block: int, key: int) -> None:
        """The block is about to hold something else: nobody finds its old tokens in it any more."""
        carrier = self._cached[key]
        if isinstance(carrier, int):
            del self._cached[key]
        else:
            del carrier[block]
            if not carrier:
                del self._cached[key]
        self._key_of[block] = None
        self.num_evicted += 1

    def _holding(self, request: Request) -> _Holding:
        if request.kv_state is None:
            request.kv_state = _Holding(self._identities.of(request.tokens, request.prompt_tokens))
        holding: _Holding = request.kv_state
        return holding
