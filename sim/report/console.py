"""Summaries, comparisons and derivations as rich renderables for a terminal of 80 columns. Nothing prints here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sim.metrics.coverage import coverage_line, uncertainty_line
from sim.metrics.wording import percent

_LATENCIES = {
    "ttft_ms": "TTFT, ms",
    "itl_ms": "ITL, ms",
    "tpot_ms": "TPOT, ms",
    "ntpot_ms": "NTPOT, ms",
    "e2e_ms": "E2E, ms",
    "queue_ms": "queue, ms",
    "call_latency_ms": "call, ms",
}
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p999", "max")
_COMPARED = {
    "output_tokens_per_s": ("tokens\nper s", 1.0),
    "goodput_requests_per_s": ("good\nper s", 1.0),
    "ttft_mean_ms": ("TTFT\nmean, s", 1e-3),
    "ttft_p99_ms": ("TTFT\np99, s", 1e-3),
    "itl_p99_ms": ("ITL p99\nms", 1.0),
    "e2e_mean_ms": ("E2E\nmean, s", 1e-3),
    "e2e_p99_ms": ("E2E\np99, s", 1e-3),
    "makespan_s": ("make-\nspan, s", 1.0),
}
"""Metric -> column head and factor to its unit."""
GIB = 2**30
_MOST_REPLICAS = 16


def number(value: Any, digits: int = 4) -> str:
    """A figure with about `digits` significant digits and thousands separated; a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else str(value).lower()
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if 0 < abs(value) < 10**-digits:
        return f"{value:.0e}"
    return f"{value:.{digits}g}"


_SPELLED = {"kv": "KV", "gib": "GiB", "gb/s": "GB/s", "tb/s": "TB/s", "tflops": "TFLOPS"}
"""Words of a key that a heading writes otherwise."""


def rows_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows of equal keys as a table; numbers are right-aligned."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, key in enumerate(rows[0]):
        is_number = all(row[key] is None or isinstance(row[key], (int, float)) for row in rows)
        header = "\n".join(_SPELLED.get(word, word) for word in key.replace("_per_", "/").split("_"))
        table.add_column(header, justify="right" if is_number else "left", no_wrap=is_number or i == 0, overflow="fold")
    for row in rows:
        table.add_row(*(number(value, 6) for value in row.values()))
    return table


_AXES = {
    "batch": "who joins",
    "step": "a step",
    "order": "in it first",
    "kv_admission": "KV at admission",
    "preemption": "KV runs out",
    "victim": "victim",
    "head_of_line": "the next one does not fit",
    "prefill_pacing": "pacing",
    "queue_order": "queue",
    "limits": "limits",
}
"""Axes of the grid and their headings."""


