"""Another cost model's prices on a device and a host that are so many times as fast: for what-if questions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.base import CostModel, CostOptions, Resource, Target
from sim.errors import InvariantError
from sim.step import StepArrays, StepShape


class SpedUp(CostModel):
    """Divides what another cost model says. Made by whoever asks what-if; no scenario names it."""

    Options = CostOptions

    def __init__(self, cost: CostModel, device_speed: float, host_speed: float) -> None:
        """Speeds are factors > 0."""
        self._cost = cost
        self._device_speed = device_speed
        self._host_speed = host_speed

    @classmethod
    def build(cls, options: CostOptions, target: Target) -> SpedUp:
        """It stands for no cost model of its own."""
        raise InvariantError("SpedUp is made from another cost model, not from options")

    def price(self, shape: StepShape) -> int:
        """Rounded to ns; at least 1."""
        return int(self._cost.price(shape) / self._device_speed + 0.5) or 1

    def price_decode_run(self, shape: StepShape, num_steps: int) -> NDArray[np.int64]:
        """As `price`."""
        prices_ns = self._cost.price_decode_run(shape, num_steps) / self._device_speed + 0.5
        return np.maximum(prices_ns.astype(np.int64), 1)

    def host_ns(self, shape: StepShape) -> int:
        """Rounded to ns."""
        return int(self._cost.host_ns(shape) / self._host_speed + 0.5)

    def breakdown(self, steps: StepArrays) -> dict[Resource, NDArray[np.float64]]:
        """Every resource's time, divided."""
        return {resource: ns / self._device_speed for resource, ns in self._cost.breakdown(steps).items()}

    def coverage(self, steps: StepArrays) -> NDArray[np.int8] | None:
        """What was measured is what the other model says."""
        return self._cost.coverage(steps)

    def facts(self) -> dict[str, Any]:
        """Those of the other model."""
        return self._cost.facts()
