"""A paged pool on the GPU beside one in host memory: what a request holds is in one of them, whole.

Moving a request copies its blocks over the link between GPU and host; nothing is lost and nothing is
computed again. Which requests move is the policy's matter.
"""

from __future__ import annotations

from sim.errors import ScenarioError
from sim.kv.base import blocks_for
from sim.kv.counted import CountedCache
from sim.request import Request


class SwappedCache(CountedCache):
    """Counts blocks in both pools; `request.num_blocks` are those on the GPU."""

    def __init__(self, usable_blocks: int, block_size: int, num_cpu_blocks: int | None) -> None:
        """`num_cpu_blocks`: blocks in host memory; None: as many as are ever needed."""
        super().__init__(usable_blocks, block_size)
        self._num_cpu_blocks = num_cpu_blocks
        self._on_cpu: dict[Request, int] = {}
        self.used_cpu_blocks = 0
        """Blocks held in host memory."""

    @property
    def free_cpu_share(self) -> float:
        """Part of the host's pool that nobody holds; 1 where it has no end."""
        if self._num_cpu_blocks is None:
            return 1.0
        return (self._num_cpu_blocks - self.used_cpu_blocks) / max(1, self._num_cpu_blocks)

    def is_on_cpu(self, request: Request) -> bool:
        """Whether what the request holds is in host memory."""
        return request in self._on_cpu

    def blocks_to_run(self, request: Request, num_tokens: int) -> int:
        """GPU blocks that it takes to have so many tokens of the request on the GPU, beyond what is there. Pure."""
        return blocks_for(num_tokens, self.block_size) - request.num_blocks

    def swap_out(self, request: Request) -> int:
        """Move what a request holds on the GPU to the host; how many blocks moved. Mutates both.

        Raises ScenarioError when the host's pool is full: the engines that this copies stop there.
        """
        num_blocks = request.num_blocks
        if self._num_cpu_blocks is not None and self.used_cpu_blocks + num_blocks > self._num_cpu_blocks:
            raise ScenarioError(
                "engine.num_cpu_blocks",
                f"{num_blocks} blocks of {request} do not fit in host memory, which has {self._num_cpu_blocks} and "
                f"{self._num_cpu_blocks - self.used_cpu_blocks} of them free",
                remedy="Give the host more blocks: an engine stops here.",
            )
        super().free(request)
        self._on_cpu[request] = num_blocks
        self.used_cpu_blocks += num_blocks
        return num_blocks

    def swap_in(self, request: Request) -> int:
        """Move what a request holds in host memory to the GPU, which has room for it; how many blocks moved."""
        num_blocks = self._on_cpu.pop(request)
        self.used_cpu_blocks -= num_blocks
        self.allocate(request, num_blocks)
        return num_blocks

    def free(self, request: Request) -> None:
        """Take back all that the request holds, in whichever pool."""
        super().free(request)
        self.used_cpu_blocks -= self._on_cpu.pop(request, 0)
