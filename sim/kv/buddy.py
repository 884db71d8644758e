"""Contiguous reservation by a buddy allocator: stretches are powers of two, and holes between them are lost.

The pool begins as the fewest chunks of powers of two that fill it. A stretch is cut out of the smallest free chunk
that holds it, by halving; a chunk that is freed joins its other half when that is free too. The vLLM paper gives
its Orca baselines such an allocator, because real ones of contiguous memory have holes (Kwon et al. 2023,
section 6.1). Among chunks of the same size the one with the lowest address is taken.

Source of the algorithm: Knuth, "The Art of Computer Programming", volume 1, section 2.5.
"""

from __future__ import annotations

from sim.errors import InvariantError
from sim.kv.contiguous import ContiguousKV, Reserve, next_power_of_two
from sim.request import Request


class BuddyKV(ContiguousKV):
    """A pool with addresses: what is free but in too small pieces cannot be had."""

    def __init__(self, usable_blocks: int, block_size: int, max_model_len: int, reserve: Reserve) -> None:
        super().__init__(usable_blocks, block_size, max_model_len, reserve)
        self._free_chunks: list[set[int]] = [set() for _ in range(usable_blocks.bit_length())]
        """First blocks of the free chunks, by the binary logarithm of their size."""
        self._first_block: dict[Request, int] = {}
        first_block = 0
        for order in reversed(range(usable_blocks.bit_length())):
            if usable_blocks >> order & 1:
                self._free_chunks[order].add(first_block)
                first_block += 1 << order

    @property
    def longest_stretch(self) -> int:
        return 1 << (self.usable_blocks.bit_length() - 1)

    def blocks_to_reserve(self, prompt_tokens: int, answer_tokens: int) -> int:
        return next_power_of_two(super().blocks_to_reserve(prompt_tokens, answer_tokens))

    def fits(self, num_blocks: int) -> bool:
        return self._smallest_order(num_blocks) is not None

    def allocate(self, request: Request, num_blocks: int) -> None:
        """See the base. Raises InvariantError also for a length that is no power of two or has no chunk."""
        order = self._smallest_order(num_blocks)
        if order is None or num_blocks != next_power_of_two(num_blocks):
            raise InvariantError(f"{request} takes {num_blocks} blocks, for which there is no chunk")
        super().allocate(request, num_blocks)
        first_block = min(self._free_chunks[order])
        self._free_chunks[order].remove(first_block)
        while 1 << order > num_blocks:
            order -= 1
            self._free_chunks[order].add(first_block + (1 << order))
        self._first_block[request] = first_block

    def free(self, request: Request) -> None:
        if not request.num_blocks:
            return
        first_block, order = self._first_block.pop(request), request.num_blocks.bit_length() - 1
        super().free(request)
        while (buddy := first_block ^ (1 << order)) in self._free_chunks[order]:
            self._free_chunks[order].remove(buddy)
            first_block, order = min(first_block, buddy), order + 1
        self._free_chunks[order].add(first_block)

    def _smallest_order(self, num_blocks: int) -> int | None:
        """Of the free chunks that hold so many blocks."""
        orders = range((num_blocks - 1).bit_length(), len(self._free_chunks))
        return next((order for order in orders if self._free_chunks[order]), None)
