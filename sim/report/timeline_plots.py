"""Pictures of a run over time: load, the make-up of iterations, and work for nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from sim.clock import NS_PER_S
from sim.metrics.distribution import Ints
from sim.record import Columns, Tables
from sim.report.series import NUM_COARSE_BINS, Bins, Floats
from sim.report.style import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    finish,
    house_style,
    ms_text,
    panels,
    plain_numbers,
    run_line,
    shade_unmeasured,
)
from sim.request import NEVER
from sim.results import Results

_PANEL_IN = 1.35
_WORTH_A_LINE = 0.05
"""Reserved but unused KV is drawn from this share of the used KV on; below, the lines would coincide."""


@house_style()
def timeline(results: Results) -> Figure | None:
    """Requests running and waiting, KV use and preemptions over the run. None for a fleet, or if nothing ever ran."""
    iterations = results.tables.iterations
    if results.replicas or len(iterations["lane"]) == 0:
        return None
    bins = Bins(results)
    has_preempted = bool(iterations["num_preempted"].any())
    figure, drawn = panels([_PANEL_IN] * 3 + [_PANEL_IN * 0.75] * has_preempted)
    running, waiting, kv = drawn[:3]
    figure.subplots_adjust(hspace=0.16)
    _draw_level(running, bins, bins.mean(iterations["num_running"]), bins.maximum(iterations["num_running"]))
    running.set_ylabel("running\n(requests)")
    _draw_level(waiting, bins, bins.mean_waiting(iterations["num_waiting"]), bins.maximum(iterations["num_waiting"]))
    at_client = bins.mean_waiting_at_client()
    if at_client.any():
        waiting.plot(bins.centers_s, at_client, color=PURPLE, ls=(0, (5, 1.5)), label="held back at the client")
    waiting.set_ylabel("waiting\n(requests)")
    for panel in (running, waiting):
        _count_from_zero(panel)
    _draw_kv(kv, results, bins)
    if has_preempted:
        _draw_preemptions(drawn[3], Bins(results, NUM_COARSE_BINS), iterations["num_preempted"])
    _frame_time(drawn, results, bins)
    finish(figure, "Load over time", run_line(results.facts.provenance, _binning(bins)))
    return figure


@house_style()
def scheduled_tokens(results: Results) -> Figure | None:
    """Tokens per iteration over time, by what they are for. None for a fleet, or if nothing ever ran."""
    iterations = results.tables.iterations
    if results.replicas or len(iterations["lane"]) == 0:
        return None
    bins = Bins(results, NUM_COARSE_BINS)
    figure, (panel, decode) = panels([2.6, 1.1])
    figure.subplots_adjust(hspace=0.12)
    padding = padding_tokens(results.tables)
    parts = {
        "decode": (bins.mean_per_iteration(iterations["num_decode"] - padding["decode"]), BLUE),
        "prefill": (bins.mean_per_iteration(iterations["prefill_tokens"] - padding["prefill"]), ORANGE),
        "padding (for nobody)": (bins.mean_per_iteration(padding["decode"] + padding["prefill"]), GREY),
    }
    peak = bins.maximum(iterations["num_decode"] + iterations["prefill_tokens"])
    panel.stairs(peak, bins.edges_s, fill=True, color="#E3E3E3", label="largest iteration in a bin")
    _draw_stack(panel, bins, parts)
    panel.set_ylabel("tokens per\niteration")
    _draw_stack(decode, bins, {"decode": parts["decode"]})
    decode.set_ylabel("decode\n(tokens)")
    for each in (panel, decode):
        _count_from_zero(each)
    _frame_time([panel, decode], results, bins)
    subtitle = run_line(results.facts.provenance, f"mean over the iterations of {_binning(bins)}")
    finish(figure, "What iterations compute", subtitle)
    return figure


@house_style()
def waste(results: Results) -> Figure | None:
    """Places in the batch kept by finished requests, and padding, over time. None for a fleet, or without either."""
    tables = results.tables
    requests, iterations = tables.requests, tables.iterations
    is_held = (requests["admitted_ns"] != NEVER) & (requests["released_ns"] != NEVER)
    lingers = is_held & (requests["finished_ns"] != NEVER) & (requests["released_ns"] > requests["finished_ns"])
    has_padding = bool(iterations["num_padding_tokens"].any())
    if results.replicas or (not has_padding and not lingers.any()):
        return None
    bins = Bins(results, NUM_COARSE_BINS)
    figure, drawn = panels([_PANEL_IN * 1.6] * (1 + has_padding))
    figure.subplots_adjust(hspace=0.16)
    held = bins.mean_overlap(requests["admitted_ns"][is_held], requests["released_ns"][is_held])
    finished = bins.mean_overlap(requests["finished_ns"][lingers], requests["released_ns"][lingers])
    places = {"at work": (held - finished, BLUE), "finished, place still held": (finished, ORANGE)}
    _draw_stack(drawn[0], bins, places)
    drawn[0].set_ylabel("places held\n(requests)")
    _count_from_zero(drawn[0])
    if has_padding:
        _draw_padding(drawn[1], bins, iterations)
    _frame_time(drawn, results, bins)
    finish(figure, "Places and work for nobody", run_line(results.facts.provenance, _binning(bins)))
    return figure


def padding_tokens(tables: Tables) -> dict[str, Ints]:
    """Rows of each iteration computed for nobody, of its `decode` and of its `prefill` tokens.

    Prefill tokens beyond those of the iteration's chunks are padding; what remains belongs to decodes.
    """
    iterations, chunks = tables.iterations, tables.chunks
    own = np.bincount(chunks["iteration"], weights=chunks["num_tokens"], minlength=len(iterations["lane"]))
    prefill = iterations["prefill_tokens"] - own.astype(np.int64)
    return {"decode": iterations["num_padding_tokens"] - prefill, "prefill": prefill}


def _draw_level(panel: Axes, bins: Bins, mean: Floats, maximum: NDArray[Any]) -> None:
    """A quantity over time: its mean in each bin as a line, its range up to the maximum as a band."""
    panel.stairs(
        np.maximum(maximum, mean),
        bins.edges_s,
        baseline=mean,
        fill=True,
        color=SKY,
        alpha=0.5,
        label="maximum in a bin",
    )
    panel.plot(bins.centers_s, mean, color=BLUE, lw=1.4, label="mean")


def _draw_kv(panel: Axes, results: Results, bins: Bins) -> None:
    """Used blocks in percent of the usable ones, what of them holds tokens, and where preemptions happened."""
    iterations, facts = results.tables.iterations, results.facts
    percent = 100 / facts.usable_blocks
    used = bins.mean(iterations["used_blocks"])
    _draw_level(panel, bins, used * percent, bins.maximum(iterations["used_blocks"]) * percent)
    filled = np.minimum(bins.mean(iterations["live_tokens"]) / facts.block_size, used)
    if used.sum() - filled.sum() > _WORTH_A_LINE * used.sum():
        panel.plot(
            bins.centers_s, filled * percent, color=BLACK, lw=1.2, ls=(0, (1.5, 1.2)), label="filled with tokens"
        )
    panel.set_ylim(0, 103)
    panel.set_yticks([0, 50, 100])
    panel.set_ylabel("KV blocks\nused (%)")


def _draw_preemptions(panel: Axes, bins: Bins, num_preempted: Ints) -> None:
    """When requests lost their KV, as a rate."""
    label = f"preemptions ({int(num_preempted.sum()):,})"
    panel.stairs(bins.per_second(num_preempted), bins.edges_s, fill=True, color=VERMILION, label=label)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=2))
    plain_numbers(panel.yaxis)
    panel.set_ylabel("preempted\n(per s)")


def _draw_padding(panel: Axes, bins: Bins, iterations: Columns) -> None:
    """Padding in percent of all tokens computed."""
    computed = iterations["num_decode"] + iterations["prefill_tokens"]
    share = bins.mean_per_iteration(iterations["num_padding_tokens"], per=computed)
    panel.stairs(100 * share, bins.edges_s, fill=True, color=GREY)
    panel.set_ylim(0, 103)
    panel.set_ylabel("padding\n(% of tokens)")


def _draw_stack(panel: Axes, bins: Bins, parts: dict[str, tuple[Floats, str]]) -> None:
    """Areas on top of each other: name -> height in each bin and colour. Parts that are zero are left out."""
    below = np.zeros(len(bins.centers_s))
    for name, (height, color) in parts.items():
        if not (height > 0).any():
            continue
        above = below + np.maximum(height, 0.0)
        panel.stairs(above, bins.edges_s, baseline=below, fill=True, color=color, label=name)
        below = above


def _count_from_zero(panel: Axes) -> None:
    """A vertical axis for counts: from zero, whole numbers, room above the highest."""
    panel.set_ylim(0, max(1.0, panel.get_ylim()[1], panel.dataLim.y1 * 1.06))
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, steps=[1, 2, 5, 10]))
    plain_numbers(panel.yaxis)


def _frame_time(drawn: list[Axes], results: Results, bins: Bins) -> None:
    """The common time axis, and grey where the run is not measured."""
    run, window = results.run_window, results.window
    run_s = (run.start_ns / NS_PER_S, run.end_ns / NS_PER_S)
    shade_unmeasured(drawn, run_s, (window.start_ns / NS_PER_S, window.end_ns / NS_PER_S))
    drawn[-1].set_xlim(float(bins.edges_s[0]), float(bins.edges_s[-1]))
    drawn[-1].set_xlabel("time (s)")
    plain_numbers(drawn[-1].xaxis)


def _binning(bins: Bins) -> str:
    return f"bins of {ms_text(1000 * float(bins.edges_s[1] - bins.edges_s[0]))}"
