"""The explanation of a run as rich renderables for a terminal of 80 columns. Nothing prints here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sim.metrics.bands import PHRASES
from sim.metrics.causes import Cause
from sim.report.console import limits_line, number

_COMPARED = {
    "goodput_requests_per_s": "good\nper s",
    "output_tokens_per_s": "tokens\nper s",
    "ttft_mean_ms": "TTFT\nmean",
    "ttft_p99_ms": "TTFT\np99",
    "itl_p99_ms": "ITL\np99",
    "e2e_mean_ms": "E2E\nmean",
}

_WORTH_A_ROW = 0.001
"""Causes that are nowhere a larger part have no row of their own."""


def why_report(explanation: Mapping[str, Any], title: str) -> Iterator[RenderableType]:
    """Causes by band, bounds, the elasticity table where there is one, and the sentences that they add up to."""
    yield Text(title, style="bold")
    causes = explanation["causes"]
    for metric in ("ttft", "itl"):
        if causes[metric]:
            yield _causes_table(metric.upper(), causes[metric])
    for verdict in causes["verdicts"]:
        yield Text(verdict)
    yield ""
    bounds = explanation["bounds"]
    if bounds["rows"]:
        yield _bounds_table(bounds["rows"])
        yield Text(bounds["verdict"])
    if explanation["next_change"] is not None:
        yield ""
        yield _elasticity_table(explanation["next_change"])
        yield Text.assemble(("next change: ", "bold"), explanation["next_change"]["advice"])
    yield limits_line(explanation["limits"])


def _causes_table(metric: str, bands: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per cause, one column per band; milliseconds that add up to the last row."""
    table = _table(f"what {metric} is made of, ms")
    table.add_column("")
    for band in bands:
        table.add_column(band if band == "all" else f"around {band}", justify="right")
    for cause in Cause:
        parts = [band["parts_ms"].get(cause.value) for band in bands.values()]
        if any(
            (part or 0.0) > _WORTH_A_ROW * band["mean_ms"] for part, band in zip(parts, bands.values(), strict=True)
        ):
            table.add_row(PHRASES[cause], *(number(part, 3) for part in parts))
    table.add_row("together", *(number(band["mean_ms"], 3) for band in bands.values()), style="bold")
    return table


def _bounds_table(rows: list[Mapping[str, Any]]) -> Table:
    table = _table("beside what no server can beat")
    table.add_column("", overflow="fold")
    for head in ("simulated", "bound"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in rows:
        unit = f", {row['unit']}" if row["unit"] == "ms" else ""
        table.add_row(row["name"] + unit, number(row["simulated"]), number(row["bound"]), row["remark"])
    return table


def _elasticity_table(next_change: Mapping[str, Any]) -> Table:
    """By how many percent each metric changes with more of each resource."""
    changes = next_change["changes"]
    shown = {key: head for key, head in _COMPARED.items() if next_change["base"][key] is not None}
    table = _table("with more of one resource, on the same requests: change in %")
    table.add_column("", overflow="fold")
    for head in ("more\n%", *shown.values()):
        table.add_column(head, justify="right", no_wrap=True)
    for change in changes:
        cells = [_change(change["ratios"][key]) for key in shown]
        table.add_row(change["label"], f"{100 * (change['factor'] - 1):.0f}", *cells)
    return table


def _change(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    return f"{100 * (ratio - 1):+.1f}" if abs(ratio - 1) >= 0.0005 else "0"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
