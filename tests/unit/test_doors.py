"""Doors and the wait behind them: who is turned away, when, and what the results say of it."""

from collections import Counter

import pytest

from sim import Results, machines, run
from sim.clock import NS_PER_MS, NS_PER_S
from sim.doors.base import DOORS
from sim.engine import Engine
from sim.errors import ScenarioError
from sim.reception import Reception
from sim.request import NEVER, Outcome, Request
from sim.scenario import parse_scenario
from sim.step import Admission, BlockedBy, Chunk, Step, StepShape

CLASSES = ("chat", "batch")


def door(kind, **options):
    cls = DOORS.load(kind)
    return cls.build(cls.Options.model_validate({"kind": kind, **options}), CLASSES)


def arrivals(reception, rows):
    """The reason number, or None, of each `(time in s, class, prompt tokens)`."""
    reasons = []
    for index, (time_s, class_index, prompt_tokens) in enumerate(rows):
        request = Request(index, prompt_tokens, 10, class_index=class_index)
        reasons.append(reception.reason_to_refuse(request, round(time_s * NS_PER_S)))
    return reasons


def step_with(requests):
    return Step(
        StepShape(prefills=tuple((r.prompt_tokens, 0) for r in requests)),
        *(1, 0, 1, 1, 1),
        BlockedBy.NOTHING,
        chunks=[Chunk(r, r.prompt_tokens, 0, True) for r in requests],
        admitted=[Admission(r, 0, False) for r in requests],
    )


def test_a_full_queue_refuses():
    reception = Reception([door("queue_limit", max_waiting=2)])
    assert arrivals(reception, [(0, 0, 5)] * 4) == [None, None, 1, 1]


def test_a_rate_limit_counts_each_class_within_its_window():
    reception = Reception([door("rate_limit", max_requests=2, window_s=10.0)])
    rows = [(0, 0), (1, 0), (2, 0), (2, 1), (10, 0), (10.5, 0), (11.5, 0)]
    assert arrivals(reception, [(*row, 5) for row in rows]) == [None, None, 1, None, 1, None, None]


def test_a_bucket_lets_a_burst_through_and_then_its_rate():
    reception = Reception([door("token_bucket", rate_per_s=2.0, burst=3.0, by_class={"batch": 1.0})])
    rows = [(0, 0)] * 4 + [(0.5, 0), (0.6, 0), (1.0, 0), (1.0, 1), (1.0, 1), (1.0, 1), (1.5, 1), (2.0, 1)]
    expected = [None, None, None, 1, None, 1, None, None, None, None, 1, None]
    assert arrivals(reception, [(*row, 5) for row in rows]) == expected


def test_a_bucket_of_tokens_takes_what_a_request_may_use():
    reception = Reception([door("token_bucket", unit="tokens", rate_per_s=10.0, burst=40.0)])
    assert arrivals(reception, [(0, 0, 20), (0, 0, 1), (0.1, 0, 1)]) == [None, 1, None]


def test_a_door_that_is_not_reached_counts_nobody():
    """The second door refuses, so the first one has let nobody in."""
    reception = Reception([door("rate_limit", max_requests=1), door("queue_limit", max_waiting=0)])
    assert arrivals(reception, [(0, 0, 5)] * 3) == [2, 2, 2]


def test_the_predicted_time_is_what_is_ahead_at_the_recent_pace():
    reception = Reception([door("predicted_ttft", ttft_ms=50.0)])
    first = Request(0, 100, 1)
    assert reception.predicted_ttft_ns(first) is None
    assert reception.reason_to_refuse(first, 0) is None
    reception.observe(step_with([first]), 5 * NS_PER_MS, 25 * NS_PER_MS)
    reception.observe_busy(25 * NS_PER_MS, 35 * NS_PER_MS)
    second = Request(1, 100, 1)
    assert reception.reason_to_refuse(second, 0) is None
    reception.observe(step_with([second]), 90 * NS_PER_MS, 110 * NS_PER_MS)  # idle time before it is no pace
    assert reception.predicted_ttft_ns(Request(2, 100, 1)) == 25 * NS_PER_MS
    assert [reception.reason_to_refuse(Request(i, 100, 1), 0) for i in range(3, 6)] == [None, None, 1]


def scenario(seconds=20, rate_per_s=40.0, **engine):
    """An overloaded engine of four slots."""
    return {
        "model": "llama-3.1-8b",
        "hardware": {"gpu": "h100-sxm"},
        "engine": {"policy": "orca", "max_batch_size": 4, "max_model_len": 2048, **engine},
        "cost": {"kind": "constant", "step_ms": 10.0},
        "traffic": [
            {
                "name": name,
                "arrivals": {"kind": "poisson", "rate_per_s": rate_per_s},
                "prompt_tokens": {"kind": "constant", "value": 100},
                "output_tokens": {"kind": "constant", "value": 20},
            }
            for name in CLASSES
        ],
        "run": {"duration_s": float(seconds)},
    }


