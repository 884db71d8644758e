"""What is said of a fleet's engines together, and of each of them."""

from __future__ import annotations

from collections.abc import Sequence

from sim.metrics.summary import Iterations, KVUse, LimitsReport, ReplicaSummary
from sim.record import Tables


def fleet_kv(replicas: Sequence[KVUse]) -> KVUse:
    """All pools as one; the peak is that of the fullest replica, the block size that of the first."""
    usable_blocks = sum(kv.usable_blocks for kv in replicas)
    used_blocks = [(kv.mean_usage or 0.0) * kv.usable_blocks for kv in replicas]
    unused = sum(kv.reserved_unused_share * used for kv, used in zip(replicas, used_blocks, strict=True))
    return KVUse(
        num_blocks=sum(kv.num_blocks for kv in replicas),
        usable_blocks=usable_blocks,
        block_size=replicas[0].block_size,
        peak_usage=max(kv.peak_usage for kv in replicas),
        mean_usage=None if replicas[0].mean_usage is None else sum(used_blocks) / max(usable_blocks, 1),
        mean_reserved_unused_tokens=_total([kv.mean_reserved_unused_tokens for kv in replicas]),
        reserved_unused_share=unused / sum(used_blocks) if any(used_blocks) else 0.0,
        num_preemptions=sum(kv.num_preemptions for kv in replicas),
        recomputed_tokens=sum(kv.recomputed_tokens for kv in replicas),
        cached_prompt_tokens=sum(kv.cached_prompt_tokens for kv in replicas),
    )


def fleet_iterations(merged: Iterations, replicas: Sequence[Iterations]) -> Iterations:
    """What the merged tables say of iterations, with averages over time of each device put together."""
    busy = _total([load.busy_share for load in replicas])
    return merged.model_copy(
        update={
            "mean_num_running": _total([load.mean_num_running for load in replicas]),
            "busy_share": None if busy is None else busy / len(replicas),
        }
    )


def replica_summary(name: str, tables: Tables, kv: KVUse, load: Iterations, limits: LimitsReport) -> ReplicaSummary:
    """One row of a fleet's report."""
    return ReplicaSummary(
        name=name,
        num_requests=len(tables.requests["request"]),
        output_tokens=int(tables.requests["output_tokens"].sum()),
        cached_prompt_tokens=kv.cached_prompt_tokens,
        num_preemptions=kv.num_preemptions,
        mean_num_running=load.mean_num_running,
        mean_num_waiting=load.mean_num_waiting,
        busy_share=load.busy_share,
        mean_kv_usage=kv.mean_usage,
        binds=limits.binds,
    )


def _total(values: Sequence[float | None]) -> float | None:
    """The sum; None where nothing was measured."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
