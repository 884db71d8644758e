"""How the device time of an iteration divides among those who shared it: the decodes, and each prefill chunk.

The decodes get what the iteration would have cost without its prefills, so that the rest is by how much the
prefills lengthened it for everybody: the difference that a step without them would have made. That rest is
divided among the chunks in the proportion of what each would cost alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sim.cost.base import CostModel
from sim.metrics.distribution import Bools, Ints, Numbers
from sim.metrics.load import step_arrays
from sim.record import Tables
from sim.step import StepArrays


@dataclass(frozen=True)
class WorkShares:
    """Parts of iterations, float64 from 0 to 1."""

    decode: Numbers
    """Per iteration: of its device time, what its decodes would take alone. The rest is its prefills'."""
    chunk: Numbers
    """Per chunk: of its iteration's prefill time. They add up to 1 within an iteration, up to rounding."""


def work_shares(tables: Tables, cost: CostModel) -> WorkShares:
    """The shares as `cost` prices them. O(iterations + chunks); only mixed iterations are priced again."""
    num_decode, iteration = tables.iterations["num_decode"], tables.chunks["iteration"]
    num_chunks = np.bincount(iteration, minlength=len(num_decode))
    steps = step_arrays(tables)
    decode = np.where(num_decode > 0, 1.0, 0.0)
    mixed = np.flatnonzero((num_decode > 0) & (num_chunks > 0))
    if len(mixed):
        alone_ns = _device_ns(cost, _decodes_alone(steps, mixed))
        decode[mixed] = np.clip(alone_ns / _device_ns(cost, _only(steps, mixed)), 0.0, 1.0)
    chunk = np.ones(len(iteration))
    shared = np.flatnonzero(num_chunks[iteration] > 1)
    if len(shared):
        own_ns = _device_ns(cost, _chunks_alone(steps, shared))
        total_ns = np.bincount(iteration[shared], weights=own_ns, minlength=len(num_decode))
        chunk[shared] = own_ns / total_ns[iteration[shared]]
    return WorkShares(decode, chunk)


def _device_ns(cost: CostModel, steps: StepArrays) -> Numbers:
    total: Numbers = np.sum(list(cost.breakdown(steps).values()), axis=0)
    return total


def _per_iteration(steps: StepArrays, of: Callable[[Ints], Ints]) -> dict[str, Ints]:
    apart = ("prefill_", "pass_")
    return {name: of(column) for name, column in steps._asdict().items() if not name.startswith(apart)}


def _passes(steps: StepArrays, rows: Ints, kept: Bools) -> dict[str, Ints]:
    """Those passes of some of the iterations that are to be kept."""
    position = np.full(len(steps.num_decode), -1, dtype=np.int64)
    position[rows] = np.arange(len(rows))
    kept = kept & (position[steps.pass_iteration] >= 0)
    columns = {name: column[kept] for name, column in steps._asdict().items() if name.startswith("pass_")}
    return columns | {"pass_iteration": position[columns["pass_iteration"]]}


def _only(steps: StepArrays, rows: Ints) -> StepArrays:
    """Some of the iterations, in order."""
    position = np.full(len(steps.num_decode), -1, dtype=np.int64)
    position[rows] = np.arange(len(rows))
    kept = position[steps.prefill_iteration] >= 0
    return StepArrays(
        **_per_iteration(steps, lambda column: column[rows]),
        prefill_iteration=position[steps.prefill_iteration[kept]],
        prefill_num_tokens=steps.prefill_num_tokens[kept],
        prefill_context=steps.prefill_context[kept],
        **_passes(steps, rows, np.ones(len(steps.pass_iteration), dtype=np.bool_)),
    )


def _decodes_alone(steps: StepArrays, rows: Ints) -> StepArrays:
    """Some of the iterations without their prefills."""
    nothing = np.zeros(0, dtype=np.int64)
    decodes = _per_iteration(steps, lambda column: column[rows])
    decodes |= {"num_sampled": decodes["num_decode"], "num_new_requests": np.zeros_like(rows)}
    decodes |= _passes(steps, rows, steps.pass_is_prompt == 0)
    return StepArrays(**decodes, prefill_iteration=nothing, prefill_num_tokens=nothing, prefill_context=nothing)


def _chunks_alone(steps: StepArrays, chunks: Ints) -> StepArrays:
    """Some of the chunks, each as an iteration of its own."""
    return StepArrays(
        **_per_iteration(steps, lambda _: np.zeros(len(chunks), dtype=np.int64)),
        prefill_iteration=np.arange(len(chunks)),
        prefill_num_tokens=steps.prefill_num_tokens[chunks],
        prefill_context=steps.prefill_context[chunks],
    )
