"""How an engine was loaded: iterations, queues, KV, and work that nobody needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sim.metrics.distribution import Bools, Distribution, Ints, each_bucket
from sim.metrics.intervals import total_overlap
from sim.metrics.kv_split import kv_split
from sim.metrics.latency import waits
from sim.metrics.occupancy import Spans
from sim.metrics.summary import ActiveBucket, ClientQueue, Iterations, KVUse, Outcomes, Waste
from sim.metrics.tokens import Gaps
from sim.metrics.window import Window
from sim.record import Columns, Tables
from sim.request import NEVER, Outcome
from sim.step import StepArrays


def count_outcomes(requests: Columns, of: Bools) -> Outcomes:
    """How many of the requests in `of` ended in each way."""
    counts = np.bincount(requests["outcome"][of], minlength=len(Outcome))
    return Outcomes(**{outcome.name.lower(): int(counts[outcome]) for outcome in Outcome})


def count_turned_away(requests: Columns, of: Bools, reasons: Sequence[str]) -> dict[str, int]:
    """How many of the requests in `of` the engine turned away, by reason; `reasons` are their names by number."""
    away = requests["turned_away_by"][of]
    counts: dict[str, int] = {}
    for number, count in enumerate(np.bincount(away[away != NEVER])):
        if count:  # two doors of one kind are one reason
            counts[reasons[number]] = counts.get(reasons[number], 0) + int(count)
    return counts


def iteration_load(tables: Tables, spans: Spans, run_end_ns: int) -> Iterations:
    """Batches and queues. `count` is of the whole run; means and peaks are of the window.

    Numbers of requests are averaged over time (idle time counts as none running), numbers of tokens over
    iterations. The mean number waiting is exact and counts who waits for a first admission; the peak is the
    longest queue that a step met, preempted requests included.
    """
    iterations, window = tables.iterations, spans.window
    inside = _inside(iterations, window)
    scheduled = iterations["num_decode"] + iterations["prefill_tokens"]
    start_ns, end_ns = waits(tables.requests, run_end_ns, "admitted")
    return Iterations(
        count=len(inside),
        mean_num_running=_time_mean(iterations["num_running"], spans),
        peak_num_running=_peak(iterations["num_running"][inside]),
        mean_num_waiting=window.per_time(total_overlap(start_ns, end_ns, window.start_ns, window.end_ns)),
        peak_num_waiting=_peak(iterations["num_waiting"][inside]),
        mean_scheduled_tokens=_mean(scheduled[inside]),
        mean_prefill_tokens=_mean(iterations["prefill_tokens"][inside]),
        mean_decode_tokens=_mean(iterations["num_decode"][inside]),
        busy_share=window.per_time(int(spans.owned_ns.sum())),
    )


def kv_load(tables: Tables, spans: Spans, num_blocks: int, usable_blocks: int, block_size: int) -> KVUse:
    """Use of the KV pool (shares of the usable blocks, over time), and what preemption cost.

    Reserved but unused is what used blocks hold beyond the tokens in them: reservations for tokens to
    come, and the rounding to whole blocks. Preemptions and recomputed tokens are of the whole run.
    """
    iterations, requests = tables.iterations, tables.requests
    used = iterations["used_blocks"]
    spare_tokens = np.maximum(used * block_size - iterations["live_tokens"], 0)
    used_tokens = _time_sum(used * block_size, spans)
    recomputed, prefill = int(requests["recomputed_tokens"].sum()), int(iterations["prefill_tokens"].sum())
    return KVUse(
        num_blocks=num_blocks,
        usable_blocks=usable_blocks,
        block_size=block_size,
        peak_usage=_peak(used[_inside(iterations, spans.window)]) / max(usable_blocks, 1),
        mean_usage=_share(_time_mean(used, spans), max(usable_blocks, 1)),
        mean_reserved_unused_tokens=_time_mean(spare_tokens, spans),
        reserved_unused_share=_time_sum(spare_tokens, spans) / used_tokens if used_tokens else 0.0,
        split=kv_split(tables, spans, usable_blocks, block_size),
        num_preemptions=int(requests["num_preemptions"].sum()),
        max_preemptions=int(requests["num_preemptions"].max(initial=0)),
        recomputed_tokens=recomputed,
        prefill_tokens=prefill,
        recomputed_share=recomputed / max(prefill, 1),
        cached_prompt_tokens=int(requests["cached_prompt_tokens"].sum()),
    )


def waste(tables: Tables) -> Waste:
    """Work and room for nobody, over the whole run.

    Padding: rows computed for no request. Finished slots: places in the batch that requests held between
    their last token and the release of their answer, as a share of all the time that places were held.
    """
    iterations, requests = tables.iterations, tables.requests
    computed = int(iterations["num_decode"].sum() + iterations["prefill_tokens"].sum())
    padding = int(iterations["num_padding_tokens"].sum())
    is_held = (requests["admitted_ns"] != NEVER) & (requests["released_ns"] != NEVER)
    held_ns = int((requests["released_ns"] - requests["admitted_ns"])[is_held].sum())
    lingers = is_held & (requests["finished_ns"] != NEVER)
    finished_ns = int((requests["released_ns"] - requests["finished_ns"])[lingers].sum())
    return Waste(
        padding_tokens=padding,
        padding_share=padding / computed if computed else 0.0,
        finished_slot_s=finished_ns / 1e9,
        finished_slot_share=finished_ns / held_ns if held_ns else 0.0,
    )


def client_load(requests: Columns, window: Window, run_end_ns: int) -> ClientQueue:
    """Requests that waited at their client, because of its own limit, before they reached the engine."""
    start_ns, end_ns = waits(requests, run_end_ns, "queued")
    has_waited = end_ns > start_ns
    return ClientQueue(
        mean_num_waiting=window.per_time(total_overlap(start_ns, end_ns, window.start_ns, window.end_ns)),
        num_delayed=int(np.count_nonzero(has_waited)),
    )


def gaps_by_batch_size(gaps: Gaps, iterations: Columns) -> list[ActiveBucket]:
    """Inter-token latency by the number of sequences that decoded in the step that ended the gap.

    One entry per power of two that occurs; 0: no other sequence decoded (the token came from a prefill).
    """
    return [
        ActiveBucket(low=low, high=high, itl_ms=Distribution(gaps.values_ns[inside], gaps.weights[inside]).stats_ms())
        for low, high, inside in each_bucket(iterations["num_decode"][gaps.iteration])
    ]


def step_arrays(tables: Tables) -> StepArrays:
    """The shapes of all iterations, for a cost model's breakdown.

    Where a batch pads its prompts, each chunk is as long as the longest (the iteration's tokens divided
    by its prefills).
    """
    iterations, chunks = tables.iterations, tables.chunks
    iteration = chunks["iteration"]
    own_tokens = np.bincount(iteration, weights=chunks["num_tokens"], minlength=len(iterations["lane"]))
    is_padded = (own_tokens != iterations["prefill_tokens"])[iteration]
    padded = iterations["prefill_tokens"] // np.maximum(iterations["num_prefills"], 1)
    return StepArrays(
        **{name: iterations[name] for name in StepArrays._fields if name in iterations},
        prefill_iteration=iteration,
        prefill_num_tokens=np.where(is_padded, padded[iteration], chunks["num_tokens"]),
        prefill_context=chunks["context"],
        **{f"pass_{name}": column for name, column in tables.passes.items()},
    )


def _inside(iterations: Columns, window: Window) -> Bools:
    return (iterations["end_ns"] >= window.start_ns) & (iterations["end_ns"] <= window.end_ns)


def _time_sum(values: Ints, spans: Spans) -> float:
    return float(np.sum(values * spans.owned_ns.astype(np.float64)))


def _time_mean(values: Ints, spans: Spans) -> float | None:
    return spans.window.per_time(_time_sum(values, spans))


def _mean(values: Ints) -> float | None:
    return float(values.mean()) if len(values) else None


def _peak(values: Ints) -> int:
    return int(values.max(initial=0))


def _share(value: float | None, of: int) -> float | None:
    return None if value is None else value / of
