"""A run of three requests whose every number can be checked by hand, and what Results does with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from sim.cost.base import Resource
from sim.errors import ScenarioError, UserError
from sim.metrics.facts import RunFacts, versions
from sim.metrics.load import step_arrays
from sim.metrics.shares import WorkShares
from sim.metrics.summary import ALIASES, DEFINITIONS, summary_schema
from sim.record import Recorder
from sim.request import NEVER, Outcome
from sim.results import Difference, Results
from sim.step import BlockedBy, StepShape
from sim.storage import atomic_path

MS = 1_000_000
FACTS = RunFacts(class_names=("chat", "code"), num_blocks=11, usable_blocks=10, block_size=16)


def breakdown(tables, largest=Resource.BANDWIDTH):
    duration_ns = (tables.iterations["end_ns"] - tables.iterations["start_ns"]).astype(np.float64)
    return {r: duration_ns if r is largest else np.zeros_like(duration_ns) for r in Resource}


def shares(tables):
    """Decodes take half of a mixed step, chunks of one step equal parts."""
    iterations, iteration = tables.iterations, tables.chunks["iteration"]
    decode = np.where(iterations["num_decode"] > 0, 1.0 - 0.5 * (iterations["num_prefills"] > 0), 0.0)
    return WorkShares(decode, 1.0 / np.bincount(iteration, minlength=1)[iteration])


@pytest.fixture
def three(world):
    """0 and 1 share steps; the device idles from 20 to 40 ms; 2 waits 2 ms for the host."""
    r0 = world.request(0, prompt=100, output=3)
    r1 = world.request(5 * MS, prompt=20, output=2)
    r2 = world.request(40 * MS, prompt=8, output=1, class_index=1)
    world.step(10 * MS, prefill=[r0], used_blocks=7, live_tokens=100, num_new_blocks=7)
    world.step(4 * MS, decode=[r0], prefill=[r1], used_blocks=9, live_tokens=121)
    world.step(6 * MS, decode=[r0, r1], finish=[r0, r1], used_blocks=9, live_tokens=123)
    world.step(3 * MS, prefill=[r2], finish=[r2], start_ns=42 * MS, host_ns=2 * MS, used_blocks=1, live_tokens=8)
    return world.tables()


def results(tables, largest=Resource.BANDWIDTH, **facts):
    return Results(tables, replace(FACTS, **facts), breakdown(tables, largest), shares(tables))


def test_latencies_of_three_requests(three):
    metrics = results(three).summary()["metrics"]
    assert {name: (s["count"], s["mean"], s["p50"], s["max"]) for name, s in metrics.items()} == {
        "ttft_ms": (3, 8, 9, 10),
        "ttft_after_client_queue_ms": (3, 8, 9, 10),
        "itl_ms": (3, pytest.approx(16 / 3), 6, 6),
        "tpot_ms": (2, 5.5, 5.5, 6),
        "ntpot_ms": (3, pytest.approx((20 / 3 + 7.5 + 5) / 3), pytest.approx(20 / 3), 7.5),
        "e2e_ms": (3, pytest.approx(40 / 3), 15, 20),
        "queue_ms": (3, pytest.approx(7 / 3), 2, 5),
        "client_queue_ms": (3, 0, 0, 0),
    }
    assert metrics["itl_ms"]["p90"] == 6 == metrics["itl_ms"]["p999"]
    assert metrics["ttft_ms"]["p95"] == pytest.approx(9.9)


def test_load_of_three_requests(three):
    summary = results(three).summary()
    assert summary["makespan_s"] == 0.045
    assert summary["throughput"] == {
        "requests_per_s": 3 / 0.045,
        "output_tokens_per_s": 6 / 0.045,
        "goodput_requests_per_s": None,
        "good_share": None,
    }
    assert summary["outcomes"] == {"finished": 3, "cancelled": 0, "rejected": 0, "timed_out": 0, "unfinished": 0}
    assert summary["iterations"] == {
        "count": 4,
        "mean_num_running": 35 / 45,
        "peak_num_running": 2,
        "mean_num_waiting": 7 / 45,
        "peak_num_waiting": 0,
        "mean_scheduled_tokens": 131 / 4,
        "mean_prefill_tokens": 32,
        "mean_decode_tokens": 0.75,
        "busy_share": 25 / 45,
    }
    used_tokens, live_tokens = 16 * (70 + 36 + 54 + 5), 1000 + 484 + 738 + 40
    assert summary["kv"] == {
        "num_blocks": 11,
        "usable_blocks": 10,
        "block_size": 16,
        "peak_usage": 0.9,
        "mean_usage": pytest.approx((70 + 36 + 54 + 5) / 45 / 10),
        "mean_reserved_unused_tokens": pytest.approx((used_tokens - live_tokens) / 45),
        "reserved_unused_share": pytest.approx((used_tokens - live_tokens) / used_tokens),
        "split": {
            "token_share": pytest.approx(live_tokens / 25 / 160),
            "reserved_share": pytest.approx((3 * 10 + 4 * 4 + 2 * 6 + 1 * 5) / 25 / 160),
            "internal_fragmentation_share": pytest.approx((9 * 10 + 19 * 4 + 19 * 6 + 7 * 5) / 25 / 160),
            "external_fragmentation_share": 0,
        },
        "num_preemptions": 0,
        "max_preemptions": 0,
        "recomputed_tokens": 0,
        "prefill_tokens": 128,
        "recomputed_share": 0,
        "cached_prompt_tokens": 0,
    }
    assert [(b["low"], b["high"], b["ttft_ms"]["mean"]) for b in summary["by_prompt_tokens"]] == [
        (5, 8, 5),
        (17, 32, 9),
        (65, 128, 10),
    ]
    assert [(b["low"], b["high"], b["e2e_ms"]["mean"]) for b in summary["by_output_tokens"]] == [
        (1, 1, 5),
        (2, 2, 15),
        (3, 4, 20),
    ]
    assert [(b["low"], b["high"], b["itl_ms"]["count"]) for b in summary["by_active_sequences"]] == [
        (1, 1, 1),
        (2, 2, 2),
    ]


def test_classes_have_their_own_numbers(three):
    by_class = results(three, class_slos={"code": {"p99_ttft_ms": 4}}).summary()["by_class"]
    assert {name: (c["metrics"]["ttft_ms"]["mean"], c["outcomes"]["finished"]) for name, c in by_class.items()} == {
        "chat": (9.5, 2),
        "code": (5, 1),
    }
    assert by_class["code"]["slo"] == [
        {"term": "p99_ttft_ms", "limit": 4.0, "value": 5.0, "met": False, "is_censored": False}
    ]
    assert by_class["code"]["throughput"]["goodput_requests_per_s"] == 0
    assert by_class["chat"]["throughput"]["goodput_requests_per_s"] == 2 / 0.045


@pytest.mark.parametrize(
    ("slo", "good", "met"),
    [
        ({"p99_ttft_ms": 9}, [False, True, True], [False]),
        ({"mean_ttft_ms": 9}, [False, True, True], [True]),
        ({"p50_itl_ms": 5}, [True, False, True], [False]),
        ({"max_itl_ms": 5.9}, [False, False, True], [False]),
        ({"mean_itl_ms": 5}, [True, False, True], [False]),
        ({"p90_tpot_ms": 5.5, "p90_e2e_ms": 19.9}, [False, False, True], [False, True]),
    ],
)
def test_goodput_holds_each_request_to_the_limits_by_its_own_values(three, slo, good, met):
    run = results(three, slo=slo)
    assert run.is_good.tolist() == good
    summary = run.summary()
    assert [term["met"] for term in summary["slo"]] == met
    assert summary["throughput"]["goodput_requests_per_s"] == sum(good) / 0.045
    assert summary["throughput"]["good_share"] == sum(good) / 3


def test_a_share_of_good_requests_is_a_term_like_others(three):
    run = results(three, slo={"p50_itl_ms": 5, "goodput": 0.7})
    assert run.summary()["slo"][-1] == {
        "term": "goodput",
        "limit": 0.7,
        "value": 2 / 3,
        "met": False,
        "is_censored": False,
    }


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ({"goodput": 0.9}, "slo.goodput: no other term says what a good request is. Give it a limit on a latency."),
        ({"p99_ttft_ms": 5, "goodput": 99}, "slo.goodput: 99 is not a share; a number between 0 and 1."),
    ],
)
def test_goodput_needs_limits_and_is_a_share(slo, message):
    with pytest.raises(ScenarioError) as error:
        results_of_nothing(slo).summary()
    assert str(error.value) == message


def test_an_unknown_slo_term_is_named():
    with pytest.raises(ScenarioError) as error:
        results_of_nothing({"p99_tfft_ms": 5}).summary()
    assert str(error.value) == (
        "slo: unknown term 'p99_tfft_ms'; expected goodput, or STATISTIC_METRIC_ms: mean, max or a percentile "
        "(p50, p99, p999) of ttft, ttft_after_client_queue, tpot, ntpot, e2e, queue, client_queue, itl. "
        "Did you mean 'p99_ttft_ms'?"
    )


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
def test_a_limit_must_be_a_number_above_zero(limit):
    with pytest.raises(ScenarioError, match=r"slo\.p99_ttft_ms: .* is not a limit; a finite number of ms above 0"):
        results_of_nothing({"p99_ttft_ms": limit}).summary()


def results_of_nothing(slo):
    return results(Recorder().tables(), slo=slo)


def test_an_empty_run_has_a_summary():
    summary = results_of_nothing({}).summary()
    assert summary["makespan_s"] == 0
    assert summary["throughput"]["requests_per_s"] is None
    assert summary["limits"]["verdict"] == "nothing: no time was measured"
    jsonschema.validate(summary, summary_schema())


def test_warm_up_and_drain_are_cut_on_request(three):
    summary = results(three, warmup_s=0.004, cut_drain=True).summary()
    assert summary["metrics"]["ttft_ms"]["count"] == 2
    # Two answers and four tokens leave from 4 to 40 ms; all three requests are still in the counts.
    assert summary["throughput"]["requests_per_s"] == 2 / 0.036
    assert summary["throughput"]["output_tokens_per_s"] == 5 / 0.036
    assert summary["outcomes"]["finished"] == 3
    assert summary["makespan_s"] == 0.045
    assert summary["iterations"]["busy_share"] == 16 / 36
    assert sum(summary["limits"]["shares"].values()) == pytest.approx(1)
    assert summary["window"] == {
        "start_s": 0.004,
        "end_s": 0.04,
        "warmup_s": 0.004,
        "drain": "cut",
        "num_measured": 2,
        "num_cut": 1,
        "description": "2 requests measured, from 0.004 s to 0.040 s; the first 0.004 s are cut as warm-up "
        "(1 requests); what follows the last arrival is cut from rates and shares",
    }


def test_answers_that_are_not_streamed_arrive_whole(three):
    metrics = results(three, is_streaming=False).summary()["metrics"]
    assert metrics["ttft_ms"] == metrics["e2e_ms"]
    assert (metrics["itl_ms"]["count"], metrics["tpot_ms"]["count"]) == (0, 0)
    assert metrics["ntpot_ms"]["max"] == 7.5
    no_gaps = results(three, is_streaming=False, slo={"mean_tpot_ms": 1e-6, "p99_itl_ms": 1e-6, "p99_ttft_ms": 16})
    assert no_gaps.is_good.tolist() == [False, True, True]


def test_an_answer_held_back_costs_latency_only_if_it_is_not_streamed(world):
    a, b = world.request(output=2), world.request(output=3)
    world.step(10 * MS, prefill=[a, b])
    world.step(4 * MS, decode=[a, b], finish=[a], release=[])
    world.step(4 * MS, decode=[b], finish=[b], release=[a, b], padding=1)
    tables = world.tables()
    assert results(tables).summary()["metrics"]["e2e_ms"]["p50"] == 16
    whole = results(tables, is_streaming=False).summary()
    assert whole["metrics"]["e2e_ms"]["p50"] == 18
    assert whole["throughput"]["output_tokens_per_s"] == 5 / 0.018
    assert whole["waste"] == {
        "padding_tokens": 1,
        "padding_share": 1 / 23,
        "finished_slot_s": 0.004,
        "finished_slot_share": 4 / 36,
    }


def test_unfinished_requests_are_counted_and_flagged(world):
    done, begun, waiting = world.request(output=1), world.request(output=9), world.request(1 * MS, output=9)
    world.step(10 * MS, prefill=[done, begun], finish=[done])
    world.step(5 * MS, decode=[begun])
    world.end(begun)
    world.end(waiting)
    rejected = world.request(2 * MS)
    world.end(rejected, Outcome.REJECTED)
    run = results(world.tables(), stopped_ns=20 * MS, slo={"p99_e2e_ms": 10})
    summary = run.summary()
    assert summary["makespan_s"] == 0.020
    assert summary["outcomes"] == {"finished": 1, "cancelled": 0, "rejected": 1, "timed_out": 0, "unfinished": 2}
    assert summary["metrics"]["ttft_ms"]["count"] == 2
    every = ["mean", "p50", "p90", "p95", "p99", "p999", "max"]
    upper = ["mean", "p90", "p95", "p99", "p999", "max"]  # the median of 10, 10 and something larger is known
    assert summary["censored"] == {
        "ttft_ms": upper,
        "ttft_after_client_queue_ms": upper,
        "tpot_ms": every,
        "ntpot_ms": every,
        "e2e_ms": every,
        "queue_ms": upper,
        "itl_ms": every,
    }
    assert summary["slo"][0]["met"]
    assert summary["slo"][0]["is_censored"]
    assert summary["window"]["drain"] == "stopped"
    assert summary["window"]["description"] == (
        "4 requests measured, from 0.000 s to 0.020 s; the run was stopped at 0.020 s with 2 requests unfinished"
    )


def test_a_client_that_left_saw_its_first_token_but_no_answer(world):
    left, gone = world.request(output=9), world.request(output=9)
    world.step(10 * MS, prefill=[left])
    world.step(5 * MS, decode=[left])
    world.cancel(left, 15 * MS)
    world.cancel(gone, 12 * MS, Outcome.TIMED_OUT)
    summary = results(world.tables()).summary()
    counts = {name: stats["count"] for name, stats in summary["metrics"].items()}
    assert counts["ttft_ms"] == counts["itl_ms"] == 1
    assert counts["e2e_ms"] == counts["tpot_ms"] == 0
    assert summary["censored"] == {}
    assert summary["throughput"]["output_tokens_per_s"] == 2 / 0.015
    assert summary["outcomes"]["cancelled"] == summary["outcomes"]["timed_out"] == 1


# What limits a run


def limits(tables, largest=Resource.BANDWIDTH, **facts):
    report = results(tables, largest, **facts).summary()["limits"]
    assert sum(report["shares"].values()) == pytest.approx(1, abs=1e-12)
    return {name: share for name, share in report["shares"].items() if share}, report["verdict"]


def test_when_nobody_waits_the_arrivals_bind_however_busy_the_device_is(three):
    shares, verdict = limits(three)
    assert shares == {"arrivals": 20 / 45, "bandwidth": 25 / 45}
    # 5 of 45 ms are after the last arrival, when only the device can bind.
    assert verdict == ("the arrivals (nothing binds): nobody was kept waiting 89 % of the time; then bandwidth (11 %)")


def test_exposed_host_time_is_overhead(three):
    run = results(three)
    shares = Results(three, FACTS, {r: ns / 4 for r, ns in run.breakdown.items()}, run.shares).limits.shares
    assert shares["overhead"] == 5 / 45  # of 3 ms, a quarter is bandwidth; 2 ms are the host's


@pytest.mark.parametrize(
    ("largest", "name", "on"),
    [(Resource.COMPUTE, "compute", "arithmetic"), (Resource.BANDWIDTH, "memory bandwidth", "reading memory")],
)
def test_once_all_have_arrived_the_device_binds(world, largest, name, on):
    a = world.request(output=3)
    world.step(10, prefill=[a])
    world.step(10, decode=[a])
    world.step(10, decode=[a], finish=[a])
    verdict = (
        f"{name}: with nobody left to arrive, the device worked unblocked and spent most on {on} 100 % of the time"
    )
    assert limits(world.tables(), largest) == ({largest.value: 1}, verdict)
    assert limits(world.tables(), largest, is_closed_loop=True)[1] == verdict


@pytest.mark.parametrize(
    ("blocked_by", "share", "verdict"),
    [
        (BlockedBy.SLOTS, "slots", "slots: the queue waited for a place in the running batch"),
        (BlockedBy.KV, "kv", "KV capacity: the queue waited for cache blocks"),
        (BlockedBy.BUDGET, "budget", "the token budget: the queue waited because the step's tokens were spent"),
        (
            BlockedBy.ADMISSION,
            "admission",
            "admission: a batching window, or a batch that admits nobody, kept the queue waiting",
        ),
    ],
)
def test_what_the_queue_waits_for_binds(world, blocked_by, share, verdict):
    a, late = world.request(output=3), world.request(20, output=1)
    world.step(10, prefill=[a])
    world.step(20, decode=[a], blocked_by=blocked_by)
    world.step(10, decode=[a], finish=[a], blocked_by=blocked_by)
    world.step(10, prefill=[late], finish=[late])
    shares, said = limits(world.tables())
    assert shares == {share: 0.6, "bandwidth": 0.4}
    assert said == f"{verdict} 60 % of the time; then bandwidth (20 %)"


def test_idle_time_belongs_to_whoever_is_waited_for(world):
    a = world.request(0, output=1)
    b = world.request(15, output=1)  # held in the engine by a window until 30
    c = world.request(40, output=1, queued_ns=60)  # held by its client until 60
    world.step(10, prefill=[a], finish=[a])
    world.step(10, prefill=[b], finish=[b], start_ns=30)
    world.step(20, prefill=[c], finish=[c], start_ns=60)
    shares, _ = limits(world.tables())
    assert shares == {"arrivals": 5 / 80, "admission": 15 / 80, "client": 20 / 80, "bandwidth": 40 / 80}


def test_a_client_with_few_connections_binds(world):
    a, b, c = world.request(0, output=1), world.request(1, output=1, queued_ns=10), world.request(90, output=1)
    world.step(10, prefill=[a], finish=[a])
    world.step(90, prefill=[b], finish=[b])
    world.step(10, prefill=[c], finish=[c])
    assert limits(world.tables())[0]["client"] == 9 / 110
    d = world.request(2, output=1, queued_ns=100)
    world.step(10, prefill=[d], finish=[d])
    tables = world.tables()
    shares, verdict = limits(tables)
    assert shares == {"bandwidth": 21 / 120, "client": 99 / 120}
    assert verdict.startswith("the client: its own limit on requests at the server held requests back 82 %")
    client = results(tables).summary()["client"]
    assert client == {"mean_num_waiting": (9 + 98) / 120, "num_delayed": 2}


def test_a_closed_loop_is_its_clients(three):
    _, verdict = limits(three, is_closed_loop=True)
    assert verdict == (
        "the client: it sends its next request after an answer, and nothing kept one waiting 89 % of the time; "
        "then bandwidth (11 %)"
    )


def test_overlapping_iterations_are_counted_once(world):
    a, b = world.request(output=1), world.request(output=1)
    world.step(20, prefill=[a], finish=[a], start_ns=0, lane=0)
    world.step(20, prefill=[b], finish=[b], start_ns=10, lane=1)
    summary = results(world.tables()).summary()
    assert summary["iterations"]["busy_share"] == 1
    assert summary["limits"]["shares"]["bandwidth"] == 1


# Tables in, tables out


def test_padded_prompts_are_priced_at_their_padded_length(world):
    a, b, c = world.request(prompt=4, output=1), world.request(prompt=10, output=1), world.request(prompt=7, output=1)
    world.step(5, prefill=[a, b], finish=[a, b], shape=StepShape(prefills=((10, 0), (10, 0)), num_padding_tokens=6))
    world.step(5, prefill=[c], finish=[c])
    steps = step_arrays(world.tables())
    assert steps.prefill_num_tokens.tolist() == [10, 10, 7]
    assert (steps.prefill_iteration.tolist(), steps.num_padding_tokens.tolist()) == ([0, 0, 1], [6, 0])


def test_the_summary_obeys_its_schema(three):
    summary = results(three, slo={"p99_ttft_ms": 9}, provenance={"seed": 1}).summary()
    schema = summary_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(summary, allow_nan=False)), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(summary | {"makespan_s": None}, schema)


def test_results_survive_the_disk_and_equal_runs_are_equal_bytes(three, tmp_path):
    run = results(three, slo={"p99_ttft_ms": 9}, class_slos={"code": {"p50_itl_ms": 4}}, provenance={"seed": 1})
    paths = run.save(tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(path.name for path in paths)
    again = results(three, slo={"p99_ttft_ms": 9}, class_slos={"code": {"p50_itl_ms": 4}}, provenance={"seed": 1})
    again.save(tmp_path / "b")
    for path in paths:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    loaded = Results.load(tmp_path / "a")
    assert loaded.facts == run.facts
    assert loaded.summary() == run.summary() == json.loads((tmp_path / "a" / "summary.json").read_text())


@pytest.mark.parametrize(
    ("table", "other", "column"), [("iterations", "chunks", "lane"), ("requests", "segments", "class_index")]
)
def test_a_run_with_a_column_missing_is_named(three, tmp_path, table, other, column):
    results(three).save(tmp_path)
    (tmp_path / f"{table}.parquet").write_bytes((tmp_path / f"{other}.parquet").read_bytes())
    found = rf"is not a run of this version of servesim \(missing or unknown: '{column}'\)"
    with pytest.raises(UserError, match=found):
        Results.load(tmp_path)


def test_tables_of_two_runs_are_not_taken_for_one(three, tmp_path):
    results(three, provenance={"seed": 1}).save(tmp_path / "a")
    results(three, provenance={"seed": 2}).save(tmp_path / "b")
    (tmp_path / "a" / "requests.parquet").write_bytes((tmp_path / "b" / "requests.parquet").read_bytes())
    with pytest.raises(UserError, match=r"requests\.parquet is of another run than the tables before it"):
        Results.load(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "folder", "found"),
    [
        (None, "run", r"run: no such folder\. Give a folder that"),
        (None, ".", r"iterations\.parquet: no such file\."),
        (b"not parquet", ".", r"iterations\.parquet: is not a table of a run"),
    ],
)
def test_a_folder_without_a_run_is_named(tmp_path, content, folder, found):
    if content:
        (tmp_path / "iterations.parquet").write_bytes(content)
    with pytest.raises(UserError, match=found):
        Results.load(tmp_path / folder)


def test_an_interrupted_write_leaves_nothing_and_keeps_what_was_there(tmp_path):
    target = tmp_path / "summary.json"
    target.write_text("old")

    def interrupted(path):
        path.write_text("half of the n")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), atomic_path(target) as path:
        interrupted(path)
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert target.read_text() == "old"


def test_frames_carry_latencies(three):
    frame = results(three).to_frame()
    assert frame["ttft_ms"].tolist() == [10, 9, 5]
    assert frame["tpot_ms"].isna().tolist() == [False, False, True]
    assert len(results(three).to_frame("iterations")) == 4
    with pytest.raises(UserError, match="there is no table 'tokens'; known: iterations, chunks, requests, segments"):
        results(three).to_frame("tokens")


def test_diff_names_what_differs(three, world):
    a = world.requests[0]
    assert results(three).diff(results(three)) == {}
    world.step(45 * MS, prefill=[world.request(45 * MS, output=1)], start_ns=45 * MS, finish=world.requests[-1:])
    changed = results(three).diff(results(world.tables()))
    assert changed["metrics.e2e_ms.max"] == Difference(20, 45, 2.25)
    assert changed["metrics.ttft_ms.count"] == Difference(3, 4, 4 / 3)
    assert "metrics.queue_ms.max" not in changed
    assert a.cancelled_ns == NEVER


def test_versions_are_those_of_this_installation():
    assert set(versions()) == {"python", "servesim", "numpy", "simpy"}
    assert versions()["numpy"] == np.__version__


def test_the_docs_define_every_metric_as_the_summary_does():
    text = " ".join((Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8").split())
    for name, definition in DEFINITIONS.items():
        assert f"| `{name}` | {definition} |" in text
    for tool, names in ALIASES.items():
        for theirs, ours in names.items():
            assert f"| {tool} | `{theirs}` | {ours} |" in text
