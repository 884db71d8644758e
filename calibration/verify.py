"""The proof loop: profile a device, predict a scenario from the profile, serve the scenario there for real, compare.

What is measured and what is predicted come from the same engine, clients and recorder, and their metrics from the
same functions of the same tables; they differ in what a step takes, which is what is being checked.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calibration.engine import HostTimer, RealDevice, WallClock
from calibration.executor import Executor, graph_sizes
from calibration.fit import fit, worst_regions
from calibration.host import WORK_ON_THE_HOST, with_host
from calibration.operators import call_of, rows_of
from calibration.points import Limits, Point
from calibration.profile import Job, Progress, build_for, profile
from calibration.raw import read
from calibration.timing import Timer
from calibration.verify_report import Executed, Report, compare
from sim.build import draw, simulate
from sim.cost.artifact import Artifact, check_target, read_artifact
from sim.cost.table import Table
from sim.errors import InvariantError, ScenarioError
from sim.model import read_config
from sim.replica import Replica, model_name, replica
from sim.results import Results
from sim.scenario import Scenario, load_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

_MAX_WARMUPS = 512
_PACE_POINTS = 12
_PACE_S = 0.2


def verify(
    path: Path,
    device: torch.device,
    out: Path,
    *,
    artifact: Path | None = None,
    repeats: int = 3,
    budget_s: float = 120.0,
    attention: str = "auto",
    overrides: Sequence[str] = (),
    report: Callable[[Progress], None] = lambda _: None,
) -> Report:
    """Predict a scenario from an artifact, or from a profile made here and now, then serve it `repeats` times.

    Writes `raw.parquet` and `artifact.json` (of a profile made here) and `report.json` to the folder `out`; what is
    timed there already is not timed again. Raises ScenarioError for what the tiny engine cannot serve, ArtifactError
    for an artifact of something else.
    """
    scenario = load_scenario(path, overrides)
    parts = _servable(scenario)
    out.mkdir(parents=True, exist_ok=True)
    job = _job(scenario, parts, device, budget_s, attention)
    executor = build_for(job)
    _check_room(executor, job, parts)
    points = None
    if artifact is None:
        artifact = out / "artifact.json"
        profile(job, out / "raw.parquet", worst_regions, report, executor)
        timed = read(out / "raw.parquet")
        points = timed.points
        fit(timed).write(artifact)
    if executor.captures:
        executor.capture(graph_sizes(job.limits.max_num_seqs), job.limits.max_model_len)
    _warm_up(executor, job.limits)
    pace = None if points is None else Pace(executor, points)
    fitted = read_artifact(artifact, place="--artifact")
    check_target(fitted, parts.target, place="--artifact")
    if WORK_ON_THE_HOST in fitted.missing:
        artifact = out / "artifact.json"
        fitted = _with_own_host(fitted, scenario, executor)
        fitted.write(artifact)
    priced = load_scenario(
        path, [*overrides, f"cost={json.dumps({'kind': 'table', 'artifact': str(artifact.resolve())})}"]
    )
    predicted = simulate(priced, draw(priced))
    runs = [serve(priced, executor, fitted, pace) for _ in range(repeats)]
    found = Report(
        scenario=scenario.name,
        artifact=fitted,
        backend=executor.backend.name,
        rows=compare(predicted, [results for results, _ in runs]),
        executed=[executed for _, executed in runs],
        predicted_iterations=len(predicted.tables.iterations["start_ns"]),
        cost=dict(predicted.facts.cost),
    )
    (out / "report.json").write_text(json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return found


class Pace:
    """Iterations of a profile that are timed again now and then: when they take longer, the machine is slower."""

    def __init__(self, executor: Executor, points: pd.DataFrame) -> None:
        """`points` are those of the raw file."""
        is_plain = (points["operator"] == "step") & (points["mode"] == "eager")
        is_equal = points["decode_context_max"] * points["num_decodes"] == points["decode_context_tokens"]
        # decodes alone run as CUDA graphs where there are any
        own = points[is_plain & is_equal & (points["chunk_tokens"] > 0)]
        own = own.iloc[np.unique(np.linspace(0, len(own) - 1, _PACE_POINTS).astype(int))]
        self._timer = Timer(executor.decoder.device)
        self._calls = [call_of(_point_of(row), executor) for row in own.to_dict("records")]
        self._profiled_ns = own["median_ns"].to_numpy(dtype=float)

    def drift(self) -> float:
        """How much longer they take now than when they were profiled, as a part: the median over them."""
        now_ns = [self._timer.time(call, _PACE_S, is_whole=True).median_ns for call in self._calls]
        return float(np.median(np.array(now_ns) / self._profiled_ns) - 1)


def _point_of(row: dict[Any, Any]) -> Point:
    num_decodes = row["num_decodes"]
    return Point(
        "step",
        chunk_tokens=row["chunk_tokens"],
        chunk_context_tokens=row["chunk_context_tokens"],
        contexts=(row["decode_context_max"],) * num_decodes,
    )


def serve(scenario: Scenario, executor: Executor, artifact: Artifact, pace: Pace | None) -> tuple[Results, Executed]:
    """Serve a scenario's requests for real, once. Raises InvariantError when a step or a token got lost."""
    clock = WallClock()
    device = RealDevice(executor, clock, Table(artifact), scenario.seed)
    before = pace.drift() if pace else None
    with _undisturbed():
        results = simulate(scenario, draw(scenario), clock=clock, device=device)
    drift = (before + pace.drift()) / 2 if pace and before is not None else None
    iterations, is_gpu = results.tables.iterations, executor.decoder.device.type == "cuda"
    everyone = np.ones(results.tokens.num_requests, dtype=np.bool_)
    executed = Executed(
        iterations=device.num_steps,
        sampled_tokens=device.num_sampled,
        disturbed_share=None if is_gpu else 1 - device.cpu_ns / max(1, device.wall_ns),
        drift=drift,
        output_tokens=results.tokens.num_tokens_between(0, results.run_window.end_ns, everyone),
    )
    num_planned, num_sampled = len(iterations["start_ns"]), int(iterations["num_sampled"].sum())
    if (executed.iterations, executed.sampled_tokens) != (num_planned, num_sampled):
        raise InvariantError(f"{num_planned} iterations and {num_sampled} tokens were planned, and {executed}")
    return results, executed


