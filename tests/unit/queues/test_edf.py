"""Earliest deadline first: whose deadline it is, and who is dropped when it has passed."""

import numpy as np
import pytest

from sim import Results, run
from sim.clock import NS_PER_MS
from sim.errors import ScenarioError
from sim.queues.base import Setting
from sim.queues.edf import EarliestDeadline, EarliestDeadlineOptions
from sim.request import NEVER, Outcome, Request
from tests.unit.queues.small import simulate

ENGINES = [
    ("static", {"max_batch_size": 1}),
    ("orca", {"max_batch_size": 1}),
    ("vtc", {"running_max_req_size": 1}),
    ("sarathi", {"max_num_seqs": 1}),
    ("vllm-v0", {"max_num_seqs": 1}),
    ("vllm-v1", {"max_num_seqs": 1, "async_scheduling": False}),
]
"""One request at a time."""
QUEUE_TIMEOUT = 1
"""Number of the reason where there are no doors."""


def queue(class_names=("all",), **options):
    return EarliestDeadline.build(EarliestDeadlineOptions(kind="edf", **options), Setting(class_names))


def test_the_earliest_deadline_depends_on_the_class():
    order = queue(("chat", "batch"), ttft_ms=500.0, by_class={"batch": 10_000.0})
    rows = [(1, 0), (0, 9_400), (1, 100), (0, 9_600)]  # class, arrival in ms
    requests = [Request(i, 1, 1, class_index=c, arrival_ns=at * NS_PER_MS) for i, (c, at) in enumerate(rows)]
    for request in requests:
        order.add(request, 0)
    assert [order.due_ns(request) // NS_PER_MS for request in requests] == [10_000, 9_900, 10_100, 10_100]
    assert [request.index for request in order] == [1, 0, 2, 3]


@pytest.mark.parametrize(("policy", "options"), ENGINES)
@pytest.mark.parametrize(
    ("drop_late", "ends_ms", "dropped"), [(False, [19, 23, 27, 31, 35], []), (True, [19, 16, 19, 23, 21], [1, 2, 4])]
)
def test_who_still_waits_is_dropped_when_its_first_token_is_due(policy, options, drop_late, ends_ms, dropped):
    """The first one runs until 19 ms, each other one for 4 ms; they are due at 15, 16, 19, 20 and 21 ms."""
    rows = [(18, 0), (3, 1), (3, 4), (3, 5), (3, 6)]
    requests = [Request(i, prompt, 2, arrival_ns=at_ms * NS_PER_MS) for i, (prompt, at_ms) in enumerate(rows)]
    order = {"kind": "edf", "ttft_ms": 15.0, "drop_late": drop_late}
    table = simulate(policy, requests, 40, queue_order=order, **options).requests
    is_dropped = np.isin(np.arange(5), dropped)
    assert np.array_equal(table["outcome"], np.where(is_dropped, Outcome.TIMED_OUT, Outcome.FINISHED))
    assert np.array_equal(table["turned_away_by"], np.where(is_dropped, QUEUE_TIMEOUT, NEVER))
    assert np.array_equal(table["admitted_ns"] == NEVER, is_dropped)
    ends_ns = np.where(is_dropped, table["cancelled_ns"], table["finished_ns"])
    assert (ends_ns / NS_PER_MS).tolist() == ends_ms
    assert (table["first_token_ns"][0] / NS_PER_MS) == 18  # late, but it had been admitted


@pytest.mark.parametrize("policy", ["sarathi", "vllm-v0", "vllm-v1"])
def test_who_was_admitted_before_is_never_dropped(policy):
    """The second one is preempted at about 20 ms, when it is late, and is back only when the first one has ended."""
    requests = [Request(0, 8, 12), Request(1, 4, 10, arrival_ns=1)]
    options = {"async_scheduling": False} if policy == "vllm-v1" else {}
    order = {"kind": "edf", "ttft_ms": 14.0, "drop_late": True}
    table = simulate(policy, requests, 20, queue_order=order, max_num_seqs=3, **options).requests
    assert table["num_preemptions"].tolist() == [0, 1]
    assert table["outcome"].tolist() == [Outcome.FINISHED, Outcome.FINISHED]


def scenario(seconds=10, max_connections=None, **engine):
    """Two classes that overload an engine of four slots."""
    return {
        "model": "llama-3.1-8b",
        "hardware": {"gpu": "h100-sxm"},
        "engine": {"policy": "orca", "max_batch_size": 4, "max_model_len": 2048, **engine},
        "cost": {"kind": "constant", "step_ms": 10.0},
        "traffic": [
            {
                "name": name,
                "arrivals": {"kind": "poisson", "rate_per_s": 20.0},
                "prompt_tokens": {"kind": "constant", "value": 100},
                "output_tokens": {"kind": "constant", "value": 20},
                **({} if max_connections is None else {"max_connections": max_connections}),
            }
            for name in ("chat", "batch")
        ],
        "run": {"duration_s": float(seconds)},
    }


DROPS = {"kind": "edf", "ttft_ms": 300.0, "by_class": {"batch": 2000.0}, "drop_late": True}


@pytest.mark.parametrize("aborts", [True, False], ids=["aborts", "computes on"])
def test_an_overloaded_engine_answers_in_time_or_not_at_all(tmp_path, aborts):
    results = run(scenario(queue_order=DROPS, abort_on_disconnect=aborts))
    requests, summary = results.tables.requests, results.summary()
    limit_ns = np.where(requests["class_index"] == 1, 2000, 300) * NS_PER_MS
    dropped = requests["outcome"] == Outcome.TIMED_OUT
    assert 0.2 < dropped.mean() < 0.9
    assert ((requests["cancelled_ns"] - requests["arrival_ns"]) == limit_ns)[dropped].all()
    assert (requests["admitted_ns"][dropped] == NEVER).all()
    assert (requests["first_token_ns"] - requests["arrival_ns"] <= limit_ns + 10 * NS_PER_MS)[~dropped].all()
    assert summary["turned_away"] == {"queue_timeout": int(dropped.sum())}
    results.save(tmp_path)
    assert Results.load(tmp_path).summary() == summary
    late = run(scenario(queue_order=DROPS | {"drop_late": False})).summary()
    assert late["turned_away"] == {}
    assert late["metrics"]["ttft_ms"]["max"] > 3000


def test_who_comes_to_the_engine_late_is_dropped_at_once():
    """What waits for a connection at its client is not in the queue, but its deadline goes on."""
    results = run(scenario(max_connections=1, queue_order=DROPS | {"by_class": {}}))
    requests = results.tables.requests
    due_ns = requests["arrival_ns"] + 300 * NS_PER_MS
    comes_late = requests["queued_ns"] > due_ns
    assert comes_late.sum() > 50
    assert (requests["outcome"][comes_late] == Outcome.TIMED_OUT).all()
    assert np.array_equal(requests["cancelled_ns"][comes_late], requests["queued_ns"][comes_late])


@pytest.mark.parametrize("policy", ["orca", "vllm-v1", "sarathi", "vtc"])
def test_two_ends_of_one_wait_contradict_each_other(policy):
    given = scenario(queue_timeout_s=1.0, queue_order=DROPS)
    given["engine"] = {key: given["engine"][key] for key in ("queue_timeout_s", "queue_order")} | {"policy": policy}
    with pytest.raises(ScenarioError) as caught:
        run(given)
    assert str(caught.value) == (
        "scenario: engine.queue_order.drop_late: contradicts queue_timeout_s: a wait in the queue would have two ends; "
        "drop_late, which ends it at the deadline, or queue_timeout_s, which ends it so long after its begin. "
        "Leave one of them out."
    )
    given["engine"]["queue_order"] = DROPS | {"drop_late": False}
    assert "queue_timeout" in run(given | {"run": {"num_requests": 20}}).facts.turn_away_reasons