def policies_report(
    policies: Sequence[Mapping[str, Any]],
    engine_options: Sequence[Mapping[str, Any]],
    kinds: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Iterator[RenderableType]:
    """The grid of engines and axes; then what each policy does, whom it copies, how far to trust that, its options.

    `kinds`: what those options can be that name a kind.
    """
    yield from grid_report(policies)
    for row in policies:
        yield from policy_report(row)
        yield ""
    yield rows_table("options of every policy", engine_options)
    for option, rows in kinds.items():
        yield ""
        yield rows_table(f"kinds of {option}", rows)


def policy_report(policy: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What one policy does, whom it copies, how far to trust that, and its options."""
    yield Text.assemble((policy["policy"], "bold"), f": {policy['batching']}")
    yield facts_table("", [(key, policy[key]) for key in ("copies", "proof", "note")])
    yield rows_table("", policy["options"])


def grid_report(policies: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """Every engine with whom it copies and what proves it; then each axis, and who has which value on it by default."""
    yield rows_table("engines", [{"policy": r["policy"], "copies": r["copies"], "proof": r["proof"]} for r in policies])
    yield ""
    yield Text("axes on which they differ, and where each stands by default", style="bold")
    for axis, heading in _AXES.items():
        engines: dict[str, list[str]] = {}
        for row in policies:
            if row["axes"]:
                engines.setdefault(row["axes"][axis], []).append(row["policy"])
        yield facts_table(heading, [(value, ", ".join(names)) for value, names in engines.items()], indent=2)
    yield ""


def facts_table(title: str, facts: Sequence[tuple[str, str]], indent: int = 0) -> Table:
    """Two columns: what, indented by so many spaces, and how much."""
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for what, how_much in facts:
        table.add_row(Padding(Text(what), (0, 0, 0, indent)), Text(how_much))
    return table


def summary_report(summary: Mapping[str, Any], title: str) -> Iterator[RenderableType]:
    """The summary of one run: latencies, what flowed, what was used, and what limits it in the last line."""
    yield Text(title, style="bold")
    calls = summary["calls"]
    yield latency_table(summary["metrics"] | ({"call_latency_ms": calls["call_latency_ms"]} if calls else {}))
    yield facts_table("", list(_facts(summary)))
    if summary["replicas"]:
        yield _replicas_table(summary["replicas"])
    for note in _notes(summary):
        yield Text(f"note: {note}")
    if summary["fairness"]:
        yield from fairness_report(summary["fairness"])
    yield limits_line(summary["limits"])


def comparison_report(comparison: Mapping[str, Any], title: str) -> Iterator[RenderableType]:
    """One row per variant, each value above its ratio to the first variant; then who wins and why."""
    yield Text(title, style="bold")
    rows = comparison["table"]
    shown = [name for name in _COMPARED if any(row["values"][name] is not None for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("variant", overflow="fold")
    for name in shown:
        table.add_column(_COMPARED[name][0], justify="right", no_wrap=True)
    table.add_column("limited\nby", no_wrap=True)
    for row in rows:
        cells = [_with_ratio(row["values"][name], row["ratios"][name], _COMPARED[name][1]) for name in shown]
        table.add_row(Text(row["variant"]), *cells, row["limit"])
    yield table
    yield Text(f"× and ÷: so many times the value of {comparison['baseline']}, or so many times less")
    if not comparison["has_same_traffic"]:
        yield Text("note: these scenarios did not meet the same requests; differences are not the scheduler's alone")
    yield Text(comparison["verdict"], style="bold")


def _with_ratio(value: float | None, ratio: float | None, factor: float) -> str:
    shown = number(None if value is None else value * factor, 3)
    if not ratio:
        return shown
    return f"{shown}\n×{number(ratio, 3)}" if ratio > 0.1 else f"{shown}\n÷{number(1 / ratio, 3)}"


def latency_table(metrics: Mapping[str, Mapping[str, Any]]) -> Table:
    """Percentiles of every latency that the run has, one row for each key of `metrics`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for statistic in _STATISTICS:
        table.add_column({"p999": "p99.9"}.get(statistic, statistic), justify="right")
    for key, label in _LATENCIES.items():
        if key in metrics:
            table.add_row(label, *(number(metrics[key].get(statistic)) for statistic in _STATISTICS))
    return table


def fairness_report(fairness: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What each client got and how long it waited for it, and how equal that is."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("client", overflow="fold")
    for head in ("service/s", "longest wait, ms", "slowdown mean", "p99", "max"):
        table.add_column(head, justify="right")
    for name, client in fairness["by_client"].items():
        figures = [client["service_per_s"], client["longest_wait_ms"]]
        figures += [client["slowdown"][statistic] for statistic in ("mean", "p99", "max")]
        table.add_row(Text(name), *(number(figure) for figure in figures))
    yield table
    yield Text(
        f"service counts a prompt token once and an output token twice: Jain index {number(fairness['jain_index'])}, "
        f"difference {number(fairness['service_difference'])}, {number(fairness['peak_service_difference'])} at peak"
    )


def limits_line(limits: Mapping[str, Any]) -> Text:
    """The last line: what limits the run."""
    shares = sorted(limits["shares"].items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share >= 0.005)
    return Text.assemble(("what limits you: ", "bold"), limits["verdict"], f"\n  of the time: {named}" if named else "")


def _replicas_table(replicas: Sequence[Mapping[str, Any]]) -> Table:
    """One row per replica; of many, the first ones."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("replica", overflow="fold")
    for head in ("requests", "running", "waiting", "busy", "KV used"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    for row in replicas[:_MOST_REPLICAS]:
        running, waiting = number(row["mean_num_running"], 3), number(row["mean_num_waiting"], 3)
        shares = [percent(row[key], 1) for key in ("busy_share", "mean_kv_usage")]
        table.add_row(Text(row["name"]), f"{row['num_requests']:,}", running, waiting, *shares, row["binds"])
    if len(replicas) > _MOST_REPLICAS:
        table.add_row(f"and {len(replicas) - _MOST_REPLICAS} more")
    return table


def _facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    throughput, kv, iterations = summary["throughput"], summary["kv"], summary["iterations"]
    yield (
        "throughput",
        f"{number(throughput['requests_per_s'])} requests/s, "
        f"{number(throughput['output_tokens_per_s'])} output tokens/s"
        + _goodput(throughput.get("goodput_requests_per_s")),
    )
    yield "requests", _outcomes(summary["outcomes"], summary["turned_away"])
    yield (
        "KV cache",
        f"{number(kv['num_blocks'])} blocks, {percent(kv['mean_usage'], 1)} used on average, "
        f"{percent(kv['peak_usage'], 1)} at peak; " + _preemptions(kv),
    )
    yield (
        "iterations",
        f"{number(iterations['count'])}, on average {number(iterations['mean_num_running'])} requests running and "
        f"{number(iterations['mean_scheduled_tokens'])} tokens scheduled",
    )
    yield "makespan", f"{number(summary['makespan_s'])} s"


def _preemptions(kv: Mapping[str, Any]) -> str:
    if not kv["num_preemptions"]:
        return "no preemptions"
    return (
        f"{number(kv['num_preemptions'])} preemptions (up to {kv['max_preemptions']} of one request), "
        f"{number(kv['recomputed_tokens'])} tokens recomputed ({percent(kv['recomputed_share'], 1)} of all prefill)"
    )


def _outcomes(outcomes: Mapping[str, int], turned_away: Mapping[str, int]) -> str:
    ended = [f"{count:,} {name.replace('_', ' ')}" for name, count in outcomes.items() if count or name == "finished"]
    reasons = [f"{count:,} by {name}" for name, count in turned_away.items() if name != "never_fits"]
    return ", ".join(ended) + (f"; turned away: {', '.join(reasons)}" if reasons else "")


def _notes(summary: Mapping[str, Any]) -> Iterator[str]:
    """What qualifies the figures above."""
    window, cancellation, waste = summary["window"], summary["cancellation"], summary["waste"]
    yield window["description"]
    if summary["steady"]["is_stable"] is False:
        yield summary["steady"]["verdict"]
    for term in summary["slo"]:
        verdict = {True: "met", False: "missed", None: "nothing observed"}[term["met"]]
        yield f"SLO {term['term']} {number(term['limit'])}: {verdict} ({number(term['value'])})"
    if summary["client"]["num_delayed"]:
        yield (
            f"{summary['client']['num_delayed']:,} requests waited at their client, "
            f"{number(summary['metrics']['client_queue_ms']['mean'])} ms on average over all requests"
        )
    if calls := summary["calls"]:
        yield (
            f"{calls['num_calls']:,} calls of {number(calls['mean_prompts'])} prompts on average; "
            f"{calls['num_answered']:,} were answered, each with its last prompt"
        )
    if cancellation["num_departed"]:
        yield (
            f"{cancellation['num_departed']:,} clients left; KV was free "
            f"{number(cancellation['to_free_ms']['mean'])} ms later on average; "
            f"{cancellation['tokens_for_departed']:,} tokens were computed for nobody"
        )
    if waste["padding_tokens"] or waste["finished_slot_s"]:
        yield (
            f"{percent(waste['padding_share'], 1)} of the computed tokens were padding, and finished requests held "
            f"their places for {percent(waste['finished_slot_share'], 1)} of the time that places were held"
        )
    for metric, statistics in summary["censored"].items():
        yield f"{metric}: {', '.join(statistics)} would change if the run had gone on (unfinished requests)"
    yield from _cost_notes(summary["cost"] or {})
    yield from summary["provenance"].get("notes", ())


def _cost_notes(cost: Mapping[str, Any]) -> Iterator[str]:
    """What the times rest on, and how far off that lets the answers be."""
    if "coverage" in cost:
        yield f"times are from {coverage_line(cost)}"
        if cost["out_of_range"] == "warn" and cost["coverage"]["iterations"]["extrapolated"]:
            yield "some iterations lie beyond what was measured: their times are extrapolated"
        if cost["missing"]:
            yield f"not in those times: {', '.join(cost['missing'])}"
    if "uncertainty" in cost:
        yield uncertainty_line(cost["uncertainty"], number)


def _goodput(rate: float | None) -> str:
    return "" if rate is None else f", {number(rate)} good requests/s"


def explanation_report(explanation: Mapping[str, Any], title: str) -> Iterator[RenderableType]:
    """The derivation of the KV pool, term by term, and what it holds."""
    yield Text(title, style="bold")
    replica = f"{explanation['model']} on {explanation['tensor_parallel']} × {explanation['gpu']}, bytes per GPU"
    terms = [(line["term"], _gib(line["bytes"])) for line in explanation["terms"]]
    terms.append(("= left for KV", _gib(explanation["available_bytes"])))
    yield facts_table(replica, terms)
    source = {"derived": "from the memory left"}.get(explanation["num_gpu_blocks_from"], "given by the scenario")
    yield facts_table(
        "KV cache",
        [
            ("KV per token", f"{number(explanation['kv_bytes_per_token'])} B"),
            (f"KV per block of {explanation['block_size']} tokens", f"{number(explanation['block_bytes'])} B"),
            (f"blocks, {source}", f"{number(explanation['num_gpu_blocks'])} ({_gib(explanation['kv_bytes'])})"),
            (
                f"maximum concurrency for {number(explanation['max_model_len'])} tokens per request",
                f"{explanation['max_concurrency_at_max_model_len']:.2f}x",
            ),
        ],
    )
    yield Text("requests that the KV cache holds at once", style="italic")
    yield rows_table("", explanation["requests_that_fit"])
    yield Text(explanation["at_once"]["verdict"])
    yield Text(f"host time before every step: {explanation['host']}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
