"""Sums over the GPUs of a server (all-reduce), timed with one process for each of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

from calibration.timing import MIN_REPEATS, Timer, Timing
from sim.errors import ArtifactError

_NUM_REPEATS = 10 * MIN_REPEATS
"""The same in every process, which must all take part in every sum."""


def time_all_reduce(sizes: Sequence[int], hidden_size: int, num_gpus: int, device: str) -> list[Timing]:
    """Time of summing (size, hidden_size) bfloat16 activations over the GPUs, for each of `sizes` rows.

    NCCL between GPUs; gloo between processes on the CPU. Raises ArtifactError where there are fewer GPUs.
    """
    if device == "cuda" and torch.cuda.device_count() < num_gpus:
        raise ArtifactError(
            "--tp",
            f"{num_gpus} GPUs are asked for and {torch.cuda.device_count()} are there",
            remedy="Profile on the server that you mean.",
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments = (list(sizes), hidden_size, num_gpus, device, folder)
        multiprocessing.spawn(_run, arguments, nprocs=num_gpus)
        timings: list[Timing] = torch.load(Path(folder) / "timings.pt", weights_only=False)
    return timings


def _run(index: int, sizes: list[int], hidden_size: int, num_gpus: int, device: str, folder: str) -> None:
    """One process; the first writes what it measured."""
    torch.set_num_threads(1)
    place = torch.device(device, index) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{folder}/meet", rank=index, world_size=num_gpus)
    timer = Timer(place)

    def time_one(size: int) -> Timing:
        activations = torch.zeros(size, hidden_size, dtype=torch.bfloat16, device=place)
        return timer.time_exactly(lambda _: distributed.all_reduce(activations), _NUM_REPEATS)

    timings = [time_one(size) for size in sizes]
    if index == 0:
        torch.save(timings, Path(folder) / "timings.pt")
    distributed.destroy_process_group()
