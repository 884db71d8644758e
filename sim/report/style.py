"""How every picture looks: palette, sheet, axes. Legible when shown at half size.

Colours are those of Okabe and Ito (jfly.uni-koeln.de/color, "Color Universal Design"), which people with
any common colour blindness tell apart; dashes and markers repeat the distinction for prints in grey.
Matplotlib is used without pyplot: no global figure list, and nothing that needs a display.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sim.storage import atomic_path

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#6B6B6B"
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1.5, 1.2)))
_MARKERS = "osD^vPX"

WIDTH_IN = 8.0
DPI = 150
_LEFT_IN, _RIGHT_IN, _BOTTOM_IN = 1.05, 0.3, 0.6
_TITLES_IN, _LEGEND_ROW_IN, _HEADER_GAP_IN = 0.68, 0.2, 0.12
_LABEL_LENGTH = 38
_LOG_FROM_RATIO = 8

_RC: dict[Any, Any] = {
    "font.size": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.fontsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "text.parse_math": False,  # a name may hold a dollar sign
    "path.simplify_threshold": 0.5,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw and save inside this (also as a decorator); the user's own matplotlib settings come back afterwards."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # names in any script
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def line_look(index: int, num_lines: int | None = None) -> dict[str, Any]:
    """Colour and dashes of the `index`-th of several lines; no two of the first 28 look alike.

    Of `num_lines` that may coincide the first is the thickest, so that none hides another.
    """
    turn = index // len(PALETTE)
    width = 1.8 if num_lines is None else 1.6 + 1.8 * (1 - (index + 1) / num_lines)
    return {
        "linewidth": width,
        "color": PALETTE[index % len(PALETTE)],
        "linestyle": _DASHES[(index + turn * 2) % len(_DASHES)],
    }


def marker_look(index: int) -> dict[str, Any]:
    """Colour and marker of the `index`-th of several kinds of points; no two of the first 49 look alike."""
    turn = index // len(PALETTE)
    return {"color": PALETTE[index % len(PALETTE)], "marker": _MARKERS[(index + turn) % len(_MARKERS)]}


def panels(heights_in: Sequence[float], num_columns: int = 1, is_x_shared: bool = True) -> tuple[Figure, list[Axes]]:
    """An empty sheet with rows of panels of these heights (inches, gaps included), from left to right."""
    figure = Figure(figsize=(WIDTH_IN, sum(heights_in)), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(heights_in), num_columns, sharex=is_x_shared, squeeze=False, height_ratios=list(heights_in)
    )
    return figure, list(axes.ravel())


def finish(
    figure: Figure,
    title: str,
    subtitle: str,
    left_in: float = _LEFT_IN,
    right_in: float = _RIGHT_IN,
    headroom_in: float = 0.0,
) -> None:
    """Put titles and one legend (of everything that has a label) above the panels. Mutates the figure.

    The sheet grows by what that takes, so panels keep their height and nothing covers data. `headroom_in` is
    left free above the first panels.
    """
    handles = _labelled(figure.axes)
    num_columns = _num_columns(list(handles))
    header_in = _TITLES_IN + math.ceil(len(handles) / num_columns) * _LEGEND_ROW_IN + _HEADER_GAP_IN + headroom_in
    height_in = figure.get_figheight() + header_in + _BOTTOM_IN
    figure.set_size_inches(WIDTH_IN, height_in)
    figure.subplots_adjust(
        left=left_in / WIDTH_IN,
        right=1 - right_in / WIDTH_IN,
        bottom=_BOTTOM_IN / height_in,
        top=1 - header_in / height_in,
    )
    figure.align_ylabels()
    figure.text(0.015, 1 - 0.11 / height_in, title, fontsize=14, fontweight="bold", va="top")
    figure.text(0.015, 1 - 0.39 / height_in, clipped(subtitle, 105), color=GREY, fontsize=10.5, va="top")
    if handles:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="upper left",
            bbox_to_anchor=(0.0155, 1 - _TITLES_IN / height_in),
            ncols=num_columns,
            frameon=False,
            borderaxespad=0.0,
            borderpad=0.0,
            labelspacing=0.3,
            columnspacing=1.6,
        )


def _labelled(axes: Sequence[Axes]) -> dict[str, Artist]:
    """Label -> artist, each label once."""
    found: dict[str, Artist] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return found


def _num_columns(labels: Sequence[str]) -> int:
    """How many legend entries fit beside each other."""
    longest = max(map(len, labels), default=0)
    return max(1, int((WIDTH_IN - 0.3) / (0.65 + 0.078 * longest)))


def clipped(text: str, length: int = _LABEL_LENGTH) -> str:
    """At most `length` characters of a name; matplotlib would leave one that starts with _ out of legends."""
    text = f" {text}" if text.startswith("_") else text
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def scale_values(axis: Axis, low: float, high: float) -> None:
    """Scale an axis for positive values from `low` to `high`: logarithmic if they span a lot, else linear."""
    panel = axis.axes
    is_x = axis is panel.xaxis
    set_limits = panel.set_xlim if is_x else panel.set_ylim
    if low > 0 and high / low >= _LOG_FROM_RATIO:
        (panel.set_xscale if is_x else panel.set_yscale)("log")
        margin = (high / low) ** 0.04
        set_limits(low / margin, high * margin)
        is_short = math.log10(high / low) <= 2.5
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if is_short else (1,), numticks=20))
        axis.set_minor_locator(LogLocator(subs=range(2, 10), numticks=200))
        axis.set_minor_formatter(NullFormatter())
    elif low >= high:
        set_limits(0, 2 * high if high > 0 else 1)
    else:
        margin = 0.05 * (high - low)
        set_limits(0 if low < 0.5 * high else low - margin, high + margin)
    plain_numbers(axis)


def plain_numbers(axis: Axis) -> None:
    """Tick labels like 0.5, 20, 10,000, 300k and 2M."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def _plain(value: float) -> str:
    if abs(value) < 100_000:
        return f"{value:,.10g}"
    return f"{value / 1e3:,.10g}k" if abs(value) < 1e6 else f"{value / 1e6:,.10g}M"


def shade_unmeasured(axes: Sequence[Axes], run_s: tuple[float, float], measured_s: tuple[float, float]) -> None:
    """Grey out the parts of a run (start and end, seconds) that are outside the measurement window."""
    for start, end in ((run_s[0], measured_s[0]), (measured_s[1], run_s[1])):
        if end > start:
            for panel in axes:
                panel.axvspan(start, end, color="#EEEEEE", zorder=0, label="not measured")


def run_line(provenance: Mapping[str, Any], *more: str) -> str:
    """The subtitle: scenario, seed and what else there is to say."""
    name = provenance.get("scenario", {}).get("name")
    seed = provenance.get("seed")
    known = [str(name) if name else "", f"seed {seed}" if seed is not None else ""]
    return "  ·  ".join(filter(None, (*known, *more)))


def ms_text(value_ms: float | None) -> str:
    """A duration for a legend or a bar: 0.35 ms, 62 ms, 12.3 s."""
    if value_ms is None:
        return "–"
    value, unit = (value_ms, "ms") if value_ms < 1000 else (value_ms / 1000, "s")
    return f"{significant(value)} {unit}"


def significant(value: float) -> str:
    """Three significant digits, thousands separated, no exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    shown = f"{value:,.{min(digits, 6)}f}"
    return re.sub(r"\.?0+$", "", shown) if "." in shown else shown


@house_style()
def write_png(figure: Figure, path: Path) -> None:
    """Write a figure; the file appears under its name only when it is complete."""
    with atomic_path(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=DPI)
