"""Service per client and what it says, worked out by hand on small runs."""

import numpy as np
import pytest

from sim import run
from sim.clock import NS_PER_S
from sim.metrics.fairness import cumulative_service, jain_index
from sim.metrics.tokens import TokenTimes

STEP_S = 0.01


def results(rows, **engine):
    """An engine of 10 ms steps and its results; each row: class, arrivals per second from the start, prompt, output."""
    classes = [
        {
            "name": name,
            "arrivals": {"kind": "constant", "rate_per_s": rate_per_s},
            "num_requests": num_requests,
            "prompt_tokens": {"kind": "constant", "value": prompt},
            "output_tokens": {"kind": "constant", "value": output},
        }
        for name, num_requests, rate_per_s, prompt, output in rows
    ]
    return run(
        {
            "model": "llama-3.1-8b",
            "hardware": {"gpu": "h100-sxm"},
            "engine": {"policy": "orca", "max_batch_size": 1, "max_model_len": 2048, **engine},
            "cost": {"kind": "constant", "step_ms": STEP_S * 1e3},
            "traffic": classes,
        }
    )


@pytest.fixture(scope="module")
def two_clients():
    """One request each, one after the other: 5 prompt tokens and 3 outputs, then 7 and 2."""
    return results([("a", 1, 1e6, 5, 3), ("b", 1, 1e5, 7, 2)])


def test_service_over_time_counts_prompts_at_admission_and_outputs_twice_as_they_come(two_clients):
    requests = two_clients.tables.requests
    tokens = TokenTimes(two_clients.tables)
    admitted_ns, first_ns = requests["admitted_ns"], requests["first_token_ns"]
    times_ns = np.array([admitted_ns[0] - 1, admitted_ns[0], first_ns[0], admitted_ns[1], 10 * NS_PER_S])
    paths = [cumulative_service(requests, tokens, requests["class_index"] == i, times_ns).tolist() for i in (0, 1)]
    assert paths == [[0, 5, 7, 11, 11], [0, 0, 0, 7, 11]]


def test_the_summary_of_two_clients(two_clients):
    fairness = two_clients.summary()["fairness"]
    assert {name: client["service"] for name, client in fairness["by_client"].items()} == {"a": 11, "b": 11}
    assert (fairness["jain_index"], fairness["service_difference"]) == (1.0, 0)
    assert fairness["peak_service_difference"] == 9
    waits_ms = [client["longest_wait_ms"] for client in fairness["by_client"].values()]
    assert waits_ms == pytest.approx([0, 3 * STEP_S * 1e3], abs=0.1)
    slowdowns = [client["slowdown"] for client in fairness["by_client"].values()]
    assert [(s["count"], s["mean"]) for s in slowdowns] == [(1, pytest.approx(1)), (1, pytest.approx(2.5, abs=0.01))]
    buckets = [(b["low"], b["high"], b["slowdown"]["count"]) for b in fairness["slowdown_by_tokens"]]
    assert buckets == [(5, 8, 1), (9, 16, 1)]


def test_one_client_has_nobody_to_be_compared_with():
    assert results([("a", 3, 10.0, 5, 3)]).summary()["fairness"] is None


def test_waits_of_those_who_were_never_admitted_count():
    """The second client's request gives up after a second in the queue."""
    fairness = results([("a", 1, 1e6, 5, 200), ("b", 1, 1e5, 5, 5)], queue_timeout_s=1.0).summary()["fairness"]
    assert fairness["by_client"]["b"]["longest_wait_ms"] == pytest.approx(1000)
    assert fairness["by_client"]["b"]["service"] == 0
    assert fairness["jain_index"] == 0.5


@pytest.mark.parametrize(
    ("shares", "expected"), [([1, 1, 1, 1], 1.0), ([1, 0, 0, 0], 0.25), ([3, 1], 0.8), ([0, 0], None)]
)
def test_jain_index(shares, expected):
    assert jain_index(np.array(shares)) == expected
