"""Predictions against runs that really happened: a measured run is replayed and every metric compared.

What a run was is read from its folder (`meta.json`: the engine's settings; `requests.csv`: lengths, when each
request reached the engine, its tokens' times). The replay meets the same requests at the same times, with
the same blocks in common. Nothing is fitted here, and nothing of the run's own times reaches the prices.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import sim
from calibration import csv_table
from calibration.importers.llmservingsim import import_profile
from calibration.measured_run import MeasuredRun, read_link, read_run
from calibration.ring import Link
from sim.cost.artifact import Artifact
from sim.cost.roofline import RooflineOptions
from sim.errors import ArtifactError
from sim.gpu import load_gpu
from sim.model import load_model

if TYPE_CHECKING:
    import pandas as pd

STATISTICS = {"mean": None, "p50": 50, "p90": 90, "p95": 95, "p99": 99}
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "Latency"}
"""Metric -> what the published simulator's summary calls it."""
_PUBLISHED_STATISTICS = {"mean": "Mean", "p50": "Median", "p90": "P90", "p95": "P95", "p99": "P99"}
_LENGTHS = ("input_toks", "output_toks")
_REQUEST_TIMES = ("queued_rel_s", "first_token_rel_s", "last_token_rel_s")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """One metric of a run: measured, simulated, and what a published simulator said. Latencies are ms."""

    metric: str
    statistic: str
    measured: float
    simulated: float
    published: float | None

    @property
    def error(self) -> float:
        """Of ours, as a part of what was measured."""
        return self.simulated / self.measured - 1

    @property
    def published_error(self) -> float | None:
        """Of the published simulator."""
        return None if self.published is None else self.published / self.measured - 1


@dataclass(frozen=True)
class Report:
    """A measured run beside its replay."""

    artifact: Artifact
    scenario: dict[str, Any]
    rows: list[Comparison]
    cost: dict[str, Any]

    @property
    def mean_absolute_error(self) -> float:
        """Of the latencies: the makespan is one number of a different kind."""
        return float(np.mean([abs(row.error) for row in self.rows if row.metric != "makespan"]))

    @property
    def published_mean_absolute_error(self) -> float | None:
        """The same of the published simulator; None where it published nothing."""
        errors = [abs(row.published_error) for row in self.rows if row.published_error is not None]
        return float(np.mean(errors)) if errors else None

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        rows = [
            {
                "metric": row.metric,
                "statistic": row.statistic,
                "measured": row.measured,
                "simulated": row.simulated,
                "error": row.error,
                "published_error": row.published_error,
            }
            for row in self.rows
        ]
        return {
            "rows": rows,
            "mean_absolute_error": self.mean_absolute_error,
            "published_mean_absolute_error": self.published_mean_absolute_error,
            "cost": self.cost,
            "scenario": self.scenario,
        }


def check_accuracy(
    profile: Path,
    run: Path,
    trace: Path,
    tensor_parallel: int | None = None,
    model: str | None = None,
    overrides: Sequence[str] = (),
) -> Report:
    """Import a profile, replay a measured run on it and compare.

    `trace` gives the prompts' blocks (JSONL with `hash_ids`, one for each full block, row i is request i) or
    only lengths (CSV). `model` names the model where it is not recognized; `overrides` change the scenario, as
    `--set` does. All-reduces go over the link that the run's `cluster_config.json` gives, or else the data sheet's
    at the roofline's efficiency; the artifact names which. Raises ArtifactError for files that are not those of
    one run, ScenarioError for settings that cannot be simulated.
    """
    if model is not None and Path(model).exists():
        model = str(Path(model).absolute())  # the scenario is not written here
    settings = read_run(run)
    degree = tensor_parallel or settings.tensor_parallel
    load_model(model or settings.model, "--model" if model else str(run / "meta.json"))
    requests = csv_table.read(run / "requests.csv", [*_LENGTHS, *_REQUEST_TIMES], _LENGTHS)
    artifact = _import(profile, degree, model, run)
    with tempfile.TemporaryDirectory() as folder:
        artifact.write(Path(folder) / "artifact.json")
        _write_trace(Path(folder) / "trace.jsonl", requests, _blocks(trace, requests, run), settings.block_tokens)
        scenario = _scenario(settings, artifact, degree, model)
        (Path(folder) / "scenario.yaml").write_text(json.dumps(scenario), encoding="utf-8")
        results = sim.run(sim.load_scenario(Path(folder) / "scenario.yaml", overrides))
    _check_complete(results, len(requests))
    rows = _compare(_measured(requests), _simulated(results), settings.published)
    return Report(artifact, scenario, rows, results.summary()["cost"] or {})


def _check_complete(results: sim.Results, num_requests: int) -> None:
    finished = results.summary()["outcomes"]["finished"]
    if finished != num_requests:
        raise ArtifactError("accuracy", f"only {finished} of {num_requests} requests finished in the replay")


def _scenario(run: MeasuredRun, artifact: Artifact, tensor_parallel: int, model: str | None) -> dict[str, Any]:
    """The scenario that a run was, on the GPU of the artifact."""
    if artifact.gpu is None:
        raise ArtifactError(
            "hardware.gpu", f"{artifact.hardware!r} is not listed", remedy="Add it to the table of GPUs."
        )
    trace = {"kind": "mooncake", "path": "trace.jsonl", "hash_block_tokens": run.block_tokens}
    return {
        "model": model or run.model,
        "hardware": {"gpu": artifact.gpu, "tensor_parallel": tensor_parallel},
        "engine": run.engine,
        "cost": {"kind": "table", "artifact": "artifact.json"},
        "traffic": [{"name": "replay", "trace": trace}],
    }


