"""Pictures: what is on them, for ordinary and degenerate runs. Every figure drawn here is also rendered."""

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context, rcParams
from matplotlib.image import imread

import sim
from sim.cost.base import Resource
from sim.metrics.facts import RunFacts
from sim.metrics.latency import waits
from sim.metrics.shares import WorkShares
from sim.record import Recorder
from sim.report import comparison_plots, latency_plots, timeline_plots
from sim.report.plots import COMPARISON_PLOTS, RUN_PLOTS, save_all, save_comparison
from sim.report.series import Bins
from sim.report.style import clipped, line_look, marker_look, ms_text, significant
from sim.results import Results

CHAT = {
    "name": "chat",
    "arrivals": {"kind": "poisson", "rate_per_s": 60.0},
    "prompt_tokens": {"kind": "uniform", "low": 1, "high": 200},
    "output_tokens": {"kind": "uniform", "low": 1, "high": 40},
}
VLLM = {"policy": "vllm-v1", "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 512}
STATIC = {"policy": "static", "max_batch_size": 4, "max_queue_delay_ms": 30, "max_model_len": 512}
BASE = {
    "name": "tiny",
    "seed": 1,
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": VLLM | {"num_gpu_blocks": 400},
    "cost": {"kind": "linear", "base_ms": 4.0, "per_prefill_token_us": 50.0},
    "traffic": [CHAT],
    "run": {"num_requests": 200},
}
ONE_TOKEN = CHAT | {"prompt_tokens": 1, "output_tokens": 1, "arrivals": {"kind": "burst", "num_requests": 1, "at_s": 0}}
EQUAL = ONE_TOKEN | {"prompt_tokens": 16, "output_tokens": 3, "arrivals": {"kind": "constant", "rate_per_s": 2.0}}
SPARSE = CHAT | {"arrivals": {"kind": "constant", "rate_per_s": 4.0}, "output_tokens": 2}
GONE = CHAT | {"cancel": {"kind": "after_time", "after_s": 0.001}}
CASES = {
    "ordinary": {"slo": {"p99_ttft_ms": 700, "p90_itl_ms": 20, "mean_e2e_ms": 10, "max_e2e_ms": 10}},
    "kv pressure": {"engine": VLLM | {"num_gpu_blocks": 40}},
    "static": {"engine": STATIC},
    "window": {"engine": STATIC | {"max_queue_delay_ms": 400}, "traffic": [SPARSE], "run": {"num_requests": 20}},
    "client limit": {"traffic": [CHAT | {"max_connections": 2}]},
    "cut": {"run": {"duration_s": 2.0, "warmup_s": 0.5, "drain": False}},
    "three classes": {"traffic": [CHAT | {"name": f"class {i}"} for i in range(3)]},
    "many classes": {"traffic": [CHAT | {"name": f"_{i}$%"} for i in range(24)]},
    "one token": {"traffic": [ONE_TOKEN], "run": {}},
    "equal": {"traffic": [EQUAL], "cost": {"kind": "constant", "step_ms": 10.0}, "run": {"num_requests": 5}},
    "nobody stays": {"traffic": [GONE]},
}


@functools.cache
def a_run(name):
    if name == "empty":
        facts = RunFacts(class_names=("chat",), num_blocks=10, usable_blocks=9, block_size=16)
        nothing = {resource: np.zeros(0) for resource in Resource}
        return Results(Recorder().tables(), facts, nothing, WorkShares(np.zeros(0), np.zeros(0)))
    return sim.run(BASE | CASES[name])


def drawn(draw, shown):
    """The figure, after a rendering."""
    figure = draw(shown)
    figure.canvas.draw()
    return figure


def words(figure):
    return [text.get_text() for text in figure.texts]


def legend(figure):
    return [text.get_text() for each in figure.legends for text in each.get_texts()]


def labels(figure):
    return [(panel.get_xlabel(), panel.get_ylabel()) for panel in figure.axes]


@pytest.mark.parametrize("case", CASES)
def test_every_picture_of_every_run_has_titles_and_units_and_stays_on_the_sheet(case):
    figures = [figure for draw in RUN_PLOTS.values() if (figure := draw(a_run(case))) is not None]
    assert figures
    for figure in figures:
        figure.canvas.draw()
        assert words(figure)[1].startswith("tiny  ·  seed 1  ·  ")
        for panel in figure.axes:
            assert panel.get_ylabel()
            for axis in (panel.xaxis, panel.yaxis):
                low, high = axis.get_view_interval()
                assert np.isfinite([low, high]).all()
                assert low < high
        assert figure.axes[-1].get_xlabel()
        box = figure.get_tightbbox()
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.get_figwidth()
        assert box.y1 <= figure.get_figheight()


def test_the_files_of_a_run(tmp_path: Path):
    written = save_all(a_run("static"), tmp_path / "new")
    names = [
        "latency_cdf",
        "latency_percentiles",
        "latency_causes",
        "ttft_by_prompt",
        "timeline",
        "scheduled_tokens",
        "waste",
    ]
    assert written == [tmp_path / "new" / f"{name}.png" for name in names]  # no ITL: answers are not streamed
    assert sorted((tmp_path / "new").iterdir()) == sorted(written)
    assert imread(written[0]).shape[1] == 1200


def test_a_run_without_anything_leaves_no_picture_and_no_stale_one(tmp_path: Path):
    (tmp_path / "waste.png").write_bytes(b"of an earlier run")
    (tmp_path / "mine.png").write_bytes(b"somebody's")
    assert save_all(a_run("empty"), tmp_path) == []
    assert save_comparison({"a": a_run("empty"), "b": a_run("empty")}, tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["mine.png"]


def test_an_interrupted_drawing_leaves_no_file(tmp_path: Path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_all(a_run("one token"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_settings_of_the_user_neither_matter_nor_change():
    with rc_context({"axes.grid": False, "axes.labelsize": 3}):
        (panel,) = drawn(latency_plots.latency_cdf, a_run("one token")).axes
        assert panel.xaxis.label.get_size() == 11
        assert panel.xaxis.get_gridlines()[0].get_visible()
        assert rcParams["axes.labelsize"] == 3


def test_cdf_lines_run_from_the_least_to_the_largest_latency():
    results = a_run("ordinary")
    figure = drawn(latency_plots.latency_cdf, results)
    (panel,) = figure.axes
    assert labels(figure) == [("latency (ms)", "at or below (%)")]
    assert panel.get_xscale() == "log"
    assert len(panel.lines) == 4
    ttft_ms, percents = panel.lines[0].get_data()
    known = results.to_frame()["ttft_ms"]
    assert (ttft_ms[0], ttft_ms[-1]) == (known.min(), known.max())
    assert (percents[0], percents[1], percents[-1]) == (0, 0, 100)
    assert np.all(np.diff(ttft_ms) >= 0)
    stats = results.summary()["metrics"]["ttft_ms"]
    assert legend(figure)[0] == f"TTFT  p50 {ms_text(stats['p50'])}, p99 {ms_text(stats['p99'])}"


def test_percentile_lines_go_as_far_as_there_are_values_and_limits_stand_at_their_percentile():
    figure = drawn(latency_plots.latency_percentiles, a_run("ordinary"))
    (panel,) = figure.axes
    ttft, itl, *_ = panel.lines
    assert ttft.get_xdata()[-1] == pytest.approx(np.log10(200))
    assert itl.get_xdata()[-1] > 3
    marks = {line.get_label(): [float(x[0]) for x in line.get_data()] for line in panel.lines[4:]}
    assert marks == {"limit p99 TTFT 700 ms": pytest.approx([2, 700]), "limit p90 ITL 20 ms": pytest.approx([1, 20])}


def test_ttft_points_are_the_requests_and_their_lines_percentiles():
    results = a_run("ordinary")
    figure = drawn(latency_plots.ttft_by_prompt, results)
    assert labels(figure) == [("prompt length (tokens)", "TTFT (ms)")]
    assert legend(figure) == ["one request", "p50", "p95"]
    frame, points = results.to_frame(), figure.axes[0].lines[0]
    assert points.get_xdata().tolist() == frame["prompt_tokens"].tolist()
    assert points.get_ydata().tolist() == frame["ttft_ms"].tolist()


def test_points_are_thinned_and_the_subtitle_says_so(monkeypatch):
    monkeypatch.setattr(latency_plots, "_MAX_POINTS", 50)
    figure = drawn(latency_plots.ttft_by_prompt, a_run("ordinary"))
    assert len(figure.axes[0].lines[0].get_xdata()) == 50
    assert words(figure)[1].endswith("50 of 200 requests drawn")


def test_a_few_classes_are_told_apart_and_many_are_not():
    assert legend(drawn(latency_plots.ttft_by_prompt, a_run("three classes")))[:3] == ["class 0", "class 1", "class 2"]
    assert legend(drawn(latency_plots.ttft_by_prompt, a_run("many classes")))[0] == "one request"


def test_itl_by_active_sequences_counts_every_gap():
    results = a_run("ordinary")
    figure = drawn(latency_plots.itl_by_active, results)
    assert labels(figure) == [("", "ITL (ms)"), ("sequences that decoded in the step", "gaps (%)")]
    assert sum(bar.get_height() for bar in figure.axes[1].patches) == pytest.approx(100)
    assert words(figure)[1].endswith(f"{results.summary()['metrics']['itl_ms']['count']:,} gaps")
    assert legend(figure) == ["p50", "p90", "p99"]


def test_the_timeline_shows_preemptions_where_there_are_any():
    results = a_run("kv pressure")
    figure = drawn(timeline_plots.timeline, results)
    count = results.summary()["kv"]["num_preemptions"]
    assert count > 0
    assert legend(figure) == ["maximum in a bin", "mean", "filled with tokens", f"preemptions ({count:,})"]
    assert labels(figure) == [
        ("", "running\n(requests)"),
        ("", "waiting\n(requests)"),
        ("", "KV blocks\nused (%)"),
        ("time (s)", "preempted\n(per s)"),
    ]
    assert len(drawn(timeline_plots.timeline, a_run("ordinary")).axes) == 3


def test_the_timeline_shows_who_waits_at_the_client_and_what_is_not_measured():
    assert "held back at the client" in legend(drawn(timeline_plots.timeline, a_run("client limit")))
    assert "not measured" in legend(drawn(timeline_plots.timeline, a_run("cut")))


def test_areas_of_an_iteration_add_up_to_its_tokens():
    results = a_run("static")
    figure = drawn(timeline_plots.scheduled_tokens, results)
    assert legend(figure) == ["largest iteration in a bin", "decode", "prefill", "padding (for nobody)"]
    iterations, tables = results.tables.iterations, results.tables
    padding = timeline_plots.padding_tokens(tables)
    assert (padding["decode"] + padding["prefill"] == iterations["num_padding_tokens"]).all()
    assert min(padding["decode"].min(), padding["prefill"].min()) == 0
    assert min(padding["decode"].max(), padding["prefill"].max()) > 0
    assert (iterations["prefill_tokens"] - padding["prefill"]).sum() == tables.requests["prompt_tokens"].sum()
    largest, *parts = (patch.get_data() for patch in figure.axes[0].patches)
    assert all((above.baseline == below.values).all() for below, above in itertools.pairwise(parts))
    computed = iterations["num_decode"] + iterations["prefill_tokens"]
    assert parts[-1].values == pytest.approx(Bins(results, 160).mean_per_iteration(computed))
    assert largest.values.max() == computed.max()


def test_waste_is_drawn_only_where_there_is_some():
    figure = drawn(timeline_plots.waste, a_run("static"))
    assert legend(figure) == ["at work", "finished, place still held"]
    assert labels(figure) == [("", "places held\n(requests)"), ("time (s)", "padding\n(% of tokens)")]
    assert timeline_plots.waste(a_run("ordinary")) is None


def test_a_comparison_overlays_all_variants(tmp_path: Path):
    runs = {"static": a_run("static"), "vllm": a_run("ordinary"), "small": a_run("kv pressure")}
    written = save_comparison(runs, tmp_path)
    assert [path.stem for path in written] == list(COMPARISON_PLOTS)
    cdfs = drawn(comparison_plots.latency_cdfs, runs)
    assert [len(panel.lines) for panel in cdfs.axes] == [3, 2, 3]
    assert legend(cdfs) == ["static", "vllm", "small"]
    assert labels(cdfs)[1] == ("ITL (ms)   no values: static", "at or below (%)")
    load = drawn(comparison_plots.timelines, runs)
    assert [len(panel.lines) for panel in load.axes] == [3, 3]
    assert labels(load) == [("", "running\n(requests)"), ("time (s)", "waiting\n(requests)")]


def test_bars_are_ratios_to_the_first_variant_that_has_a_value():
    runs = {"static": a_run("static"), "vllm": a_run("ordinary")}
    figure = drawn(comparison_plots.metric_bars, runs)
    panels = {panel.get_title(loc="left").split(",")[0]: panel for panel in figure.axes}
    static, vllm = (run.summary()["metrics"]["ttft_ms"]["p50"] for run in runs.values())
    (bar,) = panels["TTFT p50"].patches
    assert vllm < static
    assert panels["TTFT p50"].get_legend_handles_labels()[1] == ["better"]
    assert bar.get_width() == pytest.approx(vllm / static - 1)
    texts = [text.get_text() for text in panels["TTFT p50"].texts]
    assert texts == [f"÷{significant(static / vllm)}", ms_text(static), ms_text(vllm)]
    assert panels["ITL p50"].get_title(loc="left") == "ITL p50, against vllm"
    assert panels["ITL p50"].texts[0].get_text() == "–"


def test_large_ratios_are_written_short():
    texts = [comparison_plots.ratio_text(ratio) for ratio in (1.0, 0.25, 4.126, 9_400.0, 225_955.0, 1 / 41_314)]
    assert texts == ["×1", "÷4", "×4.13", "×9,400", "×226k", "÷41k"]


def test_sequences_are_counted_in_whole_numbers():
    panel = drawn(latency_plots.itl_by_active, a_run("equal")).axes[1]
    low, high = panel.get_xlim()
    assert [tick for tick in panel.get_xticks() if low <= tick <= high] == [1]


def test_a_comparison_of_equals_and_of_many(tmp_path: Path):
    same = {"a": a_run("one token"), "b": a_run("one token")}
    assert len(save_comparison(same, tmp_path)) == 3
    assert not any(panel.patches for panel in drawn(comparison_plots.metric_bars, same).axes)
    many = {f"variant number {i} of many, with a name too long to show": a_run("equal") for i in range(24)}
    figure = drawn(comparison_plots.timelines, many)
    assert len(legend(figure)) == 24
    assert figure.axes[0].get_window_extent().y1 < figure.legends[0].get_window_extent().y0
    assert figure.axes[0].get_window_extent().height > 200


def test_a_long_run_does_not_squeeze_the_short_ones():
    runs = {"short": a_run("one token"), "long": a_run("ordinary")}
    figure = drawn(comparison_plots.timelines, runs)
    short_s, long_s = (run.run_window.end_ns / 1e9 for run in runs.values())
    assert long_s > 4 * short_s
    assert figure.axes[0].get_xlim()[1] == pytest.approx(4 * short_s)
    assert words(figure)[1].endswith(f"cut at {significant(4 * short_s)} s (longest: {significant(long_s)} s)")


@pytest.mark.parametrize("case", ["ordinary", "kv pressure", "window", "cut", "equal"])
def test_bins_are_exact(case):
    results = a_run(case)
    bins = Bins(results, num_bins=37)
    spans, edges = bins.spans, bins.edges_ns
    running = results.tables.iterations["num_running"]
    waiting = results.tables.iterations["num_waiting"]
    queue = list(zip(*waits(results.tables.requests, results.run_window.end_ns, "admitted"), strict=True))
    mean, maximum, mean_waiting = [], [], []
    for low, high in itertools.pairwise(edges):
        own = np.maximum(np.minimum(spans.end_ns, high) - np.maximum(spans.start_ns, low), 0)
        mean.append((running * own).sum() / (high - low))
        maximum.append(running[own > 0].max(initial=0))
        idle = [(max(a, low), min(b, high)) for a, b in zip(*spans.idle(), strict=True) if b > low and a < high]
        idle_ns = sum(max(min(b, end) - max(a, start), 0) for a, b in idle for start, end in queue)
        mean_waiting.append(((waiting * own).sum() + idle_ns) / (high - low))
    assert bins.mean(running) == pytest.approx(mean)
    assert bins.maximum(running).tolist() == maximum
    assert bins.mean_waiting(waiting) == pytest.approx(mean_waiting, abs=1e-6)
    assert bins.total(running).sum() == pytest.approx(running.sum())


def test_per_iteration_means_weigh_iterations_alike():
    results = a_run("ordinary")
    bins = Bins(results, num_bins=1)
    num_decode, prefill = (results.tables.iterations[name] for name in ("num_decode", "prefill_tokens"))
    assert bins.mean_per_iteration(num_decode)[0] == pytest.approx(num_decode.mean())
    assert bins.mean_per_iteration(num_decode, per=prefill)[0] == pytest.approx(num_decode.sum() / prefill.sum())
    run_s = results.run_window.duration_ns / 1e9
    assert bins.per_second(num_decode)[0] == pytest.approx(num_decode.sum() / run_s)


def test_looks_differ():
    lines = [tuple(map(str, (line_look(i)["color"], line_look(i)["linestyle"]))) for i in range(28)]
    markers = [tuple(marker_look(i).values()) for i in range(49)]
    assert (len(set(lines)), len(set(markers))) == (28, 49)


@pytest.mark.parametrize(
    ("value_ms", "shown"),
    [(None, "–"), (0.0, "0 ms"), (0.01234, "0.0123 ms"), (62.0, "62 ms"), (999.4, "999 ms"), (12_345.6, "12.3 s")],
)
def test_durations_have_three_digits(value_ms, shown):
    assert ms_text(value_ms) == shown


def test_names_are_clipped_and_kept_in_legends():
    assert [clipped("abcdef", 4), clipped("abc", 4), clipped("_a", 4)] == ["abc…", "abc", " _a"]
