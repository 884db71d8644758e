"""vLLM V1's prefix cache: full blocks are found again by the identity of everything up to their end.

There is one free list. Blocks are taken from its front. A freed block that carries a key stays in the
cache, waits at the back and can be revived until it reaches the front; one without a key goes to the front
and is used first. So eviction is LRU by time of release, the deepest block of a request first. (Rules and
versions: vLLM 0.33.0 `v1/core/block_pool.py`, `v1/core/kv_cache_utils.py`; up to 0.22 every freed block
went to the back.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from sim.errors import InvariantError
from sim.kv.counted import CountedCache, Hit
from sim.request import Request
from sim.tokens import BlockKeys


class _Holding:
    """What one request keeps: its blocks, how many of them are published, and the keys it has needed."""

    __slots__ = ("blocks", "keys", "num_published", "source")

    def __init__(self, source: Iterator[int]) -> None:
        self.blocks: list[int] = []
        self.num_published = 0
        self.keys: list[int] = []
        self.source = source

    def key(self, index: int) -> int:
        """Identity of the request's tokens up to the end of block `index`; the same at every call."""
        while len(self.keys) <= index:
            self.keys.append(next(self.source))
        return self.keys[index]


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
        self._cached: dict[int, dict[int, None]] = {}
        """Key -> the blocks that carry it, oldest first. Nothing is de-duplicated."""

    def lookup(self, request: Request, max_blocks: int) -> Hit:
        holding = self._holding(request)
        blocks: list[int] = []
        num_ownerless = 0
        for index in range(max_blocks):
            carriers = self._cached.get(holding.key(index))
            if carriers is None:
                break
            block = next(iter(carriers))
            blocks.append(block)
            num_ownerless += self._num_owners[block] == 0
        return Hit(tuple(blocks), num_ownerless)

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
        super().allocate(request, num_blocks)
        blocks = self._holding(request).blocks
        for _ in range(num_blocks):
            block, _nothing = self._free_list.popitem(last=False)
            self._evict(block)
            self._num_owners[block] = 1
            blocks.append(block)

    def publish(self, request: Request, num_tokens: int) -> None:
        holding = self._holding(request)
        num_full = num_tokens // self.block_size
        for index in range(holding.num_published, num_full):
            key, block = holding.key(index), holding.blocks[index]
            self._key_of[block] = key
            self._cached.setdefault(key, {})[block] = None
        holding.num_published = max(holding.num_published, num_full)

    def free(self, request: Request) -> None:
        holding = self._holding(request)
        keyless: list[int] = []
        num_freed = 0
        for block in reversed(holding.blocks):
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            num_freed += 1
            if self._key_of[block] is None and self._keyless_to_front:
                keyless.append(block)
            else:
                self._free_list[block] = None
        for block in reversed(keyless):
            self._free_list[block] = None
            self._free_list.move_to_end(block, last=False)
        self.free_blocks += num_freed
        holding.blocks.clear()
        holding.num_published = request.num_blocks = 0

    def check_drained(self) -> None:
        super().check_drained()
        if len(self._free_list) != self.usable_blocks or any(self._num_owners):
            raise InvariantError("the prefix cache's free list and its owners disagree after the last request")

    def _evict(self, block: int) -> None:
        key = self._key_of[block]
        if key is None:
            return
        carriers = self._cached[key]
        del carriers[block]
        if not carriers:
            del self._cached[key]
        self._key_of[block] = None
        self.num_evicted += 1

    def _holding(self, request: Request) -> _Holding:
        if request.kv_state is None:
            request.kv_state = _Holding(self._identities.keys(request.tokens, request.prompt_tokens))
        holding: _Holding = request.kv_state
        return holding
