"""Iterations that run as several passes, one after the other, whatever prices a pass."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.base import CostModel, CostOptions, Resource, Target
from sim.errors import InvariantError
from sim.step import PassesShape, StepArrays, StepShape


class InPasses(CostModel):
    """The sums of what another cost model says of passes. Not chosen by name: it wraps the one chosen.

    The host plans an iteration once, however many passes it has.
    """

    Options = CostOptions

    def __init__(self, inner: CostModel) -> None:
        self._inner = inner

    @classmethod
    def build(cls, options: CostOptions, target: Target) -> CostModel:
        """Never called: a cost model is wrapped when it is built."""
        raise InvariantError("passes have no cost model of their own")

    def price(self, shape: StepShape) -> int:
        if not isinstance(shape, PassesShape):
            return self._inner.price(shape)
        return sum([self._inner.price(one.shape) for one in shape.passes])

    def price_decode_run(self, shape: StepShape, num_steps: int) -> NDArray[np.int64]:
        """Of steps that are single passes: no others are foreseen."""
        return self._inner.price_decode_run(shape, num_steps)

    def host_ns(self, shape: StepShape) -> int:
        return self._inner.host_ns(shape)

    def breakdown(self, steps: StepArrays) -> dict[Resource, NDArray[np.float64]]:
        if not len(steps.pass_iteration):
            return self._inner.breakdown(steps)
        sums: dict[Resource, NDArray[np.float64]] = {}
        for resource, ns in self._inner.breakdown(_each_pass(steps)).items():
            sums[resource] = np.zeros(len(steps.num_decode))
            np.add.at(sums[resource], steps.pass_iteration, ns)
        return sums

    def coverage(self, steps: StepArrays) -> NDArray[np.int8] | None:
        """Of the pass of each iteration that lies furthest from what was measured."""
        if not len(steps.pass_iteration):
            return self._inner.coverage(steps)
        levels = self._inner.coverage(_each_pass(steps))
        if levels is None:
            return None
        furthest = np.zeros(len(steps.num_decode), dtype=np.int8)
        np.maximum.at(furthest, steps.pass_iteration, levels)
        return furthest

    def facts(self) -> dict[str, Any]:
        return self._inner.facts()


def _each_pass(steps: StepArrays) -> StepArrays:
    """Every pass as an iteration of its own, as `Pass.shape` does it for one."""
    number, length = steps.pass_num_requests, steps.pass_length
    num_decode = np.where(steps.pass_is_prompt, 0, number)
    num_prompts = number - num_decode
    nothing = np.zeros_like(number)
    return StepArrays(
        num_decode=num_decode,
        decode_context_sum=num_decode * length,
        decode_context_sum_sq=num_decode * length * length,
        decode_context_max=np.where(steps.pass_is_prompt, 0, length),
        num_sampled=number,
        num_padding_tokens=nothing,
        num_swapped_blocks=nothing,
        num_new_requests=num_prompts,
        prefill_iteration=np.repeat(np.arange(len(number)), num_prompts),
        prefill_num_tokens=np.repeat(length, num_prompts),
        prefill_context=np.zeros(int(num_prompts.sum()), dtype=np.int64),
    )
