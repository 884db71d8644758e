"""What no scheduler and no kernel can beat, beside what a run did: a bad cost model told from a saturated server.

The bounds are those of the GPU's data sheet: every operator group at the vendor's peak FLOPs or bandwidth, whichever
takes longer, without any overhead (Williams et al. 2009, "Roofline"), and Little's law. A simulation that is
faster than that has wrong prices; one that is a little slower runs a server as good as servers get, and what
is slow about it is the load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sim.clock import NS_PER_MS, NS_PER_S
from sim.cost.roofline import Roofline, RooflineOptions
from sim.metrics.distribution import Ints, Numbers
from sim.metrics.intervals import total_overlap
from sim.metrics.load import step_arrays
from sim.metrics.occupancy import owned_spans
from sim.replica import Replica
from sim.request import NEVER
from sim.results import Results
from sim.step import StepArrays

AT_PEAK = RooflineOptions(
    gemm_compute_efficiency=1.0,
    expert_compute_efficiency=1.0,
    attention_compute_efficiency=1.0,
    memory_efficiency=1.0,
    allreduce_efficiency=1.0,
    allreduce_latency_us=0.0,
    layer_overhead_us=0.0,
    step_overhead_us=0.0,
    host_us=0.0,
    host_us_per_request=0.0,
)
"""A GPU that does what its data sheet says."""

_ROUNDING = 1e-6
_EDGE_STEPS = 2
"""Steps that count a request before its first or after its last token: those planned ahead of results."""


@dataclass(frozen=True)
class Bound:
    """One figure of a run beside its bound."""

    name: str
    unit: str
    simulated: float
    bound: float
    is_broken: bool
    """Whether the run did what cannot be, anywhere."""
    remark: str

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def bounds(results: Results, parts: Replica) -> list[Bound]:
    """The bounds of a run on the replica that it ran on, where something in the run can be held against them.

    What is read of experts is what uniform routing is expected to touch; for them the bound is an estimate.
    """
    steps = step_arrays(results.tables)
    if not len(steps.num_decode):
        return []
    peak_ns = _total(Roofline.build(AT_PEAK, parts.target), steps)
    return [
        *_decode_steps(results, peak_ns),
        *_prefills(results, parts),
        *_throughput(results, peak_ns),
        *_little(results),
    ]


def verdict(found: list[Bound]) -> str:
    """One sentence on whether the prices can be true."""
    broken = [bound for bound in found if bound.is_broken]
    if broken:
        return "the cost model cannot be right: " + "; ".join(f"{bound.name}: {bound.remark}" for bound in broken)
    return "no bound is broken: prices are possible ones, and what is slow is the load or the software, not the model"


def _total(cost: Roofline, steps: StepArrays) -> Numbers:
    total: Numbers = np.sum(list(cost.breakdown(steps).values()), axis=0)
    return total


def _decode_steps(results: Results, peak_ns: Numbers) -> Iterator[Bound]:
    iterations = results.tables.iterations
    pure = np.flatnonzero((iterations["num_decode"] > 0) & (iterations["num_prefills"] == 0))
    if len(pure):
        device_ns = (iterations["end_ns"] - iterations["start_ns"])[pure]
        yield _at_least("step that only decodes, mean", device_ns, peak_ns[pure], "steps")


def _prefills(results: Results, parts: Replica) -> Iterator[Bound]:
    """Each prompt's own arithmetic at peak FLOPs, whoever shares its steps."""
    latency, requests = results.latencies["ttft_after_client_queue"], results.tables.requests
    rows = np.flatnonzero(latency.is_known & results.is_measured)
    if len(rows) == 0:
        return
    endless = replace(parts.target.gpu, bandwidth_bytes_per_s=1e30, link_bytes_per_s=1e30)
    cost = Roofline.build(AT_PEAK, replace(parts.target, gpu=endless))
    cached = requests["cached_prompt_tokens"][rows]
    peak_ns = _total(cost, _prompts(requests["prompt_tokens"][rows] - cached, cached))
    values_ns = np.asarray(latency.values_ns[rows], dtype=np.int64)
    yield _at_least("TTFT, mean, against the prompt's FLOPs alone", values_ns, peak_ns, "requests")


def _prompts(num_tokens: Ints, context: Ints) -> StepArrays:
    """Every prompt as an iteration of its own."""
    nothing = np.zeros_like(num_tokens)
    columns = dict.fromkeys(StepArrays._fields, nothing)
    return StepArrays(
        **columns
        | {"prefill_iteration": np.arange(len(num_tokens)), "prefill_num_tokens": num_tokens}
        | {"prefill_context": context}
    )


def _at_least(name: str, values_ns: Ints, bound_ns: Numbers, what: str) -> Bound:
    num_below = int(np.count_nonzero(values_ns + 1 < bound_ns * (1 - _ROUNDING)))
    lowest = float((values_ns / np.maximum(bound_ns, 1)).min())
    remark = (
        f"{num_below:,} of {len(values_ns):,} {what} are shorter than the GPU's peak allows"
        if num_below
        else (f"the shortest is {lowest:.2f} times its bound")
    )
    return Bound(
        name, "ms", float(values_ns.mean()) / NS_PER_MS, float(bound_ns.mean()) / NS_PER_MS, num_below > 0, remark
    )


def _throughput(results: Results, peak_ns: Numbers) -> Iterator[Bound]:
    """The same batches one after the other at peak, without a pause."""
    num_tokens = int(results.tables.requests["output_tokens"].sum())
    simulated = num_tokens * NS_PER_S / max(results.run_window.duration_ns, 1)
    bound = num_tokens * NS_PER_S / max(float(peak_ns.sum()), 1.0)
    share = float(simulated / bound) if bound else 0.0
    yield Bound(
        "output tokens per second, at most",
        "1/s",
        simulated,
        bound,
        share > 1 + _ROUNDING,
        f"{100 * share:.0f} % of what the same batches would give at peak without a pause",
    )


def _little(results: Results) -> Iterator[Bound]:
    """Requests in the batch, as the iterations count them and as arrivals × time in the batch says."""
    requests, run, iterations = results.tables.requests, results.run_window, results.tables.iterations
    if not run.duration_ns or iterations["num_preempted"].any():
        return  # a preempted request has left the batch for a time that its row does not say
    admitted_ns, released_ns = requests["admitted_ns"], requests["released_ns"]
    until_ns = np.where(released_ns == NEVER, run.end_ns, released_ns)
    was_in = admitted_ns != NEVER
    by_requests = total_overlap(admitted_ns[was_in], until_ns[was_in], run.start_ns, run.end_ns) / run.duration_ns
    owned_ns = owned_spans(iterations, run).owned_ns.astype(np.float64)
    slack = _EDGE_STEPS * np.count_nonzero(was_in) * owned_ns.mean() / run.duration_ns
    by_iterations = float(iterations["num_running"] @ owned_ns) / run.duration_ns
    yield Bound(
        "requests in the batch, on average (Little's law)",
        "",
        by_iterations,
        by_requests,
        bool(abs(by_iterations - by_requests) > slack),
        "as iterations count them, beside arrivals per second × time in the batch",
    )
