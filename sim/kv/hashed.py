"""vLLM V0's prefix cache: a full block is known by its content from the moment it is allocated.

Two requests with equal beginnings share the blocks of it even in the step that admits both; the model
computes such a block for each of them, because only blocks of earlier steps count as computed. A block
that fills up while its request decodes is exchanged for an equal one that is known. Nobody's blocks stay
known until they are overwritten: the least recently used first, the deepest first among those of one time.

Source: vLLM 0.6.3.post1, `core/block/prefix_caching_block.py` and `core/evictor_v2.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from sim.kv.base import blocks_for
from sim.kv.counted import CountedCache
from sim.request import NEVER, Request
from sim.tokens import BlockKeys, RequestKeys


class _Block:
    """A block whose content is known."""

    __slots__ = ("is_computed", "key", "last_access_ns", "num_owners", "num_tokens")

    def __init__(self, key: int, num_tokens: int) -> None:
        self.key = key
        self.num_tokens = num_tokens
        """Tokens up to its end."""
        self.num_owners = 1
        self.is_computed = False
        """It was allocated in an earlier step, or found without an owner."""
        self.last_access_ns = NEVER
        """Last pass of the last owner that gave it up while others went on."""


class _Holding:
    """What one request keeps: its full blocks (it has at most one more, which is not full) and its tokens' keys."""

    __slots__ = ("blocks", "keys")

    def __init__(self, keys: RequestKeys) -> None:
        self.blocks: list[_Block] = []
        self.keys = keys


class HashedCache(CountedCache):
    """A paged pool in which equal full blocks are one."""

    def __init__(self, usable_blocks: int, block_size: int) -> None:
        super().__init__(usable_blocks, block_size)
        self._identities = BlockKeys(block_size)
        self._known: dict[int, _Block] = {}
        self._ownerless: OrderedDict[int, _Block] = OrderedDict()
        """Known blocks that nobody holds, in the order in which they were given up."""
        self._num_empty = usable_blocks
        """Free blocks without content."""
        self._of_this_step: list[_Block] = []

    def hold(self, request: Request, num_tokens: int) -> int:
        """Give a request that holds none the blocks of its first `num_tokens` tokens. Mutates both.

        Returns how many of the tokens need not be computed; those of the last block always are.
        """
        holding = self._holding(request)
        num_full = num_tokens // self.block_size
        keys = holding.keys.first(num_full)
        holding.blocks.extend([self._share(keys[i], (i + 1) * self.block_size) for i in range(num_full)])
        request.num_blocks = blocks_for(num_tokens, self.block_size)
        if request.num_blocks > num_full:
            self._take_empty()
        candidates = holding.blocks[: request.num_blocks - 1]
        return sum(block.is_computed for block in candidates) * self.block_size

    def allocate(self, request: Request, num_blocks: int) -> None:
        for _ in range(num_blocks):
            self._take_empty()
        request.num_blocks += num_blocks

    def allocate_each(self, requests: Collection[Request]) -> None:
        for request in requests:
            self.allocate(request, 1)

    def publish(self, request: Request, num_tokens: int) -> None:
        """The block that ends with the request's token number `num_tokens` is full from now on."""
        holding = self._holding(request)
        num_full = num_tokens // self.block_size
        if num_full <= len(holding.blocks):
            return
        key = holding.keys.first(num_full)[num_full - 1]
        known = self._known.get(key)
        if known is None:
            holding.blocks.append(self._register(key, num_full * self.block_size))
            return
        self._num_empty += 1
        self.free_blocks += 1
        holding.blocks.append(self._share(key, num_full * self.block_size))

    def end_step(self) -> None:
        """What was allocated in this step counts as computed in the next one."""
        for block in self._of_this_step:
            block.is_computed = True
        self._of_this_step.clear()

    def release(self, request: Request, last_pass_ns: int) -> None:
        """Take back all that the request holds; `last_pass_ns`: when its last pass was planned."""
        blocks = self._holding(request).blocks
        for block in blocks:
            block.last_access_ns = last_pass_ns
        for block in blocks:
            block.num_owners -= 1
            if not block.num_owners:
                self._ownerless[block.key] = block
                self.free_blocks += 1
        num_not_full = request.num_blocks - len(blocks)
        self._num_empty += num_not_full
        self.free_blocks += num_not_full
        blocks.clear()
        request.num_blocks = 0

    def free(self, request: Request) -> None:
        if request.num_blocks:
            self.release(request, NEVER)

    def _share(self, key: int, num_tokens: int) -> _Block:
        block = self._known.get(key)
        if block is None:
            self._take_empty()
            return self._register(key, num_tokens)
        if not block.num_owners:
            del self._ownerless[key]
            self.free_blocks -= 1
            block.is_computed = True
            block.last_access_ns = NEVER
        block.num_owners += 1
        return block

    def _register(self, key: int, num_tokens: int) -> _Block:
        block = self._known[key] = _Block(key, num_tokens)
        self._of_this_step.append(block)
        return block

    def _take_empty(self) -> None:
        self.take(1)
        if self._num_empty:
            self._num_empty -= 1
        else:
            self._evict()

    def _evict(self) -> None:
        """Overwrite the block that was used longest ago; among neighbours of one time, the deepest."""
        candidates = iter(self._ownerless.values())
        evicted = next(candidates)
        for block in candidates:
            if evicted.last_access_ns < block.last_access_ns:
                break
            if evicted.num_tokens < block.num_tokens:
                evicted = block
        del self._ownerless[evicted.key]
        del self._known[evicted.key]
        self.num_evicted += 1

    def _holding(self, request: Request) -> _Holding:
        if request.kv_state is None:
            request.kv_state = _Holding(self._identities.of(request.tokens, request.prompt_tokens))
        holding: _Holding = request.kv_state
        return holding