def outcomes(results):
    return Counter(Outcome(value).name for value in results.tables.requests["outcome"])


class OneByOne(Engine):
    """Foresees nothing."""

    def __init__(self, *parts, **options):
        super().__init__(*parts, **options | {"macro_steps": False})


@pytest.mark.parametrize("engine", [{"policy": "vllm-v1", "async_scheduling": False}, {"policy": "vllm-v0"}])
def test_the_pace_is_the_same_when_steady_steps_are_advanced_at_once(engine, monkeypatch):
    """The host's time between two steps is no pace, however many of them are foreseen."""
    door = {"kind": "predicted_ttft", "ttft_ms": 400.0}
    engine = {"max_model_len": 2048, "max_num_seqs": 4, "admission_control": [door], **engine}
    cost = {"kind": "constant", "step_ms": 10.0, "host": {"kind": "constant", "step_us": 9000.0}}
    given = scenario(rate_per_s=10.0) | {"engine": engine, "cost": cost}
    at_once = run(given)
    monkeypatch.setattr(machines, "Engine", OneByOne)
    assert set(outcomes(at_once)) == {"FINISHED", "REJECTED"}
    assert run(given).tables.requests["outcome"].tolist() == at_once.tables.requests["outcome"].tolist()


def test_without_doors_the_queue_of_an_overloaded_engine_grows():
    summary = run(scenario()).summary()
    assert summary["turned_away"] == {}
    assert summary["metrics"]["queue_ms"]["max"] > 10_000


def test_a_wait_that_becomes_too_long_ends_there(tmp_path):
    results = run(scenario(queue_timeout_s=0.5))
    requests, summary = results.tables.requests, results.summary()
    timed_out = requests["outcome"] == Outcome.TIMED_OUT
    assert 0.3 < timed_out.mean() < 0.9
    assert (requests["cancelled_ns"] - requests["queued_ns"])[timed_out].tolist() == [NS_PER_S // 2] * timed_out.sum()
    assert (requests["admitted_ns"][timed_out] == NEVER).all()
    assert summary["turned_away"] == {"queue_timeout": int(timed_out.sum())}
    assert summary["metrics"]["queue_ms"]["max"] <= 510
    results.save(tmp_path)
    assert Results.load(tmp_path).summary() == summary


@pytest.mark.parametrize(
    ("controls", "longest_wait_ms"),
    [
        ([{"kind": "queue_limit", "max_waiting": 8}], 1_000),
        ([{"kind": "predicted_ttft", "ttft_ms": 500.0}], 1_500),
        ([{"kind": "token_bucket", "rate_per_s": 8.0, "burst": 4.0}], 3_000),
    ],
)
def test_doors_bound_the_wait_of_those_who_are_let_in(controls, longest_wait_ms):
    results = run(scenario(admission_control=controls))
    summary = results.summary()
    refused = outcomes(results)["REJECTED"]
    assert summary["turned_away"] == {controls[0]["kind"]: refused}
    assert refused > 100
    assert outcomes(results)["FINISHED"] > 200
    assert summary["metrics"]["queue_ms"]["max"] < longest_wait_ms


def test_a_timeout_holds_although_the_engine_computes_for_those_who_left():
    results = run(scenario(queue_timeout_s=0.5, abort_on_disconnect=False))
    requests = results.tables.requests
    assert (requests["admitted_ns"][requests["outcome"] == Outcome.TIMED_OUT] == NEVER).all()
    assert outcomes(results)["TIMED_OUT"] > 100


@pytest.mark.parametrize(
    ("controls", "message"),
    [
        (
            [{"kind": "queue_limt", "max_waiting": 1}],
            "scenario: engine.admission_control[0].kind: unknown door 'queue_limt'; known: queue_limit, token_bucket, "
            "rate_limit, predicted_ttft. Did you mean 'queue_limit'?",
        ),
        (
            [{"kind": "token_bucket", "rate_per_s": -1.0, "burst": 1.0}],
            "scenario: engine.admission_control[0].rate_per_s: expected a number above 0, got -1.0 (what flows into"
            " a bucket in a second).",
        ),
    ],
)
def test_doors_that_make_no_sense_are_refused(controls, message):
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(scenario(admission_control=controls))
    assert str(caught.value) == message


def test_classes_that_the_traffic_does_not_have_are_refused():
    controls = [{"kind": "predicted_ttft", "ttft_ms": 1.0, "by_class": {"chta": 2.0}}]
    with pytest.raises(ScenarioError) as caught:
        run(scenario(admission_control=controls))
    assert str(caught.value) == (
        "scenario: engine.admission_control[0].by_class: no request class is called 'chta'; classes: chat, batch."
        " Did you mean 'chat'?"
    )
