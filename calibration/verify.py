"""The proof loop: profile a device, predict a scenario from the profile, serve the scenario there for real, compare.

What is measured and what is predicted come from the same engine, clients and recorder, and their metrics from the
same functions of the same tables; they differ in what a step takes, which is what is being checked.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calibration.engine import HostTimer, RealDevice, WallClock
from calibration.executor import Executor, graph_sizes
from calibration.fit import fit, worst_regions
from calibration.host import WORK_ON_THE_HOST, with_host
from calibration.operators import rows_of
from calibration.points import Limits, Point
from calibration.profile import Job, Progress, build_for, profile
from calibration.raw import read
from sim.build import Replica, draw, model_name, replica, simulate
from sim.cost.artifact import Artifact, check_target, read_artifact
from sim.cost.table import Table
from sim.errors import InvariantError, ScenarioError
from sim.model import read_config
from sim.results import Results
from sim.scenario import Scenario, load_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

METRICS = ("ttft", "itl", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p99")
MEAN_AIM, P99_AIM = 0.05, 0.15
"""Largest errors that a good artifact should leave in means and in 99th percentiles."""
_MAX_WARMUPS = 512
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 95 % intervals with 1, 2, ... degrees of freedom; about 2 beyond."""


@dataclass(frozen=True)
class Row:
    """One number: predicted, and measured once a repeat. Latencies are ms, the makespan s."""

    metric: str
    statistic: str
    predicted: float
    measured: list[float]

    @property
    def mean(self) -> float:
        """Of the repeats."""
        return float(np.mean(self.measured))

    @property
    def error(self) -> float:
        """Of the prediction, as a part of the measured mean."""
        return self.predicted / self.mean - 1

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the measured mean (Student's t); None with one repeat."""
        num = len(self.measured)
        if num < 2:
            return None
        t = _T_95[num - 2] if num - 2 < len(_T_95) else 2.0
        return float(t * np.std(self.measured, ddof=1) / num**0.5)

    @property
    def aim(self) -> float | None:
        """The largest error that is aimed at; None where there is no aim."""
        return {"mean": MEAN_AIM, "": MEAN_AIM, "p99": P99_AIM}.get(self.statistic)


@dataclass(frozen=True)
class Executed:
    """What one repeat did, counted by the device itself."""

    iterations: int
    sampled_tokens: int
    output_tokens: int
    """Those that reached clients."""
    disturbed_share: float | None
    """Part of the time of its steps in which other processes had the core; None on a GPU."""


@dataclass(frozen=True)
class Report:
    """A scenario predicted and served."""

    scenario: str
    artifact: Artifact
    backend: str
    rows: list[Row]
    executed: list[Executed]
    predicted_iterations: int
    cost: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "scenario": self.scenario,
            "hardware": self.artifact.hardware,
            "model": self.artifact.model,
            "artifact_sha256": self.artifact.sha256,
            "attention": self.backend,
            "rows": [
                asdict(row) | {"mean": row.mean, "half_width": row.half_width, "error": row.error, "aim": row.aim}
                for row in self.rows
            ],
            "executed": [asdict(repeat) for repeat in self.executed],
            "predicted_iterations": self.predicted_iterations,
            "cost": self.cost,
        }

    def lines(self) -> list[str]:
        """The report as text."""
        text = [
            f"{self.scenario}: {self.artifact.model} on {self.artifact.hardware}, attention by {self.backend}",
            f"{'':16}{'measured':>24}{'predicted':>12}{'error':>10}{'aim':>8}",
        ]
        for row in self.rows:
            unit = "s" if row.metric == "makespan" else "ms"
            bar = "" if row.half_width is None else f" ± {row.half_width:.4g}"
            aim = "" if row.aim is None else f"{100 * row.aim:.0f} %"
            name = f"{row.metric} {row.statistic}".strip() + f", {unit}"
            text.append(
                f"{name:16}{f'{row.mean:.4g}{bar}':>24}{row.predicted:>12.4g}{f'{100 * row.error:+.1f} %':>10}{aim:>8}"
            )
        repeats = self.executed
        text.append(
            f"{len(repeats)} repeats of {_range([each.iterations for each in repeats])} iterations (predicted: "
            f"{self.predicted_iterations}) and {_range([each.output_tokens for each in repeats])} output tokens"
        )
        disturbed = [each.disturbed_share for each in repeats if each.disturbed_share is not None]
        if disturbed:
            text.append(
                f"other processes had the core {100 * min(disturbed):.1f} to {100 * max(disturbed):.1f} % of the time of "
                "the steps; a profile's medians leave such time out"
            )
        return text


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
    if artifact is None:
        artifact = out / "artifact.json"
        profile(job, out / "raw.parquet", worst_regions, report, executor)
        fit(read(out / "raw.parquet")).write(artifact)
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
    if executor.captures:
        executor.capture(graph_sizes(job.limits.max_num_seqs), job.limits.max_model_len)
    _warm_up(executor, job.limits)
    runs = [serve(priced, executor, fitted) for _ in range(repeats)]
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


def serve(scenario: Scenario, executor: Executor, artifact: Artifact) -> tuple[Results, Executed]:
    """Serve a scenario's requests for real, once. Raises InvariantError when a step or a token got lost."""
    clock = WallClock()
    device = RealDevice(executor, clock, Table(artifact), scenario.seed)
    with _undisturbed():
        results = simulate(scenario, draw(scenario), clock=clock, device=device)
    iterations, is_gpu = results.tables.iterations, executor.decoder.device.type == "cuda"
    everyone = np.ones(results.tokens.num_requests, dtype=np.bool_)
    executed = Executed(
        iterations=device.num_steps,
        sampled_tokens=device.num_sampled,
        disturbed_share=None if is_gpu else 1 - device.cpu_ns / max(1, device.wall_ns),
        output_tokens=results.tokens.num_tokens_between(0, results.run_window.end_ns, everyone),
    )
    num_planned, num_sampled = len(iterations["start_ns"]), int(iterations["num_sampled"].sum())
    if (executed.iterations, executed.sampled_tokens) != (num_planned, num_sampled):
        raise InvariantError(f"{num_planned} iterations and {num_sampled} tokens were planned, and {executed}")
    return results, executed


def compare(predicted: Results, measured: Sequence[Results]) -> list[Row]:
    """Every metric of a prediction beside those of the runs."""
    ours = predicted.summary()
    theirs = [results.summary() for results in measured]
    rows = []
    for metric in METRICS:
        for statistic in STATISTICS:
            values = [each["metrics"][f"{metric}_ms"][statistic] for each in (ours, *theirs)]
            if None not in values:
                rows.append(Row(metric, statistic, values[0], values[1:]))
    rows.append(Row("makespan", "", ours["makespan_s"], [each["makespan_s"] for each in theirs]))
    return rows


def _servable(scenario: Scenario) -> Replica:
    """The parts of a scenario. Raises ScenarioError for what one GPU and one batch at a time cannot serve."""
    parts = replica(scenario)
    refused = {
        "hardware.tensor_parallel": (scenario.hardware.tensor_parallel, 1),
        "engine.pipeline_parallel_size": (getattr(scenario.engine, "pipeline_parallel_size", 1), 1),
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


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"
