"""What moving KV between GPU and host memory adds to an iteration, whatever prices the rest.

Blocks that are swapped out or in are copied before the iteration runs, each GPU its own part over its own
link, as vLLM V0 does on the stream of the model (`worker/cache_engine.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.base import CostModel, CostOptions, Resource, Target
from sim.errors import InvariantError
from sim.gpu import Gpu
from sim.step import StepArrays, StepShape

LINK_EFFICIENCY = 0.8
"""Part of the link's rate that copies of blocks reach: an assumption, what large copies from pinned memory do."""


class Swapping(CostModel):
    """Another cost model, and a time for each block that is swapped. Not chosen by name: it wraps the one chosen."""

    Options = CostOptions

    def __init__(self, inner: CostModel, block_bytes: int, gpu: Gpu) -> None:
        """`block_bytes`: KV of one block on one GPU."""
        self._inner = inner
        self._block_ns = block_bytes * 1e9 / (gpu.host_link_bytes_per_s * LINK_EFFICIENCY)

    @classmethod
    def build(cls, options: CostOptions, target: Target) -> CostModel:
        """Never called: a cost model is wrapped when it is built."""
        raise InvariantError("swapping is no cost model of its own")

    def price(self, shape: StepShape) -> int:
        return self._inner.price(shape) + int(shape.num_swapped_blocks * self._block_ns + 0.5)

    def price_decode_run(self, shape: StepShape, num_steps: int) -> NDArray[np.int64]:
        """Nothing is swapped in steps that only decode on."""
        return self._inner.price_decode_run(shape, num_steps)

    def host_ns(self, shape: StepShape) -> int:
        return self._inner.host_ns(shape)

    def breakdown(self, steps: StepArrays) -> dict[Resource, NDArray[np.float64]]:
        """The copies count as communication."""
        parts = self._inner.breakdown(steps)
        parts[Resource.COMMUNICATION] = parts[Resource.COMMUNICATION] + steps.num_swapped_blocks * self._block_ns
        return parts

    def coverage(self, steps: StepArrays) -> NDArray[np.int8] | None:
        return self._inner.coverage(steps)

    def facts(self) -> dict[str, Any]:
        return self._inner.facts()
