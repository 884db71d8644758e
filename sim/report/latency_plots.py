"""Pictures of latencies: their distributions, and what they depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWN
from matplotlib.ticker import MaxNLocator

from sim.clock import NS_PER_MS
from sim.metrics.distribution import Distribution, Ints, percent_of
from sim.report.series import Bucket, Floats, buckets_along_axis, equal_width_buckets
from sim.report.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    PALETTE,
    VERMILION,
    clipped,
    finish,
    house_style,
    line_look,
    marker_look,
    ms_text,
    panels,
    plain_numbers,
    run_line,
    scale_values,
)
from sim.results import Results

SHOWN = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}
"""Metric -> its name in pictures."""

_HEIGHT_IN = 3.3
_MOST_NINES = 4.0
_MAX_POINTS = 4000
_MAX_BUCKETS = 16
_NUM_PROMPT_BUCKETS = 10
_MIN_IN_BUCKET = 10
_MIN_ABOVE = 2
"""Values above a percentile that a bucket needs to show it."""
_MAX_CLASSES = len(PALETTE)


@house_style()
def latency_cdf(results: Results) -> Figure | None:
    """Which share of requests (ITL: of gaps) stays below which latency. None without any latency."""
    known = _known(results)
    if not known:
        return None
    figure, (panel,) = panels([_HEIGHT_IN])
    for metric, values in known.items():
        label = f"{SHOWN[metric]}  p50 {_value(values, 50)}, p99 {_value(values, 99)}"
        draw_cdf(panel, values, label, _look(metric))
    frame_cdf(panel, known.values())
    panel.set_xlabel("latency (ms)")
    finish(figure, "How latencies are distributed", _subtitle(results))
    return figure


@house_style()
def latency_percentiles(results: Results) -> Figure | None:
    """Latency at each percentile, every further nine as wide as the one before; with the SLO. None without any."""
    known = _known(results)
    if not known:
        return None
    figure, (panel,) = panels([_HEIGHT_IN])
    most_nines = min(max(1.0, *(np.log10(values.count) for values in known.values())), _MOST_NINES)
    shown: list[float] = []
    for metric, values in known.items():
        nines = np.linspace(0, min(max(1.0, np.log10(values.count)), most_nines), 300)
        latency_ms = curve_ms(values, 100 * (1 - 10**-nines))
        panel.plot(nines, latency_ms, label=SHOWN[metric], **_look(metric))
        shown += [latency_ms[0], latency_ms[-1]]
    shown += _draw_slo(panel, results, set(known))
    scale_values(panel.yaxis, min(shown), max(shown))
    ticks = np.arange(int(most_nines) + 1)
    panel.set_xticks([*ticks, np.log10(2)], [*(f"{100 * (1 - 10.0**-nines):.6g}" for nines in ticks), "50"])
    panel.set_xlim(0, most_nines)
    panel.set_xlabel("percentile (%)")
    panel.set_ylabel("latency (ms)")
    finish(figure, "Latency by percentile", _subtitle(results))
    return figure


@house_style()
def ttft_by_prompt(results: Results) -> Figure | None:
    """TTFT of each request against the length of its prompt, with percentiles by length. None without a TTFT."""
    latency, requests = results.latencies["ttft"], results.tables.requests
    rows = np.flatnonzero(latency.is_known & results.is_measured)
    if len(rows) == 0:
        return None
    prompt, ttft_ns = requests["prompt_tokens"][rows], np.asarray(latency.values_ns[rows], dtype=np.int64)
    figure, (panel,) = panels([_HEIGHT_IN])
    thinned = np.arange(0, len(rows), -(-len(rows) // _MAX_POINTS))
    _draw_points(panel, results, requests["class_index"][rows][thinned], prompt[thinned], ttft_ns[thinned])
    scale_values(panel.xaxis, float(prompt.min()), float(prompt.max()))
    buckets = buckets_along_axis(prompt, ttft_ns, panel.get_xscale() == "log", _NUM_PROMPT_BUCKETS)
    _draw_percentiles(panel, buckets, (50, 95), (BLACK, BLACK))
    scale_values(panel.yaxis, ttft_ns.min() / NS_PER_MS, ttft_ns.max() / NS_PER_MS)
    panel.set_xlabel("prompt length (tokens)")
    panel.set_ylabel("TTFT (ms)")
    thinning = "" if len(thinned) == len(rows) else f"{len(thinned):,} of {len(rows):,} requests drawn"
    finish(figure, "Time to first token against prompt length", _subtitle(results, thinning))
    return figure


@house_style()
def itl_by_active(results: Results) -> Figure | None:
    """ITL against the number of sequences that decoded in the step, and how many gaps fell there. None without ITL."""
    gaps = results.tokens.gaps(results.is_measured & results.facts.is_streaming)
    active = results.tables.iterations["num_decode"][gaps.iteration]
    buckets = equal_width_buckets(active, gaps.values_ns, gaps.weights, _MAX_BUCKETS)
    if not buckets:
        return None
    figure, (panel, shares) = panels([_HEIGHT_IN * 0.72, _HEIGHT_IN * 0.28])
    figure.subplots_adjust(hspace=0.1)
    drawn_ms = _draw_percentiles(panel, buckets, (50, 90, 99), (BLUE, GREEN, VERMILION))
    scale_values(panel.yaxis, min(drawn_ms), max(drawn_ms))
    panel.set_ylabel("ITL (ms)")
    count = sum(bucket.values.count for bucket in buckets)
    edges = [(bucket.low - 0.5, bucket.high - bucket.low + 1) for bucket in buckets]
    heights = [100 * bucket.values.count / count for bucket in buckets]
    shares.bar(
        [left for left, _ in edges], heights, [width for _, width in edges], align="edge", color=GREY, ec="white"
    )
    shares.set_ylim(0, 1.1 * max(heights))
    shares.set_ylabel("gaps (%)")
    shares.set_xlabel("sequences that decoded in the step")
    shares.set_xlim(edges[0][0], sum(edges[-1]))
    shares.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    plain_numbers(shares.xaxis)
    finish(figure, "Inter-token latency against active sequences", _subtitle(results, f"{count:,} gaps"))
    return figure


def draw_cdf(panel: Axes, values: Distribution, label: str, look: Mapping[str, Any]) -> None:
    """One distribution (not empty) as a line of a CDF."""
    percents = np.concatenate([np.linspace(0, 99, 199), np.linspace(99, 100, 41)[1:]])
    latency_ms = curve_ms(values, percents)
    panel.plot(np.append(latency_ms[0], latency_ms), np.append(0.0, percents), label=label, **look)


def frame_cdf(panel: Axes, drawn: Iterable[Distribution]) -> None:
    """The axes of a CDF of these (not empty) distributions, but for the label of x."""
    ends = [value for values in drawn for value in curve_ms(values, np.array([0.0, 100.0]))]
    scale_values(panel.xaxis, min(ends), max(ends))
    panel.set_ylim(0, 102)
    panel.set_ylabel("at or below (%)")


def curve_ms(values: Distribution, percents: Floats) -> Floats:
    """The percentiles of a distribution of nanoseconds that is not empty, in milliseconds."""
    return np.array([values.percentile(percent) or 0.0 for percent in percents.tolist()]) / NS_PER_MS


def _known(results: Results) -> dict[str, Distribution]:
    """The latencies that the run has."""
    found = {metric: results.distribution(metric) for metric in SHOWN}
    return {metric: values for metric, values in found.items() if values.count}


def _look(metric: str) -> dict[str, Any]:
    """A metric looks the same in every picture of one run."""
    return line_look(list(SHOWN).index(metric))


def _value(values: Distribution, percent: float) -> str:
    return ms_text((values.percentile(percent) or 0.0) / NS_PER_MS)


def _subtitle(results: Results, *more: str) -> str:
    count = int(np.count_nonzero(results.is_measured))
    measured = f"{count:,} request{'' if count == 1 else 's'} measured"
    censored = {SHOWN[name] for key in results.censored if (name := key.removesuffix("_ms")) in SHOWN}
    caution = f"unfinished requests would change {', '.join(sorted(censored))}" if censored else ""
    return run_line(results.facts.provenance, measured, *more, caution)


def _draw_slo(panel: Axes, results: Results, drawn: set[str]) -> list[float]:
    """Mark the run's limits on percentiles of the drawn metrics; returns their heights."""
    heights = []
    for term in results.slo_terms:
        percent = percent_of(term.statistic)
        if percent is None or percent >= 100 or term.metric not in drawn:
            continue
        label = f"limit {term.statistic} {SHOWN[term.metric]} {ms_text(term.limit_ms)}"
        nines = -np.log10(1 - percent / 100)
        color = _look(term.metric)["color"]
        panel.plot(nines, term.limit_ms, ls="", marker=CARETDOWN, ms=10, color=color, mec=BLACK, label=label, zorder=5)
        heights.append(term.limit_ms)
    return heights


