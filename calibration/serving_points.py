"""Predictions against published serving points: so many clients, a mean time to first token and per token after it.

A table has one row a point: model, type of its weights, GPUs, prompt and answer lengths, clients in a closed
loop, and the two times. Every point is simulated on an artifact of its own; nothing is fitted here. A point that
does not state its clients is taken with its batch size, and marked.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import sim
from calibration import csv_table
from calibration.host import with_host
from calibration.importers.aiconfigurator import import_tables
from calibration.models import bundled_name

if TYPE_CHECKING:
    import pandas as pd

_NUMBERS = ("isl", "osl", "batch_size", "tp_size", "silicon_ttft_ms", "silicon_tpot_ms")
_OTHERS = ("id", "backend", "backend_version", "model_path", "precision", "source_kind", "concurrency")
_INFERENCEMAX = re.compile(r"source_file=\d{4}-\d{2}-\d{2}\.csv")
"""How the source of a point that was taken from InferenceMAX's database is written."""
_PROMPTS_PER_CLIENT = 10
"""InferenceMAX sends so many for each client."""
_SHORTEST = 0.8
"""InferenceMAX draws lengths between this part of the nominal ones and all of them."""
_LEAST_PROMPTS = 40
"""Of a point with few clients."""
_UNSTATED_VERSION = "0.11"
"""Of InferenceMAX's runs, which were made in October 2025."""
_GPU, _TABLES = "h100-sxm", "h100_sxm"
"""What the points were measured on, as simulation and tables call it."""


@dataclass(frozen=True)
class Point:
    """One published point. Times are means, ms."""

    id: str
    backend: str
    version: str | None
    model: str
    """As the simulation knows it."""
    precision: str | None
    tensor_parallel: int
    prompt_tokens: int
    output_tokens: int
    num_clients: int
    states_clients: bool
    """Whether the table gives the clients, or only a batch size that stands in for them."""
    is_inferencemax: bool
    """Whether it is one of InferenceMAX's runs, with lengths drawn at random and asynchronous scheduling."""
    ttft_ms: float
    tpot_ms: float

    def output_tokens_per_s(self, ttft_ms: float, tpot_ms: float) -> float:
        """What these times are for all clients: each starts again as soon as it has its answer."""
        mean_tokens = self.output_tokens * ((1 + _SHORTEST) / 2 if self.is_inferencemax else 1.0)
        return self.num_clients * mean_tokens / (ttft_ms + (mean_tokens - 1) * tpot_ms) * 1e3


@dataclass(frozen=True)
class Prediction:
    """A point and what was simulated for it, ms."""

    point: Point
    ttft_ms: float
    tpot_ms: float

    @property
    def tpot_error(self) -> float:
        """As a part of what was measured."""
        return self.tpot_ms / self.point.tpot_ms - 1

    @property
    def ttft_error(self) -> float:
        """As a part of what was measured."""
        return self.ttft_ms / self.point.ttft_ms - 1

    @property
    def throughput(self) -> tuple[float, float]:
        """Measured and simulated, tokens a second."""
        point = self.point
        return (
            point.output_tokens_per_s(point.ttft_ms, point.tpot_ms),
            point.output_tokens_per_s(self.ttft_ms, self.tpot_ms),
        )

    @property
    def throughput_error(self) -> float:
        """As a part of what was measured."""
        measured, simulated = self.throughput
        return simulated / measured - 1

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        errors = {name: getattr(self, f"{name}_error") for name in ("ttft", "tpot", "throughput")}
        simulated = {"simulated_ttft_ms": self.ttft_ms, "simulated_tpot_ms": self.tpot_ms}
        return asdict(self.point) | simulated | {f"{name}_error": error for name, error in errors.items()}


@dataclass(frozen=True)
class Group:
    """How well some points were predicted: medians of absolute errors, and rank correlations (Spearman)."""

    name: str
    num_points: int
    tpot_error: float
    ttft_error: float
    throughput_error: float
    tpot_rank: float | None
    """None where there is nothing to rank."""
    throughput_rank: float | None

    @classmethod
    def of(cls, name: str, predictions: Sequence[Prediction]) -> Group:
        """The figures of at least one point."""
        from scipy.stats import spearmanr

        def middle(errors: Iterator[float]) -> float:
            return float(np.median(np.abs(list(errors))))

        def rank(pairs: list[tuple[float, float]]) -> float | None:
            if any(len(set(values)) < 2 for values in zip(*pairs, strict=True)):
                return None
            return float(spearmanr(np.array(pairs)).statistic)

        return cls(
            name,
            len(predictions),
            middle(one.tpot_error for one in predictions),
            middle(one.ttft_error for one in predictions),
            middle(one.throughput_error for one in predictions),
            rank([(one.point.tpot_ms, one.tpot_ms) for one in predictions]),
            rank([one.throughput for one in predictions]),
        )


