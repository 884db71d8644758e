"""When launched steps start and end: one host that plans, one device (or a pipeline of stages) that computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from sim.cost.base import CostModel
from sim.step import FEW_STEPS, SteadyRun, SteadyTimes, Step, StepShape

MAX_FORESEEN_NS = 10**11
"""Longer steps (100 s) are advanced one by one: their prices could overflow where they are added up."""


Launch = tuple[Step, int, int, int]
"""A step on its way through the device: the step, its start, its end and its host time, ns. Empty steps take none."""


class Device:
    """Executes launched steps in order.

    A step starts when the host has planned it and the device's first stage is free; the host plans one step
    at a time, so with two batches in flight its time hides behind the device's. In a pipeline each of the
    equal stages takes its part of the price, and batches follow each other stage by stage.
    """

    def __init__(self, cost: CostModel, num_stages: int = 1) -> None:
        self._cost = cost
        self._num_stages = num_stages
        self._launches: deque[Launch] = deque()
        self._host_free_ns = 0
        self._free_ns = 0
        self._last_end_ns = 0
        self.last_price_ns = 0
        """Of the last step that was launched."""
        self.last_shape = StepShape()
        """Of the last step that was launched."""
        self.pop_oldest: Callable[[], Launch] = self._launches.popleft
        """Take out the step that ended."""

    def next_end_ns(self, now_ns: int) -> int | None:
        """When the oldest launched step ends; None if no launched step takes time still.

        Steps that have ended by `now_ns` must have been popped.
        """
        launches = self._launches
        return launches[0][2] if launches and launches[-1][2] > now_ns else None

    @property
    def oldest_end_ns(self) -> int:
        """When the oldest launched step ends."""
        return self._launches[0][2]

    def launch(self, step: Step, now_ns: int) -> None:
        """Accept a step that was planned at `now_ns`."""
        shape = step.shape
        if not shape.num_decode and not step.chunks:
            end_ns = self._launches[-1][2] if self._launches else now_ns
            self._launches.append((step, end_ns, end_ns, 0))
            return
        cost = self._cost
        host_ns = cost.host_ns(shape)
        start_ns = self._host_free_ns
        if now_ns > start_ns:
            start_ns = now_ns
        start_ns += host_ns
        self._host_free_ns = start_ns
        if self._free_ns > start_ns:
            start_ns = self._free_ns
        self.last_shape = shape
        self.last_price_ns = price_ns = cost.price(shape)
        end_ns = start_ns + price_ns
        if self._num_stages > 1:
            stage_ns = -(-price_ns // self._num_stages)
            end_ns = max(end_ns, self._last_end_ns + stage_ns)
            self._last_end_ns = end_ns
            self._free_ns = start_ns + stage_ns
        else:
            self._free_ns = end_ns
        self._launches.append((step, start_ns, end_ns, host_ns))

    def foresee(self, run: SteadyRun, now_ns: int) -> SteadyTimes | None:
        """Times of a run whose first step would be planned now; None when they do not follow a simple rule.

        They do when nothing is on its way, or when the host's work hides behind the step that is. Pure.
        """
        host_ns, num_steps = self._cost.host_ns(run.shape), len(run.num_new_blocks)
        if self._cost.price(run.shape) + host_ns > MAX_FORESEEN_NS:
            return None
        prices_ns = self._cost.price_decode_run(run.shape, num_steps)
        if not self._launches:
            begin_ns, gap_ns = now_ns, host_ns
        elif max(now_ns, self._host_free_ns) + host_ns <= self._free_ns and host_ns <= prices_ns.min():
            begin_ns, gap_ns = self._free_ns, 0
        else:
            return None
        if num_steps > FEW_STEPS:
            ends_ns = begin_ns + np.cumsum(prices_ns + gap_ns)
            return SteadyTimes(ends_ns - prices_ns, ends_ns, host_ns)
        start_ns, end_ns = [], []
        for price_ns in prices_ns.tolist():
            start_ns.append(begin_ns + gap_ns)
            begin_ns += gap_ns + price_ns
            end_ns.append(begin_ns)
        return SteadyTimes(start_ns, end_ns, host_ns)

    def skip_to(self, end_ns: int) -> None:
        """Steps that were foreseen have run; the last of them ended at `end_ns`."""
        self._free_ns = self._last_end_ns = end_ns
