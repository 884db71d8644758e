"""The profiler: a coarse grid first, then again and again the point where the fit knows least, until time is up."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from calibration import raw
from calibration.communication import time_all_reduce
from calibration.executor import DTYPE, Executor, build_executor, graph_sizes
from calibration.operators import call_of, pages_needed
from calibration.points import Limits, Point, candidates, coarse
from calibration.timing import Timer, query
from sim.errors import ArtifactError
from sim.metrics import facts
from sim.model import Model

if TYPE_CHECKING:
    import pandas as pd

Rank = Callable[["pd.DataFrame", "pd.DataFrame"], NDArray[np.float64]]
"""Points timed, points that could be -> how little is known of each of the latter; the larger, the less."""

_MAX_POINT_S = 1.0
_PER_RANKING = 8
"""Points timed before the fit is asked again where it knows least."""


class Progress(NamedTuple):
    """How far a profile is."""

    done: int
    planned: int | None
    """Of the coarse grid; None in the refinement, which ends with the time."""
    left_s: float
    point: Point

    def __str__(self) -> str:
        phase = "refining" if self.planned is None else f"grid, {self.done} of {self.planned}"
        return f"{phase}: {self.point.operator}"


@dataclass(frozen=True)
class Job:
    """What to profile, how far, and for how long."""

    model: Model
    config: dict[str, Any]
    """The HF config.json that `model` was read from."""
    device: torch.device
    limits: Limits
    tensor_parallel: int = 1
    budget_s: float = 480.0
    seed: int = 0
    attention: str = "auto"


class Profile(NamedTuple):
    """What came of it."""

    num_timed: int
    """Points timed now."""
    num_known: int
    """Points in the file that were there before."""
    num_layers: int
    total_layers: int
    seconds: float


def open_device(name: str) -> torch.device:
    """`cuda` or `cpu`. Raises ArtifactError where there is none."""
    if name not in ("cuda", "cpu"):
        raise ArtifactError("--device", f"unknown device {name!r}", valid="known: cuda, cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ArtifactError(
            "--device cuda",
            f"torch {torch.__version__} finds no GPU",
            remedy="Run it where `nvidia-smi` lists one, with a torch built for CUDA, or take --device cpu.",
        )
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def profile(
    job: Job,
    out: Path,
    rank: Rank,
    report: Callable[[Progress], None] = lambda _: None,
    executor: Executor | None = None,
) -> Profile:
    """Time the kernels of `job` and add every point to `out` as soon as it is known.

    Points that `out` holds are not timed again. `rank` chooses what follows the coarse grid. `executor` may be one
    that is there already. Raises ArtifactError where `out` is of something else, or the time does not suffice for
    the coarse grid.
    """
    start_s = time.monotonic()
    if executor is None:
        executor = build_for(job)
    limits = replace(job.limits, cache_tokens=(executor.cache.num_pages - 1) * executor.page_size)
    about = describe(job, executor)
    known = _known(out, about)
    num_known = len(known)
    run = _Run(executor, out, about, known, start_s + job.budget_s, report, limits)
    has_experts = executor.decoder.shard.num_experts > 0
    modes = raw.MODES if executor.captures else raw.MODES[:1]
    if job.tensor_parallel > 1:
        run.add_all_reduce(job, limits)
    run.coarse(_possible(coarse(limits, has_experts, modes), executor))
    run.refine(_possible(candidates(limits, has_experts, modes), executor), rank)
    num_layers = executor.decoder.shard.num_layers
    seconds = time.monotonic() - start_s
    return Profile(len(run.known) - num_known, num_known, num_layers, job.model.num_hidden_layers, seconds)


def build_for(job: Job) -> Executor:
    """The kernels of a job, with a cache for as many tokens as its limits allow."""
    wanted = job.limits.max_num_seqs * job.limits.max_model_len + job.limits.max_num_batched_tokens
    return build_executor(
        job.model,
        job.device,
        tensor_parallel=job.tensor_parallel,
        cache_tokens=min(wanted, job.limits.cache_tokens),
        max_num_seqs=job.limits.max_num_seqs,
        attention=job.attention,
        seed=job.seed,
    )


def describe(job: Job, executor: Executor) -> raw.Metadata:
    """What all points of this profile have in common."""
    versions = facts.versions() | {"torch": torch.__version__}
    driver, program = None, shutil.which("nvidia-smi")
    device: Literal["cuda", "cpu"] = "cpu"
    if job.device.type == "cuda":
        device = "cuda"
        properties = torch.cuda.get_device_properties(job.device)
        name, memory_bytes = properties.name, properties.total_memory
        versions["cuda"] = str(torch.version.cuda)
        driver = (query(program, "driver_version", job.device.index or 0) if program else "") or None
    else:
        name, memory_bytes = f"{_cpu_name()}, threads: {torch.get_num_threads()}", _total_memory_bytes()
    attention = ("prefill_attention", "decode_attention", "mixed_attention")
    return raw.Metadata(
        hardware=raw.Hardware(name=name, memory_bytes=memory_bytes),
        device=device,
        driver=driver,
        versions=versions,
        backends=dict.fromkeys(raw.OPERATORS, "torch") | dict.fromkeys(attention, executor.backend.name),
        dtype=str(DTYPE).removeprefix("torch."),
        model=job.model.name,
        config=job.config,
        tensor_parallel=job.tensor_parallel,
        num_layers=executor.decoder.shard.num_layers,
        date=datetime.now(UTC).date().isoformat(),
        seed=job.seed,
    )


class _Run:
    """One call of `profile`: what is known so far, and how long there is."""

    def __init__(
        self,
        executor: Executor,
        out: Path,
        about: raw.Metadata,
        known: set[tuple[Any, ...]],
        stop_s: float,
        report: Callable[[Progress], None],
        limits: Limits,
    ) -> None:
        self.known = known
        self._executor, self._out, self._about = executor, out, about
        self._stop_s, self._report, self._limits = stop_s, report, limits
        self._timer = Timer(executor.decoder.device)

    @property
    def _left_s(self) -> float:
        return self._stop_s - time.monotonic()

    def coarse(self, points: Sequence[Point]) -> None:
        """Time all of these, cheaply enough that half of the time is left. Raises ArtifactError when it runs out."""
        missing = [point for point in points if _identity(point.key) not in self.known]
        limit_s = min(_MAX_POINT_S, self._left_s / 2 / max(1, len(missing)))
        for number, point in enumerate(missing):
            if self._left_s <= 0:
                num_timed = len(points) - len(missing) + number
                raise ArtifactError(
                    "--budget-minutes",
                    f"ran out after {num_timed} of the {len(points)} points that span the grid",
                    remedy=f"Run it again: {self._out} holds what was timed, and the rest follows.",
                )
            self._report(Progress(len(points) - len(missing) + number, len(points), self._left_s, point))
            self._time(point, limit_s)

    def refine(self, points: Sequence[Point], rank: Rank) -> None:
        """Time those of `points` of which least is known, until the time is up or all are known."""
        import pandas as pd

        while self._left_s > 0:
            unknown = [point for point in points if _identity(point.key) not in self.known]
            if not unknown:
                return
            uncertainty = rank(raw.read(self._out).points, pd.DataFrame([point.key for point in unknown]))
            for i in np.argsort(-uncertainty, kind="stable")[:_PER_RANKING]:
                if self._left_s <= 0:
                    return
                self._report(Progress(len(self.known), None, self._left_s, unknown[i]))
                self._time(unknown[i], _MAX_POINT_S)

    def add_all_reduce(self, job: Job, limits: Limits) -> None:
        """Time sums over the GPUs for the sizes of the coarse grid."""
        sizes = sorted({point.num_tokens for point in coarse(limits, False, ()) if point.operator == "norm"})
        points = [Point("all_reduce", num_tokens=size) for size in sizes]
        missing = [point for point in points if _identity(point.key) not in self.known]
        if not missing:
            return
        self._report(Progress(0, len(missing), self._left_s, missing[0]))
        timings = time_all_reduce(
            [point.num_tokens for point in missing], job.model.hidden_size, job.tensor_parallel, job.device.type
        )
        for point, timing in zip(missing, timings, strict=True):
            self._keep(point, timing._asdict())

    def _time(self, point: Point, limit_s: float) -> None:
        sizes = graph_sizes(len(point.contexts))[-1:] if point.mode == "graph" else []
        self._executor.capture(sizes, self._limits.max_model_len)
        call = call_of(point, self._executor)
        timing = self._timer.time(call, limit_s, is_whole=point.operator == "step")
        self._keep(point, timing._asdict())

    def _keep(self, point: Point, timing: dict[str, Any]) -> None:
        raw.append(self._out, [point.key | timing], self._about)
        self.known.add(_identity(point.key))


def _known(out: Path, about: raw.Metadata) -> set[tuple[Any, ...]]:
    if not out.exists():
        return set()
    points, old = raw.read(out, place="--out")
    raw.check_same(old, about, out)
    return {_identity(row) for row in points.to_dict("records")}


def _identity(row: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple(row[column] for column in raw.KEY)


def _possible(points: Sequence[Point], executor: Executor) -> list[Point]:
    """Those that the pages of the cache suffice for."""
    num_pages = executor.cache.num_pages - 1
    return [point for point in points if pages_needed(point, executor.page_size) <= num_pages]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _total_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 1
