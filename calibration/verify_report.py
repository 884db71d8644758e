"""What `calibrate verify` found: a scenario predicted, and served for real, metric by metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sim.cost.artifact import Artifact
from sim.metrics.stats import mean_interval
from sim.results import Results

METRICS = ("ttft", "itl", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p99")
MEAN_AIM, P99_AIM = 0.05, 0.15
"""Largest errors that a good artifact should leave in means and in 99th percentiles."""


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
        return mean_interval(np.array(self.measured)).half_width if len(self.measured) > 1 else None

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
    drift: float | None
    """How much longer iterations of the profile took just before and after this repeat than in it, as a part: what the
    machine did, not the prediction. None where the profile was made elsewhere."""


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
        drift = [100 * each.drift for each in repeats if each.drift is not None]
        if drift:
            text.append(
                f"around the repeats, iterations of the profile took {min(drift):+.1f} to {max(drift):+.1f} % longer "
                "than in it: that is the machine"
            )
        disturbed = [each.disturbed_share for each in repeats if each.disturbed_share is not None]
        if disturbed:
            text.append(
                f"other processes had the core {100 * min(disturbed):.1f} to {100 * max(disturbed):.1f} % of the time "
                "of the steps; a profile's medians leave such time out"
            )
        return text


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


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"
