"""Another cost model's device times with host times of a scenario's own choice."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.base import CostModel, CostOptions, Resource, Target
from sim.cost.host import HostTime
from sim.errors import InvariantError
from sim.step import StepArrays, StepShape


class Hosted(CostModel):
    """Everything but the host time is the other model's. Made where a scenario says `cost.host`; none names it."""

    Options = CostOptions

    def __init__(self, cost: CostModel, host: HostTime) -> None:
        self._cost, self._host = cost, host

    @classmethod
    def build(cls, options: CostOptions, target: Target) -> Hosted:
        """It stands for no cost model of its own."""
        raise InvariantError("Hosted is made from another cost model, not from options")

    def price(self, shape: StepShape) -> int:
        return self._cost.price(shape)

    def price_decode_run(self, shape: StepShape, num_steps: int) -> NDArray[np.int64]:
        return self._cost.price_decode_run(shape, num_steps)

    def host_ns(self, shape: StepShape) -> int:
        """By the iteration's requests and tokens."""
        num_decode = shape.num_decode
        return self._host.ns(num_decode + len(shape.prefills), num_decode + shape.prefill_tokens)

    def breakdown(self, steps: StepArrays) -> dict[Resource, NDArray[np.float64]]:
        return self._cost.breakdown(steps)

    def coverage(self, steps: StepArrays) -> NDArray[np.int8] | None:
        return self._cost.coverage(steps)

    def perturbed(self, rng: np.random.Generator) -> Hosted | None:
        """The other model's errors; host times stay."""
        cost = self._cost.perturbed(rng)
        return None if cost is None else Hosted(cost, self._host)

    def facts(self) -> dict[str, Any]:
        return self._cost.facts()