def _servable(scenario: Scenario) -> Replica:
    """The parts of a scenario. Raises ScenarioError for what one GPU and one batch at a time cannot serve."""
    parts = replica(scenario)
    refused = {
        "hardware.tensor_parallel": (scenario.hardware.tensor_parallel, 1),
        "engine.pipeline_parallel_size": (getattr(scenario.engine, "pipeline_parallel_size", 1), 1),
        "engine.selective_batching": (getattr(scenario.engine, "selective_batching", True), True),
    }
    for key, (found, valid) in refused.items():
        if found != valid:
            raise ScenarioError(
                f"{scenario.place}: {key}", f"is {found}", valid=f"the engine of `calibrate verify` has {valid}"
            )
    return parts


def _job(scenario: Scenario, parts: Replica, device: torch.device, budget_s: float, attention: str) -> Job:
    num_tokens, num_seqs = scenario.engine.largest_pass(parts.limits.max_model_len)
    limits = Limits(
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_seqs,
        max_model_len=parts.limits.max_model_len,
        cache_tokens=parts.limits.num_gpu_blocks * parts.limits.block_size,
    )
    return Job(
        model=parts.target.model,
        config=read_config(model_name(scenario))[1],
        device=device,
        limits=limits,
        budget_s=budget_s,
        attention=attention,
    )


def _with_own_host(artifact: Artifact, scenario: Scenario, executor: Executor) -> Artifact:
    """The artifact with the time of this host, found by simulating the scenario with the real engine's own work."""
    timer = HostTimer(executor, Table(artifact))
    with _undisturbed():
        simulate(scenario, draw(scenario), device=timer)
    return with_host(artifact, *timer.host_us())


def _check_room(executor: Executor, job: Job, parts: Replica) -> None:
    """Raise ScenarioError unless all layers and all KV blocks of the scenario are there."""
    if executor.decoder.shard.num_layers < job.model.num_hidden_layers:
        raise ScenarioError(
            "model",
            f"{executor.decoder.shard.num_layers} of the {job.model.num_hidden_layers} layers of {job.model.name} fit "
            "into the memory of this device",
            remedy="Serve it on a larger one; `servesim calibrate profile` times a part of the layers.",
        )
    room = (executor.cache.num_pages - 1) * executor.page_size
    wanted = parts.limits.num_gpu_blocks * parts.limits.block_size
    most = job.limits.max_num_seqs * job.limits.max_model_len
    if room < min(wanted, most):
        raise ScenarioError(
            "engine.num_gpu_blocks",
            f"{wanted} tokens of KV are asked for, and {room} fit into the memory of this device",
            remedy="Lower it.",
        )


def _warm_up(executor: Executor, limits: Limits) -> None:
    """Compute batches of every size before anybody looks at the clock: libraries prepare a kernel for each of them."""
    room = (executor.cache.num_pages - 1) * executor.page_size
    longest = min(limits.max_num_batched_tokens, limits.max_model_len - 1, room)
    for num_tokens in range(longest, 0, -max(1, longest // _MAX_WARMUPS)):
        executor.run(rows_of(Point("step", chunk_tokens=num_tokens), executor))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection while a server would answer: vLLM freezes its heap too."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
