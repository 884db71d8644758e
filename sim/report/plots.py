"""The pictures of a run and of a comparison, as PNG files for a design review.

Pure functions of results: each file under `sim.report` that draws returns a figure, or None where the run has
nothing to show; only this one writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from matplotlib.figure import Figure

from sim.report import cause_plots, comparison_plots, fairness_plots, latency_plots, timeline_plots
from sim.report.style import write_png
from sim.results import Results

Shown = TypeVar("Shown")

RUN_PLOTS: Mapping[str, Callable[[Results], Figure | None]] = {
    "latency_cdf": latency_plots.latency_cdf,
    "latency_percentiles": latency_plots.latency_percentiles,
    "latency_causes": cause_plots.latency_causes,
    "ttft_by_prompt": latency_plots.ttft_by_prompt,
    "itl_by_active": latency_plots.itl_by_active,
    "timeline": timeline_plots.timeline,
    "scheduled_tokens": timeline_plots.scheduled_tokens,
    "waste": timeline_plots.waste,
    "service": fairness_plots.service,
    "replicas": comparison_plots.replica_timelines,
}
"""File name without ending -> what draws it. Of a fleet the last one takes the place of pictures of a device."""

COMPARISON_PLOTS: Mapping[str, Callable[[Mapping[str, Results]], Figure | None]] = {
    "compare_latency_cdf": comparison_plots.latency_cdfs,
    "compare_timeline": comparison_plots.timelines,
    "compare_metrics": comparison_plots.metric_bars,
}
"""File name without ending -> what draws it."""


def save_all(results: Results, folder: Path) -> list[Path]:
    """Write every picture that the run has something to show in to `folder` (made if need be); returns the files.

    A picture of an earlier run that this one has no data for is removed. Each file appears under its
    name only when it is complete.
    """
    return _save(RUN_PLOTS, results, folder)


def save_comparison(results_by_name: Mapping[str, Results], folder: Path) -> list[Path]:
    """The same for variants overlaid; the first one is the baseline that the others are set against."""
    return _save(COMPARISON_PLOTS, results_by_name, folder)


def _save(plots: Mapping[str, Callable[[Shown], Figure | None]], shown: Shown, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in plots.items():
        path = folder / f"{name}.png"
        figure = draw(shown)
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        write_png(figure, path)
        written.append(path)
    return written
