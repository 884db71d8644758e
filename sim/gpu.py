"""GPUs as a capacity planner knows them: vendor peaks, memory, links."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU of the table in `data/gpus.json`. Peaks are the vendor's, dense."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None
    link_bytes_per_s: float
    """To the other GPUs of its server, per direction."""
    source: str
