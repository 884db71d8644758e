"""vLLM V1's prefix cache: full blocks are found again by the identity of everything up to their end.

There is one free list. Blocks are taken from its front. A freed block that carries a key stays in the
cache, waits at the back and can be revived until it reaches the front; one without a key goes to the front
and is used first. So eviction is LRU by time of release, the deepest block of a request first. (Rules and
versions: vLLM 0.33.0 `v1/core/block_pool.py`, `v1/core/kv_cache_utils.py`; up to 0.22 every freed block
went to the back.)

Only a block that somebody may look for has a name. From the first token that is a request's own, no other
request has the same blocks, so they are only counted while it runs; they get names if it is preempted, because
then it looks for them itself. Which of the blocks at the front are taken, and by whom, makes no difference.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from itertools import islice

from sim.errors import InvariantError
from sim.kv.counted import NO_HIT, CountedCache, Hit
from sim.request import Request, Status
from sim.tokens import BlockKeys, RequestKeys

_OWN_KEY = 0
"""Key of blocks whose tokens nobody will look for, because their request is over. No `BlockKeys` gives it out."""


class _Holding:
    """What one request keeps: its first blocks by name, how many of all are published, and the keys of its tokens."""

    __slots__ = ("blocks", "is_open", "keys", "num_findable", "num_published")

    def __init__(self, keys: RequestKeys, prompt_tokens: int, block_size: int) -> None:
        self.blocks: list[int] = []
        """Names of its first blocks: of those that others may have too, and of those that it found itself."""
        self.num_published = 0
        self.keys = keys
        self.num_findable = keys.num_shared
        """First blocks that a look-up may find: those that others may have, and those that it lost to a preemption."""
        self.is_open = keys.num_shared > prompt_tokens // block_size
        """Whether others may have blocks with its answer."""


class PrefixCache(CountedCache):
    """A paged pool whose freed blocks can be hit again."""

    def __init__(self, usable_blocks: int, block_size: int, *, keyless_to_front: bool = True) -> None:
        """`keyless_to_front`: freed blocks that nobody can hit are used before any cached one."""
        super().__init__(usable_blocks, block_size)
        self.num_evicted = 0
        self._keyless_to_front = keyless_to_front
        self._identities = BlockKeys(block_size)
        self._num_blank = usable_blocks
        """Blocks without a key at the front of the free list."""
        self._free_list: OrderedDict[int, int] = OrderedDict()
        """What follows them: a named block, or a stretch of blocks that are alike, under one name -> how many."""
        self._num_names = 0
        self._num_owners: dict[int, int] = {}
        """By name, of blocks that are held."""
        self._key_of: dict[int, int] = {}
        """By name, where there is one."""
        self.num_open = 0
        self._cached: dict[int, int | dict[int, None]] = {}
        """Key -> the block that carries it, or the blocks, oldest first: nothing is de-duplicated."""

    def lookup(self, request: Request, max_blocks: int) -> Hit:
        holding = self._holding(request)
        max_blocks = min(max_blocks, holding.num_findable)
        if max_blocks <= 0:
            return NO_HIT
        cached, free_list = self._cached, self._free_list
        blocks: list[int] = []
        num_ownerless = 0
        for key in islice(holding.keys.first(max_blocks), max_blocks):
            carrier = cached.get(key)
            if carrier is None:
                break
            block = carrier if isinstance(carrier, int) else next(iter(carrier))
            blocks.append(block)
            num_ownerless += block in free_list
        return Hit(tuple(blocks), num_ownerless) if blocks else NO_HIT

    def admit(self, request: Request, hit: Hit, num_new_blocks: int) -> None:
        holding, num_owners = self._holding(request), self._num_owners
        for block in hit.blocks:
            if block in num_owners:
                num_owners[block] += 1
            else:
                del self._free_list[block]
                num_owners[block] = 1
        self.free_blocks -= hit.num_ownerless
        holding.blocks.extend(hit.blocks)
        holding.num_published = request.num_blocks = len(hit.blocks)
        self.num_open += holding.is_open
        self.allocate(request, num_new_blocks)

    def allocate(self, request: Request, num_blocks: int) -> None:
        self.take(num_blocks)
        request.num_blocks = held = request.num_blocks + num_blocks
        holding = self._holding(request)
        for _ in range(len(holding.blocks), min(held, holding.keys.num_shared)):
            holding.blocks.append(self._new_name())

    def allocate_each(self, requests: Collection[Request]) -> None:
        self.take(len(requests))
        for request in requests if self.num_open else ():
            holding: _Holding = request.kv_state
            if holding.is_open:
                holding.blocks.append(self._new_name())

    def take(self, num_blocks: int) -> None:
        super().take(num_blocks)
        num_missing = num_blocks - self._num_blank
        if num_missing <= 0:
            self._num_blank -= num_blocks
            return
        self._num_blank = 0
        self._overwrite(num_missing)

    def publish(self, request: Request, num_tokens: int) -> None:
        holding: _Holding = request.kv_state
        num_published, num_full = holding.num_published, num_tokens // self.block_size
        if num_full <= num_published:
            return
        holding.num_published = num_full
        if num_published < len(holding.blocks):
            self._give_keys(holding, num_published, min(num_full, len(holding.blocks)))

    def free(self, request: Request) -> None:
        holding: _Holding | None = request.kv_state
        if holding is None or not request.num_blocks:
            return
        blocks, num_own = holding.blocks, request.num_blocks - len(holding.blocks)
        num_own_known = max(0, holding.num_published - len(blocks))
        if num_own_known and request.status is not Status.OVER:
            num_named = len(blocks)
            blocks.extend([self._new_name() for _ in range(num_own_known)])
            self._give_keys(holding, num_named, len(blocks))
            holding.num_findable = max(holding.num_findable, len(blocks))
            num_own, num_own_known = num_own - num_own_known, 0
        self.free_blocks += num_own
        self._let_go(num_own - num_own_known, None)
        self._let_go(num_own_known, _OWN_KEY)
        self._let_go_named(blocks)
        self.num_open -= holding.is_open
        blocks.clear()
        holding.num_published = request.num_blocks = 0

    def check_drained(self) -> None:
        super().check_drained()
        if self._num_blank + sum(self._free_list.values()) != self.usable_blocks or self._num_owners or self.num_open:
            raise InvariantError("the prefix cache's free list and its owners disagree after the last request")

    def _new_name(self) -> int:
        """A name for a block that was taken, with one owner."""
        self._num_names = name = self._num_names + 1
        self._num_owners[name] = 1
        return name

    def _give_keys(self, holding: _Holding, first: int, end: int) -> None:
        """Named blocks of a holding, from number `first` up to `end`, are hits from now on."""
        cached, key_of, keys = self._cached, self._key_of, holding.keys.first(end)
        for key, block in zip(keys[first:end], holding.blocks[first:end], strict=True):
            key_of[block] = key
            carrier = cached.setdefault(key, block)
            if carrier is block:
                continue
            if isinstance(carrier, dict):
                carrier[block] = None
            elif carrier != block:
                cached[key] = {carrier: None, block: None}

    def _let_go(self, num_blocks: int, key: int | None) -> None:
        """So many blocks without names are free; with a key they count as cached."""
        if not num_blocks:
            return
        if key is None and self._keyless_to_front:
            self._num_blank += num_blocks
            return
        self._num_names = name = self._num_names + 1
        self._free_list[name] = num_blocks
        if key is not None:
            self._key_of[name] = key

    def _let_go_named(self, blocks: list[int]) -> None:
        """Named blocks have an owner less, the last one first; free are those without any other."""
        num_owners = self._num_owners
        for block in reversed(blocks):
            if num_owners[block] > 1:
                num_owners[block] -= 1
                continue
            del num_owners[block]
            self.free_blocks += 1
            if self._keyless_to_front and block not in self._key_of:
                self._num_blank += 1
            else:
                self._free_list[block] = 1

    def _overwrite(self, num_blocks: int) -> None:
        """So many blocks after those without a key are taken: nobody finds their old tokens any more."""
        free_list = self._free_list
        while num_blocks:
            name, size = next(iter(free_list.items()))
            num_taken = min(num_blocks, size)
            num_blocks -= num_taken
            key = self._key_of.get(name)
            if key is not None:
                self.num_evicted += num_taken
            if num_taken < size:
                free_list[name] = size - num_taken
                return
            del free_list[name]
            if key is not None:
                self._forget(name, key)

    def _forget(self, name: int, key: int) -> None:
        """The last block under a name with a key is gone."""
        del self._key_of[name]
        carrier = self._cached.get(key)
        if isinstance(carrier, dict):
            del carrier[name]
            if carrier:
                return
        if carrier is not None:
            del self._cached[key]

    def _holding(self, request: Request) -> _Holding:
        holding: _Holding | None = request.kv_state
        if holding is None:
            keys = self._identities.of(request.tokens, request.prompt_tokens)
            request.kv_state = holding = _Holding(keys, request.prompt_tokens, self.block_size)
        return holding
