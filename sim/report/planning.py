"""Answers to planning questions as rich renderables for a terminal of 80 columns. Nothing prints here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sim.metrics.wording import percent
from sim.report.console import facts_table, number

_CHANGED = {"rate": "load", "prompt_tokens": "prompts", "output_tokens": "answers"}
_HEADING_WIDTH = 12
_HOLDS = {True: "holds", False: "breaks", None: "open"}


def capacity_report(answer: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The boundary, what binds there, what a rise would do, what tokens cost; the answer in one line at the end."""
    yield Text(answer["name"], style="bold")
    yield _targets(answer)
    if answer["headroom"]["changes"]:
        yield _changes(answer["headroom"])
    yield facts_table("", list(_economy(answer["economy"])))
    yield Text(f"note: {answer['replications']} replications of {answer['requests_per_run']:,} requests at two loads")
    for note in (answer["method"], *answer["notes"]):
        yield Text(f"note: {note}")
    yield Text(answer["verdict"], style="bold")


def capacity_comparison_report(comparison: Mapping[str, Any], title: str) -> Iterator[RenderableType]:
    """One row per variant: its capacity and how many times the baseline's that is."""
    yield Text(title, style="bold")
    table = _table("variant", "capacity", "95 % CI", "binding", "ratio", "95 % CI")
    for name, row in comparison["variants"].items():
        boundary, ratio = row["boundary"], row["ratio"]
        ratios = ("×1", "") if ratio is None else (f"×{number(ratio['value'], 3)}", _between(ratio))
        table.add_row(Text(name), number(boundary["value"]), _between(boundary), row["binding"], *ratios)
    yield table
    units = dict.fromkeys(row["boundary"]["unit"] for row in comparison["variants"].values())
    yield Text(f"capacities in {', '.join(units)}; ratios are paired: {comparison['method']}")
    if not comparison["has_same_traffic"]:
        yield Text("note: these scenarios do not describe the same traffic; ratios are not the scheduler's alone")
    yield Text(comparison["verdict"], style="bold")


def replicated_report(said: Mapping[str, Any]) -> Iterator[RenderableType]:
    """A row per figure with its interval; what is unstable has no latencies."""
    yield Text(said["name"], style="bold")
    table = _table("", "mean", "95 % CI", "±")
    for name, figure in said["figures"].items():
        half = (figure["ci_high"] - figure["ci_low"]) / 2
        share = f"{percent(half / figure['value'], 1)}" if figure["value"] else ""
        table.add_row(name, number(figure["value"]), _between(figure), share)
    yield table
    yield Text(f"note: {said['replications']} replications; {said['method']}")
    if said["instability"]:
        yield Text(said["instability"], style="bold")
    elif not said["is_precise"]:
        yield Text(f"note: the tails are not known to {percent(said['precision'], 1)} after so many", style="bold")


def tune_report(said: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Every setting at the scenario's capacity, the knee, the stresses; the recommendation at the end."""
    yield Text(f"{said['name']}, at {number(said['load'])} {said['unit']}", style="bold")
    targets = list(said["settings"][0]["values"])
    table = _table("token\nbudget", "seqs", *targets, "")
    for row in said["settings"]:
        pair = {key: row[key] for key in said["own"]}
        marks = ["yours"] * (pair == said["own"]) + ["best"] * (pair == said["recommended"])
        marks += ["efficient"] * row["is_efficient"]
        table.add_row(*map(str, pair.values()), *(number(row["values"][name]) for name in targets), ", ".join(marks))
    yield table
    yield Text(f"knee of {said['knee']['target']}: {number(said['knee']['at'])} {said['unit']}")
    for name, (own, tuned) in said["stress"].items():
        reached = ", ".join(f"{target} {number(own[target])} -> {number(tuned[target])}" for target in targets)
        yield Text(f"{name}, yours -> recommended: {reached}")
    settings = ", ".join(f"{key} {value}" for key, value in said["recommended"].items())
    yield Text(f"{settings}: {said['reason']}.", style="bold")


def sweep_report(rows: Sequence[Mapping[str, Any]], title: str) -> Iterator[RenderableType]:
    """A row per point: its values and the main figures; errors below."""
    yield Text(title, style="bold")
    figures = {
        "output_tokens_per_s": "tokens\nper s",
        "goodput_requests_per_s": "good\nper s",
        "ttft_p99_ms": "TTFT p99\nms",
        "itl_p99_ms": "ITL p99\nms",
        "e2e_p99_ms": "E2E p99\nms",
    }
    shown = [name for name in figures if any(row[name] is not None for row in rows)]
    fixed = {*_first(rows, "output_tokens_per_s"), "limit", "error"}
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in fixed))
    table = _table(*(_heading(key) for key in keys), *(figures[name] for name in shown), "limited\nby")
    for row in rows:
        cells = [number(row.get(key)) if _is_plain(row.get(key)) else str(row[key]) for key in keys]
        table.add_row(*(Text(cell) for cell in cells), *(number(row[name]) for name in shown), row["limit"] or "error")
    yield table
    for error in dict.fromkeys(row["error"] for row in rows if row["error"]):
        yield Text(f"error: {error}")


def _targets(answer: Mapping[str, Any]) -> Table:
    table = _table("target", f"at {number(answer['measured_at'])}", "limit", "")
    for row in answer["targets"]:
        binds = "binds" if row["target"] == answer["binding"] else ""
        table.add_row(Text(row["target"]), number(row["value"]), number(row["limit"]), binds)
    return table


def _changes(headroom: Mapping[str, Any]) -> Table:
    table = _table(f"from {number(headroom['load'])} on", "", "worst off", "at", "limit")
    for change in headroom["changes"]:
        what = f"{percent(change['factor'] - 1)} more {_CHANGED[change['what']]}"
        if change["what"] != "rate":
            what = f"{percent(change['factor'] - 1)} longer {_CHANGED[change['what']]}"
        worst = [change["worst"] or "", number(change["value"]) if change["worst"] else ""]
        limit = number(change["limit"]) if change["worst"] else ""
        table.add_row(what, _HOLDS[change["holds"]], *worst, limit)
    return table


def _economy(economy: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield (
        "at the boundary",
        f"{number(economy['output_tokens_per_gpu_s'])} output tokens per GPU-second "
        f"({number(economy['total_tokens_per_gpu_s'])} with prompts)",
    )
    if economy["price_per_gpu_hour"] is not None:
        cost = economy["price_per_million_output_tokens"]
        yield (
            "cost",
            f"{number(cost)} per million output tokens, at {number(economy['price_per_gpu_hour'])} per GPU-hour",
        )


def _first(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """The columns from `name` to the end of a row: they are the same in every row."""
    columns = list(rows[0])
    return columns[columns.index(name) :]


def _heading(key: str) -> str:
    """A dotted key on lines that are narrow as columns are: broken at dots, and at underscores where words are long."""
    lines: list[str] = []
    for word in re.findall(r"[^._]+[._]?", key):
        if lines and not lines[-1].endswith(".") and len(lines[-1] + word) <= _HEADING_WIDTH:
            lines[-1] += word
        else:
            lines.append(word)
    return "\n".join(lines)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, str))


def _between(interval: Mapping[str, Any]) -> str:
    return f"{number(interval['ci_low'], 3)} to {number(interval['ci_high'], 3)}"


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right", overflow="fold")
    return table
