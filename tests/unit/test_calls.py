"""Client batching: calls of several prompts, sent together and answered when the last of them is over."""

import numpy as np
import pytest

from sim.build import run
from sim.errors import ScenarioError
from sim.request import NEVER
from sim.results import Results
from sim.scenario import parse_scenario

LOOP = {"kind": "closed_loop", "num_clients": 3, "think_time_s": 0.25}
SOME = {"kind": "uniform", "low": 1, "high": 6}
STATIC = {"policy": "static", "max_batch_size": 4, "max_model_len": 1024, "num_gpu_blocks": 400}


def scenario(num=60, engine=None, others=(), run_options=None, **fields):
    labels = {
        "name": "labels",
        "arrivals": {"kind": "poisson", "rate_per_s": 5},
        "prompts_per_call": SOME,
        "prompt_tokens": 100,
        "output_tokens": {"kind": "uniform", "low": 1, "high": 50},
    }
    data = {
        "model": "llama-3.1-8b",
        "hardware": {"gpu": "h100-sxm"},
        "engine": engine or {"policy": "vllm-v1", "max_num_seqs": 8, "max_model_len": 1024, "num_gpu_blocks": 400},
        "cost": {"kind": "constant", "step_ms": 10},
        "traffic": [labels | fields, *others],
        "run": {"num_requests": num} | (run_options or {}),
    }
    return {key: value for key, value in data.items() if value is not None}


def latencies_ms(results):
    """Call -> its latency, from the requests' own rows."""
    frame = results.to_frame()
    frame = frame[frame["call"] != NEVER]
    ends_ns = frame["finished_ns"] if results.facts.is_streaming else frame["released_ns"]
    calls = frame.assign(end_ns=ends_ns).groupby("call").agg({"end_ns": "max", "arrival_ns": ["min", "max"]})
    assert (calls["arrival_ns"]["min"] == calls["arrival_ns"]["max"]).all()
    return ((calls["end_ns"]["max"] - calls["arrival_ns"]["min"]) / 1e6).to_numpy()


def test_prompts_of_a_call_lie_together_and_the_last_call_is_cut():
    constant = {"kind": "constant", "rate_per_s": 2}
    requests = run(scenario(num=5, prompts_per_call=3, arrivals=constant)).tables.requests
    assert requests["call"].tolist() == [0, 0, 0, 1, 1]
    assert requests["arrival_ns"].tolist() == [500_000_000] * 3 + [1_000_000_000] * 2
    assert requests["queued_ns"].tolist() == requests["arrival_ns"].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"engine": STATIC},
        {"max_connections": 1},
        {"arrivals": LOOP},
        {"prefix": {"kind": "shared", "groups": 2, "tokens": 64}},
    ],
    ids=str,
)
def test_a_call_takes_until_the_last_of_its_answers(changes):
    results = run(scenario(**changes))
    expected = latencies_ms(results)
    calls = results.summary()["calls"]
    assert calls["num_calls"] == calls["num_answered"] == len(expected)
    assert calls["mean_prompts"] == 60 / len(expected)
    assert calls["call_latency_ms"]["max"] == expected.max()
    assert calls["call_latency_ms"]["mean"] == pytest.approx(expected.mean())
    assert calls["call_latency_ms"]["mean"] > results.summary()["metrics"]["e2e_ms"]["mean"]


def test_a_closed_loop_sends_its_next_call_when_the_whole_call_is_answered():
    requests = run(scenario(arrivals=LOOP | {"num_clients": 1})).tables.requests
    first = np.flatnonzero(np.diff(requests["call"], prepend=-1))
    answered_ns = np.maximum.reduceat(requests["finished_ns"], first)
    assert requests["arrival_ns"][first].tolist() == [250_000_000, *(answered_ns[:-1] + 250_000_000)]


def test_connections_are_those_of_calls():
    requests = run(scenario(max_connections=1)).tables.requests
    first = np.flatnonzero(np.diff(requests["call"], prepend=-1))
    sent_ns, answered_ns = requests["queued_ns"][first], np.maximum.reduceat(requests["finished_ns"], first)
    assert np.array_equal(requests["queued_ns"], np.repeat(sent_ns, np.diff(first, append=60)))
    assert sent_ns[1:].tolist() == np.maximum(answered_ns[:-1], requests["arrival_ns"][first][1:]).tolist()
    assert (sent_ns[1:] == answered_ns[:-1]).any()


def test_a_call_with_a_prompt_that_is_turned_away_has_no_answer_and_frees_its_client():
    lengths = {"kind": "uniform", "low": 500, "high": 1200}
    results = run(scenario(prompt_tokens=lengths, arrivals=LOOP, run_options={"oversized": "reject"}))
    summary = results.summary()
    assert summary["outcomes"]["rejected"] > 0
    assert sum(summary["outcomes"].values()) == 60
    assert 0 < summary["calls"]["num_answered"] < summary["calls"]["num_calls"]


def test_a_call_that_the_end_of_the_run_cut_off_is_censored():
    results = run(scenario(num=None, run_options={"num_requests": 60, "duration_s": 3, "drain": False}))
    assert results.calls.num_answered < results.calls.num_calls
    assert "mean" in results.summary()["censored"]["call_latency_ms"]


def test_requests_of_other_classes_are_no_calls_and_runs_without_calls_do_not_know_the_word(tmp_path):
    chat = {"name": "chat", "arrivals": {"kind": "poisson", "rate_per_s": 5}, "prompt_tokens": 10, "output_tokens": 5}
    results = run(scenario(others=[chat]))
    requests = results.tables.requests
    assert np.array_equal(requests["call"] == NEVER, requests["class_index"] == 1)
    results.save(tmp_path)
    assert Results.load(tmp_path).summary() == results.summary()
    plain = run(scenario(prompts_per_call=None))
    assert "call" not in plain.tables.requests
    assert plain.summary()["calls"] is None


def test_calls_of_one_prompt_are_the_requests():
    calls, plain = run(scenario(prompts_per_call=1)), run(scenario(prompts_per_call=None))
    assert calls.summary()["calls"]["call_latency_ms"] == plain.summary()["metrics"]["e2e_ms"]
    columns = dict(calls.tables.requests)
    assert columns.pop("call").tolist() == list(range(60))
    assert {name: values.tolist() for name, values in columns.items()} == {
        name: values.tolist() for name, values in plain.tables.requests.items()
    }


def test_in_a_fleet_calls_are_the_fleets():
    fleet = scenario() | {"fleet": {"replicas": 2, "router": {"kind": "round_robin"}}}
    results = run(fleet)
    assert results.calls.call_latency_ms.max == latencies_ms(results).max()
    assert [replica.calls for replica in results.replicas] == [None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cancel": {"kind": "deadline", "after_s": 1}},
            "traffic[0].prompts_per_call: a client leaves a request, and a call is several. "
            "Drop cancel or prompts_per_call.",
        ),
        (
            {"conversation": {"turns": 2, "think_time_s": 1}},
            "traffic[0].prompts_per_call: a conversation goes on after one answer, and a call has several. "
            "Drop conversation or prompts_per_call.",
        ),
        ({"prompts_per_call": 0}, "traffic[0].prompts_per_call: expected at least 1, got 0"),
        ({"prompts_per_call": {"kind": "unifrom"}}, "traffic[0].prompts_per_call.kind: "),
    ],
    ids=str,
)
def test_bad_input(changes, message):
    with pytest.raises(ScenarioError) as caught:
        run(parse_scenario(scenario(**changes), place="x.yaml"))
    assert str(caught.value).startswith(f"x.yaml: {message}")