def _draw_points(panel: Axes, results: Results, class_index: Ints, prompt: Ints, ttft_ns: Ints) -> None:
    """One point per request; by class where there are a few of them."""
    names = results.facts.class_names
    is_told_apart = 1 < len(names) <= _MAX_CLASSES
    groups = [(name, class_index == i) for i, name in enumerate(names)] if is_told_apart else []
    for i, (name, mine) in enumerate(groups or [("one request", np.ones(len(prompt), dtype=np.bool_))]):
        look = marker_look(i) if is_told_apart else {"color": BLUE, "marker": "o"}
        alpha = 0.35 if len(prompt) > 500 else 0.7
        panel.plot(
            prompt[mine], ttft_ns[mine] / NS_PER_MS, ls="", ms=4, mew=0, alpha=alpha, label=clipped(name), **look
        )


def _draw_percentiles(
    panel: Axes, buckets: list[Bucket], percents: tuple[int, ...], colors: tuple[str, ...]
) -> list[float]:
    """A line through the buckets per percentile; returns the heights in ms.

    Buckets with too few values to have such a percentile are left out, unless that leaves nothing of the median.
    """
    heights: list[float] = []
    for i, (percent, color) in enumerate(zip(percents, colors, strict=True)):
        least = max(_MIN_IN_BUCKET, _MIN_ABOVE * 100 / (100 - percent))
        enough = [bucket for bucket in buckets if bucket.values.count >= least]
        shown = enough or (buckets if percent == 50 else [])
        if shown:
            look = line_look(i) | {"color": color, "marker": "osD"[i], "ms": 4.5}
            values_ms = [curve_ms(bucket.values, np.array([percent]))[0] for bucket in shown]
            panel.plot([bucket.middle for bucket in shown], values_ms, label=f"p{percent}", **look)
            heights += values_ms
    return heights
