"""GPUs as a capacity planner knows them: vendor peaks, memory, links."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from sim.errors import ScenarioError, did_you_mean


@dataclass(frozen=True)
class Gpu:
    """One GPU of the table in `data/gpus.json`. Peaks are the vendor's, dense."""

    name: str
    memory_bytes: int
    """Total memory as CUDA reports it: what an engine multiplies by `gpu_memory_utilization`."""
    bandwidth_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None
    link_bytes_per_s: float
    """To the other GPUs of its server, per direction."""
    host_link_bytes_per_s: float
    """To host memory, per direction."""
    source: str


@cache
def _table() -> dict[str, Gpu]:
    rows = json.loads(resources.files("sim").joinpath("data/gpus.json").read_text(encoding="utf-8"))["gpus"]
    return {
        row["name"]: Gpu(
            name=row["name"],
            memory_bytes=round(row["memory_gib"] * 2**30),
            bandwidth_bytes_per_s=row["bandwidth_tb_per_s"] * 1e12,
            bf16_flops=row["bf16_tflops"] * 1e12,
            fp8_flops=None if row["fp8_tflops"] is None else row["fp8_tflops"] * 1e12,
            link_bytes_per_s=row["link_gb_per_s"] * 1e9,
            host_link_bytes_per_s=row["host_link_gb_per_s"] * 1e9,
            source=row["source"],
        )
        for row in rows
    }


def gpus() -> list[Gpu]:
    """All bundled GPUs, in the order of the table."""
    return list(_table().values())


def load_gpu(name: str, place: str = "hardware.gpu") -> Gpu:
    """The bundled GPU called `name`; raises ScenarioError at `place` when there is none."""
    gpu = _table().get(name)
    if gpu is None:
        known = ", ".join(_table())
        raise ScenarioError(
            place, f"unknown GPU {name!r}", valid=f"known: {known}", remedy=did_you_mean(name.lower(), _table())
        )
    return gpu