def read_points(path: Path, backend: str | None = None) -> list[Point]:
    """The points of a table, or those of one engine. Raises ArtifactError for columns that are missing or no times."""
    rows = csv_table.read(path, _NUMBERS, _NUMBERS)
    csv_table.require(rows, _OTHERS, path)
    stated = rows[rows["concurrency"].notna()]
    if len(stated):
        csv_table.check(stated, path, ["concurrency"], ["concurrency"])
    return [point for _, row in rows.iterrows() if backend in (None, (point := _point(row)).backend)]


def _point(row: pd.Series[Any]) -> Point:
    precision, version = (
        None if row[name] != row[name] else str(row[name]) for name in ("precision", "backend_version")
    )
    states_clients = bool(row["concurrency"] == row["concurrency"])
    model = bundled_name(str(row["model_path"]))
    return Point(
        id=str(row["id"]),
        backend=str(row["backend"]),
        version=version,
        model=f"{model}-fp8" if precision == "fp8" else model,
        precision=precision,
        tensor_parallel=int(row["tp_size"]),
        prompt_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        num_clients=int(float(row["concurrency" if states_clients else "batch_size"])),
        states_clients=states_clients,
        is_inferencemax=_INFERENCEMAX.fullmatch(str(row["source_kind"])) is not None,
        ttft_ms=float(row["silicon_ttft_ms"]),
        tpot_ms=float(row["silicon_tpot_ms"]),
    )


def predict(
    profile: Path,
    points: Iterable[Point],
    host_us: Callable[[int], tuple[float, float]] | None = None,
) -> Iterator[Prediction]:
    """Simulate every point on AIConfigurator's tables of an H100 in `profile`, one after the other.

    `host_us` gives the host's time of an iteration and of a request in it for so many GPUs, µs. All engines
    are simulated by vLLM's scheduler: others than vLLM with asynchronous scheduling, which is what they do too.
    """
    made: dict[tuple[str, int], Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        for point in points:
            key = (point.model, point.tensor_parallel)
            if key not in made:
                artifact = import_tables(profile, key[0], _TABLES, key[1])
                made[key] = Path(folder) / f"{len(made)}.json"
                (artifact if host_us is None else with_host(artifact, *host_us(key[1]))).write(made[key])
            yield Prediction(point, *_simulate(point, made[key]))


def _simulate(point: Point, artifact: Path) -> tuple[float, float]:
    """Means of the time to first token and of that per token after it, ms."""
    requests = sim.run(_scenario(point, artifact)).tables.requests
    first_ns, finished_ns = requests["first_token_ns"], requests["finished_ns"]
    ttft_ns = first_ns - requests["queued_ns"]
    several = requests["output_tokens"] > 1
    tpot_ns = (finished_ns - first_ns)[several] / (requests["output_tokens"][several] - 1)
    return float(ttft_ns.mean()) / 1e6, float(tpot_ns.mean()) / 1e6


def _scenario(point: Point, artifact: Path) -> dict[str, Any]:
    engine: dict[str, Any] = {
        "policy": "vllm-v1",
        "enable_prefix_caching": False,
        "max_model_len": point.prompt_tokens + point.output_tokens,
    }
    if point.backend == "vllm":
        engine["vllm_version"] = point.version or _UNSTATED_VERSION
    if point.is_inferencemax:
        engine["async_scheduling"] = True
    return {
        "model": point.model,
        "hardware": {"gpu": _GPU, "tensor_parallel": point.tensor_parallel},
        "engine": engine,
        "cost": {"kind": "table", "artifact": str(artifact)},
        "traffic": [
            {
                "name": "all",
                "arrivals": {"kind": "closed_loop", "num_clients": point.num_clients},
                "prompt_tokens": _lengths(point, point.prompt_tokens),
                "output_tokens": _lengths(point, point.output_tokens),
            }
        ],
        "run": {"num_requests": max(_PROMPTS_PER_CLIENT * point.num_clients, _LEAST_PROMPTS)},
    }


def _lengths(point: Point, nominal: int) -> dict[str, Any]:
    if point.is_inferencemax:
        return {"kind": "uniform", "low": int(_SHORTEST * nominal), "high": nominal}
    return {"kind": "constant", "value": nominal}


def grouped(predictions: Sequence[Prediction]) -> list[Group]:
    """Figures of all points, and of those alike in engine, model, type of weights and whether they state clients."""
    kinds: dict[str, list[Prediction]] = {}
    for one in predictions:
        point = one.point
        version = f" {point.version}" if point.version else ""
        unstated = "" if point.states_clients else ", clients not stated"
        kinds.setdefault(f"{point.backend}{version}, {point.model}{unstated}", []).append(one)
    stated = [one for one in predictions if one.point.states_clients]
    groups = [Group.of("all", predictions), *(Group.of(name, own) for name, own in sorted(kinds.items()))]
    return [*groups[:1], Group.of("all that state their clients", stated), *groups[1:]] if stated else groups
