"""Every iteration takes the same time: for queueing theory, for tests and for thinking."""

from __future__ import annotations

from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sim.cost.base import CostModel, CostOptions, Resource, Target
from sim.options import NonNegative, Positive
from sim.step import StepArrays, StepShape


class ConstantOptions(CostOptions):
    """Options of `kind: constant`."""

    kind: Literal["constant"] = "constant"
    step_ms: Positive = Field(description="device time of every iteration, ms")
    host_us: NonNegative = Field(default=0.0, description="host time before every iteration, µs")


class Constant(CostModel):
    """`step_ms`, whatever the batch; all of it counts as overhead."""

    Options = ConstantOptions

    def __init__(self, options: ConstantOptions) -> None:
        self._step_ns = max(1, round(options.step_ms * 1e6))
        self._host_ns = round(options.host_us * 1e3)

    @classmethod
    def build(cls, options: CostOptions, target: Target) -> Constant:
        """Needs nothing of the target."""
        return cls(cast(ConstantOptions, options))

    def price(self, shape: StepShape) -> int:
        """The same for every shape, ns."""
        return self._step_ns

    def price_decode_run(self, shape: StepShape, num_steps: int) -> NDArray[np.int64]:
        """The same for every step, ns."""
        return np.full(num_steps, self._step_ns, dtype=np.int64)

    def host_ns(self, shape: StepShape) -> int:
        """The same for every shape, ns."""
        return self._host_ns

    def breakdown(self, steps: StepArrays) -> dict[Resource, NDArray[np.float64]]:
        """All overhead."""
        parts = {resource: np.zeros(len(steps.num_decode)) for resource in Resource}
        parts[Resource.OVERHEAD] += self._step_ns
        return parts
