"""A picture of what latencies are made of."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sim.metrics.bands import PHRASES
from sim.metrics.causes import Cause
from sim.metrics.summary import CauseBand
from sim.report.style import GREY, PALETTE, finish, house_style, ms_text, panels, run_line
from sim.results import Results

_BAR_IN = 0.34
_FRAME_IN = 0.55
_VALUES_IN = 0.95
"""Room right of a panel for the mean of each bar."""
_WORTH_A_COLOUR = 0.02
"""Causes that never make up as large a part of a bar are drawn together."""


@house_style()
def latency_causes(results: Results) -> Figure | None:
    """TTFT and ITL around some percentiles, each bar cut into what it was spent on. None without any latency."""
    reports = {"TTFT": results.causes.ttft, "ITL": results.causes.itl}
    shown = {metric: bands for metric, bands in reports.items() if bands}
    if not shown:
        return None
    figure, axes = panels([_BAR_IN * len(bands) + _FRAME_IN for bands in shown.values()])
    everything = [band for bands in shown.values() for band in bands.values()]
    looks = _looks(everything)
    for panel, (metric, bands) in zip(axes, shown.items(), strict=True):
        for position, band in enumerate(reversed(bands.values())):
            _draw_bar(panel, position, band, looks)
        panel.set_yticks(range(len(bands)), list(reversed(bands)))
        panel.set_ylabel(metric)
        panel.set_xlim(0, 100)
        panel.grid(visible=False, axis="y")
    axes[-1].set_xlabel("share of the mean latency around each percentile (%)")
    figure.subplots_adjust(hspace=0.25)
    subtitle = run_line(
        results.facts.provenance, f"{results.window.has_arrival_of(results.tables.requests).sum():,} requests"
    )
    finish(figure, "What latencies are made of", subtitle, right_in=_VALUES_IN)
    return figure


def _looks(bands: list[CauseBand]) -> dict[Cause, dict[str, Any]]:
    """Colour and hatching of every cause that deserves one; the order of causes is the same in every picture."""
    named = [
        cause
        for cause in Cause
        if any(band.parts_ms.get(cause, 0.0) >= _WORTH_A_COLOUR * band.mean_ms > 0 for band in bands)
    ]
    return {
        cause: {
            "color": PALETTE[i % len(PALETTE)],
            "hatch": "//" * (i // len(PALETTE)),
            "edgecolor": "white",
            "label": PHRASES[cause],
        }
        for i, cause in enumerate(named)
    }


def _draw_bar(panel: Axes, position: int, band: CauseBand, looks: dict[Cause, dict[str, Any]]) -> None:
    left = 0.0
    whole_ms = band.mean_ms or 1.0
    for cause, look in looks.items():
        width = 100 * band.parts_ms.get(cause, 0.0) / whole_ms
        panel.barh(position, width, left=left, linewidth=0.5, **look)
        left += width
    if left < 100 * (1 - _WORTH_A_COLOUR / 4):
        panel.barh(position, 100 - left, left=left, color=GREY, linewidth=0.5, label="other")
    panel.annotate(
        ms_text(band.mean_ms), (100, position), xytext=(6, 0), textcoords="offset points", va="center", fontsize=10.5
    )
