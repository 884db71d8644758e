"""Replications go on until the tails are known, and name what has no steady state."""

import numpy as np

import sim
from sim.planning.replicate import replicate
from sim.planning.workers import Workers
from tests.statistical.test_capacity import queue

ONE = Workers(num_jobs=1)


def busy(rate_per_s=150.0, **changes):
    return queue(4000, {"p99_ttft_ms": 50.0}, rate_per_s=rate_per_s, run={"num_requests": 1000}, **changes)


def test_it_stops_when_the_tail_is_known():
    found = replicate(busy(), precision=0.05, workers=ONE)
    assert found.is_precise
    assert found.intervals["ttft_p99_ms"].relative_half_width <= 0.05
    before = len(found.replications) - 4
    assert before < 6 or not replicate(busy(), precision=0.05, max_replications=before, workers=ONE).is_precise
    assert len(found.replications) < len(replicate(busy(), precision=0.02, workers=ONE).replications)


def test_the_first_replication_is_the_scenario_and_the_interval_holds_theory():
    scenario = busy()
    found = replicate(scenario, precision=0.03, workers=ONE)
    assert (
        found.replications[0].figures[0]["output_tokens_per_s"]
        == (sim.run(scenario).summary()["throughput"]["output_tokens_per_s"])
    )
    wait_ms = 150 * 4**2 / 1000 / (2 * (1 - 0.6))  # Pollaczek and Khinchine, M/D/1
    assert found.intervals["ttft_mean_ms"].has(4 + wait_ms)
    assert "itl_p99_ms" not in found.intervals  # answers of one token have no gaps


def test_it_ends_at_the_limit_and_says_that_it_did_not_arrive():
    found = replicate(busy(240.0), precision=0.001, max_replications=8, workers=ONE)
    assert (len(found.replications), found.is_precise) == (8, False)


def test_an_overloaded_system_has_no_steady_latencies():
    found = replicate(busy(400.0), workers=ONE)
    said = found.to_dict()
    assert said["instability"].startswith("unstable: offered")
    assert "exceeds the sustainable 250" in said["instability"]
    assert list(said["figures"]) == ["output_tokens_per_s", "good_share"]
    assert len(found.replications) == 12


def test_more_workers_change_nothing():
    one, two = (replicate(busy(), max_replications=6, workers=Workers(jobs)).to_dict() for jobs in (1, 2))
    assert one == two
    assert np.isfinite(one["figures"]["e2e_p99_ms"]["ci_high"])