def _import(profile: Path, tensor_parallel: int, model: str | None, run: Path) -> Artifact:
    """The profile's artifact, with a ring over the GPUs' link for the all-reduces that no profile has timed."""
    if tensor_parallel == 1:
        return import_profile(profile, 1, model)
    link = read_link(run)
    if link is None:
        artifact = import_profile(profile, tensor_parallel, model)
        if artifact.gpu is None:
            return artifact
        rates = RooflineOptions()
        rate = load_gpu(artifact.gpu).link_bytes_per_s * rates.allreduce_efficiency
        link = Link(bytes_per_us=rate / 1e6, latency_us=rates.allreduce_latency_us)
    return import_profile(profile, tensor_parallel, model, link)


def _blocks(trace: Path, requests: pd.DataFrame, run: Path) -> list[list[int]] | None:
    """The ids of every prompt's full blocks, request by request; None for a trace without any."""
    if not trace.name.removesuffix(".gz").endswith(".jsonl"):
        lengths = csv_table.read(trace, ["input_toks"], [])["input_toks"].tolist()
        _check_prompts(trace, lengths, requests, run)
        return None
    try:
        content = trace.read_bytes()
        text = (gzip.decompress(content) if trace.suffix == ".gz" else content).decode()
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(str(trace), f"cannot be read as JSON lines ({reason})") from error
    _check_rows(trace, rows)
    _check_prompts(trace, [row["input_length"] for row in rows], requests, run)
    return [row.get("hash_ids") or [] for row in rows]


def _check_rows(trace: Path, rows: list[Any]) -> None:
    """Raise ArtifactError, with the line, for a row that does not say how long a prompt is and what its blocks are."""
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict) or "input_length" not in row:
            found = f"has {', '.join(row)}" if isinstance(row, dict) else f"is {row!r:.60}"
            raise ArtifactError(f"{trace}:{i}", found, valid="expected input_length, and hash_ids for prefix caching")
        ids = row.get("hash_ids") or []
        if not isinstance(ids, list) or not all(isinstance(own, int) for own in ids):
            raise ArtifactError(f"{trace}:{i}", f"hash_ids is {ids!r:.60}", valid="expected a list of whole numbers")


def _check_prompts(trace: Path, lengths: list[int | None], requests: pd.DataFrame, run: Path) -> None:
    if lengths != requests["input_toks"].tolist():
        raise ArtifactError(
            str(trace), f"its {len(lengths)} prompts are not those of {run}", valid="expected row i to be request i"
        )


def _write_trace(path: Path, requests: pd.DataFrame, blocks: list[list[int]] | None, block_tokens: int) -> None:
    """The run as a trace: requests arrive when the engine queued them; what follows their full blocks is their own."""
    lines = []
    columns = (requests[name].tolist() for name in ("queued_rel_s", "input_toks", "output_toks"))
    for i, (queued_s, prompt, output) in enumerate(zip(*columns, strict=True)):
        row = {"timestamp": queued_s * 1e3, "input_length": int(prompt), "output_length": int(output)}
        if blocks is not None:
            shared = blocks[i][: int(prompt) // block_tokens]
            missing = -(-int(prompt) // block_tokens) - len(shared)
            own = range(-1 - i * 2**20, -1 - i * 2**20 - missing, -1)
            row["hash_ids"] = [*shared, *own]
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines), encoding="utf-8")


def _measured(requests: pd.DataFrame) -> dict[str, Floats]:
    queued, first, last = (requests[name].to_numpy(dtype=float) for name in _REQUEST_TIMES)
    return _latencies(queued, first, last, requests["output_toks"].to_numpy())


def _simulated(results: sim.Results) -> dict[str, Floats]:
    requests = results.tables.requests
    queued, first, last = (requests[name] / 1e9 for name in ("queued_ns", "first_token_ns", "finished_ns"))
    return _latencies(queued, first, last, requests["output_tokens"])


def _latencies(queued_s: Floats, first_s: Floats, last_s: Floats, output_tokens: NDArray[Any]) -> dict[str, Floats]:
    """From queued to first and last token, and per token after the first, ms; the makespan in seconds."""
    several = output_tokens > 1
    return {
        "ttft": (first_s - queued_s) * 1e3,
        "tpot": ((last_s - first_s)[several] / (output_tokens[several] - 1)) * 1e3,
        "e2e": (last_s - queued_s) * 1e3,
        "makespan": np.array([last_s.max() - queued_s.min()]),
    }


def _compare(measured: dict[str, Floats], simulated: dict[str, Floats], published: str) -> list[Comparison]:
    rows = []
    for metric, title in LATENCIES.items():
        for statistic, percentile in STATISTICS.items():
            ours, theirs = (
                float(values.mean() if percentile is None else np.percentile(values, percentile))
                for values in (simulated[metric], measured[metric])
            )
            line = re.search(rf"^{title} {_PUBLISHED_STATISTICS[statistic]}\s+\S+\s+(\S+)", published, re.MULTILINE)
            rows.append(Comparison(metric, statistic, theirs, ours, float(line.group(1)) if line else None))
    rows.append(Comparison("makespan", "", float(measured["makespan"][0]), float(simulated["makespan"][0]), None))
    return rows
