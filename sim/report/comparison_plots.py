"""Pictures of several runs over each other. Results come by the name of their variant, the baseline first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from sim.clock import NS_PER_S
from sim.report.latency_plots import SHOWN, draw_cdf, frame_cdf
from sim.report.series import NUM_COARSE_BINS, Bins
from sim.report.style import (
    BLACK,
    BLUE,
    VERMILION,
    WIDTH_IN,
    clipped,
    finish,
    house_style,
    line_look,
    ms_text,
    panels,
    plain_numbers,
    run_line,
    significant,
)
from sim.results import Results

_CDF_METRICS = ("ttft", "itl", "e2e")
_CDF_PANEL_IN = 1.75
_MOST_TIMES_LONGER = 4
_NAME_LENGTH = 22
_BAR_IN = 0.25
_GAP_IN = 0.62
"""Between rows of panels: the ticks of one, the headline of the next."""
_VALUES_IN = 1.55
"""Room right of a panel for a value and its ratio."""
_THOUSANDS_FROM = 10_000
"""From here on a ratio is written in thousands, for which the room suffices."""
_MOST_REPLICAS = 16
_ABOUT_EQUAL = 0.005
_WHOLE_SCALE = 4.0
"""Ratios up to this factor share one scale, so that small differences look small."""


class Compared(NamedTuple):
    """One number of the summary that variants are compared by."""

    label: str
    keys: tuple[str, str] | tuple[str, str, str]
    unit: str
    is_more_better: bool


COMPARED = (
    Compared("output tokens", ("throughput", "output_tokens_per_s"), "tokens/s", True),
    Compared("goodput", ("throughput", "goodput_requests_per_s"), "requests/s", True),
    Compared("TTFT p50", ("metrics", "ttft_ms", "p50"), "ms", False),
    Compared("TTFT p99", ("metrics", "ttft_ms", "p99"), "ms", False),
    Compared("ITL p50", ("metrics", "itl_ms", "p50"), "ms", False),
    Compared("ITL p99", ("metrics", "itl_ms", "p99"), "ms", False),
    Compared("E2E p50", ("metrics", "e2e_ms", "p50"), "ms", False),
    Compared("E2E p99", ("metrics", "e2e_ms", "p99"), "ms", False),
)


@house_style()
def latency_cdfs(results_by_name: Mapping[str, Results]) -> Figure | None:
    """CDFs of TTFT, ITL and E2E, a line per variant. None if no variant has any."""
    found = {
        metric: {name: values for name, run in results_by_name.items() if (values := run.distribution(metric)).count}
        for metric in _CDF_METRICS
    }
    drawn = {metric: values for metric, values in found.items() if values}
    if not drawn:
        return None
    figure, axes = panels([_CDF_PANEL_IN] * len(drawn), is_x_shared=False)
    names = list(results_by_name)
    for panel, (metric, by_name) in zip(axes, drawn.items(), strict=True):
        for name, values in by_name.items():
            draw_cdf(panel, values, clipped(name), line_look(names.index(name), len(names)))
        frame_cdf(panel, by_name.values())
        absent = [clipped(name, _NAME_LENGTH) for name in names if name not in by_name]
        without = f"   no values: {', '.join(absent)}" if absent else ""
        panel.set_xlabel(clipped(f"{SHOWN[metric]} (ms){without}", 95))
        panel.set_yticks([0, 50, 100])
    figure.subplots_adjust(hspace=0.42)
    finish(figure, "Latencies of all variants", _subtitle(results_by_name))
    return figure


def timelines(results_by_name: Mapping[str, Results]) -> Figure | None:
    """Requests running and waiting over time, a line per variant. None if nothing ever ran."""
    return _timelines(results_by_name, "Load of all variants over time")


@house_style()
def _timelines(results_by_name: Mapping[str, Results], title: str) -> Figure | None:
    ran = {name: run for name, run in results_by_name.items() if len(run.tables.iterations["lane"])}
    if not ran:
        return None
    figure, (running, waiting) = panels([1.8, 1.8])
    names = list(results_by_name)
    for name, run in ran.items():
        bins, engines = Bins(run, NUM_COARSE_BINS), [(Bins(engine, NUM_COARSE_BINS), engine) for engine in run.engines]
        look = line_look(names.index(name), len(names))
        level = sum(own.mean(engine.tables.iterations["num_running"]) for own, engine in engines)
        running.plot(bins.centers_s, level, label=clipped(name), **look)
        in_engines = sum(own.mean_waiting(engine.tables.iterations["num_waiting"]) for own, engine in engines)
        queue = in_engines + bins.mean_waiting_at_client()
        waiting.plot(bins.centers_s, queue, label=clipped(name), **look)
    for panel, what in ((running, "running"), (waiting, "waiting")):
        panel.set_ylabel(f"{what}\n(requests)")
        panel.set_ylim(0, max(1.0, panel.dataLim.y1 * 1.06))
        panel.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, steps=[1, 2, 5, 10]))
        plain_numbers(panel.yaxis)
    waiting.set_xlabel("time (s)")
    cut = _cut_long_runs(waiting, [run.run_window.end_ns / NS_PER_S for run in ran.values()])
    plain_numbers(waiting.xaxis)
    figure.subplots_adjust(hspace=0.14)
    finish(figure, title, _subtitle(results_by_name, "client queues included", cut))
    return figure


def replica_timelines(results: Results) -> Figure | None:
    """Requests running and waiting on each replica of a fleet, or on its first ones. None for one engine."""
    named = zip(results.facts.replicas, results.replicas, strict=True)
    replicas = {facts.name: replica for facts, replica in list(named)[:_MOST_REPLICAS]}
    return _timelines(replicas, "Load of the replicas over time")


def _cut_long_runs(panel: Axes, ends_s: list[float]) -> str:
    """Bound the time axis so that the shortest run stays visible; says what is cut off."""
    longest, most = max(ends_s), _MOST_TIMES_LONGER * min(ends_s)
    panel.set_xlim(panel.dataLim.x0, min(longest, most))
    return f"cut at {significant(most)} s (longest: {significant(longest)} s)" if longest > most else ""


@house_style()
def metric_bars(results_by_name: Mapping[str, Results]) -> Figure | None:
    """Every metric of every variant as a ratio to the baseline's. None if no metric has a value."""
    summaries = {name: run.summary() for name, run in results_by_name.items()}
    rows = [(metric, [_value(metric, summary) for summary in summaries.values()]) for metric in COMPARED]
    rows = [(metric, values) for metric, values in rows if any(value is not None for value in values)]
    if not rows:
        return None
    names = [clipped(name, _NAME_LENGTH) for name in results_by_name]
    num_rows, panel_in = -(-len(rows) // 2), _BAR_IN * len(names)
    row_in = panel_in + _GAP_IN * (num_rows - 1) / num_rows
    figure, axes = panels([row_in] * num_rows, num_columns=2, is_x_shared=False)
    for panel, (metric, values) in zip(axes, rows, strict=False):
        _draw_bars(panel, metric, values, names)
    for panel in axes[len(rows) :]:
        panel.set_axis_off()
    for panel in axes[::2]:
        panel.set_yticks(range(len(names)), names)
    for panel in axes[len(rows) - 2 : len(rows)]:
        panel.set_xlabel(f"ratio to {names[0]}")
    left_in = 0.3 + 0.083 * max(map(len, names))
    beside_in = _VALUES_IN + 0.15
    figure.subplots_adjust(
        wspace=2 * beside_in / (WIDTH_IN - left_in - _VALUES_IN - beside_in), hspace=_GAP_IN / panel_in
    )
    finish(figure, f"Metrics against {names[0]}", _subtitle(results_by_name), left_in, _VALUES_IN, headroom_in=0.2)
    return figure


def _draw_bars(panel: Axes, metric: Compared, values: list[float | None], names: list[str]) -> None:
    """A bar per variant from ratio 1 to its own; value and ratio in figures on the right."""
    base_row = next((row for row, value in enumerate(values) if value), 0)
    base = values[base_row]
    ratios = [value / base if value is not None and base else None for value in values]
    drawn = [(row, ratio) for row, ratio in enumerate(ratios) if ratio]
    for row, ratio in drawn:
        is_better = (ratio > 1) == metric.is_more_better
        is_equal = abs(ratio - 1) < _ABOUT_EQUAL
        color, label, hatch = (BLUE, "better", "") if is_better else (VERMILION, "worse", "///")
        if not is_equal:
            look: dict[str, Any] = {"hatch": hatch, "edgecolor": "white", "linewidth": 0}
            panel.barh(row, ratio - 1, left=1, height=0.7, color=color, label=label, **look)
        if row != base_row:
            _write_right(panel, row, ratio_text(ratio), _VALUES_IN - 0.06)
    for row, value in enumerate(values):
        _write_right(panel, row, _figures(value, metric.unit), 0.78)
    panel.axvline(1, color=BLACK, lw=1)
    _scale_ratios(panel, [ratio for _, ratio in drawn])
    panel.set_ylim(len(values) - 0.5, -0.5)
    panel.set_yticks([])
    panel.grid(visible=False)
    better = "more" if metric.is_more_better else "less"
    unit = "" if metric.unit == "ms" else f" ({metric.unit})"
    against = f", against {names[base_row]}" if base_row else f", {better} is better"
    panel.set_title(f"{metric.label}{unit}{against}", fontsize=10.5, loc="left", pad=4)


def _write_right(panel: Axes, row: int, text: str, until_in: float) -> None:
    """Figures beside a bar, ending `until_in` inches right of the panel."""
    panel.annotate(
        text,
        (1, row),
        xytext=(72 * until_in, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=10,
        annotation_clip=False,
    )


def _scale_ratios(panel: Axes, ratios: list[float]) -> None:
    """A logarithmic axis with 1 in the middle."""
    most = max([_WHOLE_SCALE, *(max(ratio, 1 / ratio) for ratio in ratios)]) ** 1.08
    panel.set_xscale("log")
    panel.set_xlim(1 / most, most)
    step = max(step for step in (2, 10, 100, 1000, 10 ** int(np.log10(most))) if step <= most**0.9)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticks([1 / step, 1, step], [f"÷{step:,}", "1", f"×{step:,}"])


def _value(metric: Compared, summary: Mapping[str, Any]) -> float | None:
    found: Any = summary
    for key in metric.keys:
        found = found[key]
    return None if found is None else float(found)


def _figures(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    return ms_text(value) if unit == "ms" else significant(value)


def ratio_text(ratio: float) -> str:
    """How many times as much (×) or as little (÷), in three digits or in thousands."""
    sign, times = ("×", ratio) if ratio >= 1 - _ABOUT_EQUAL else ("÷", 1 / ratio)
    return sign + (significant(times) if times < _THOUSANDS_FROM else f"{times / 1000:,.0f}k")


def _subtitle(results_by_name: Mapping[str, Results], *more: str) -> str:
    """What the variants have in common."""
    facts = [run.facts.provenance for run in results_by_name.values()]
    has_one_seed = len({repr(known.get("seed")) for known in facts}) == 1
    baseline = facts[0] if has_one_seed else {**facts[0], "seed": None}
    return run_line(baseline, "" if has_one_seed else "seeds differ", *more)
