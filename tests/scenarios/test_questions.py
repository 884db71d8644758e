"""Questions that users of real servers asked in public: each scenario reproduces what was seen, and says why."""

import functools
from pathlib import Path

import numpy as np
import pytest

import sim
from sim.errors import ScenarioError
from sim.planning.explain import explain

FOLDER = Path(__file__).resolve().parents[2] / "scenarios" / "questions"


def load(name, *overrides):
    return sim.load_scenario(FOLDER / f"{name}.yaml", overrides)


@functools.cache
def summaries(name, *overrides):
    """Of the scenario and its variants."""
    return list(sim.compare(load(name, *overrides)).summaries.values())


def column(found, *keys):
    for key in keys:
        found = [summary[key] for summary in found]
    return found


def test_every_question_is_asked_here():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [path.stem for path in FOLDER.glob("*.yaml") if f"def test_{path.stem}(" not in source] == []


def test_v1_concurrency_from_kv():
    found = explain(load("v1_concurrency_from_kv"))
    assert (found["kv_bytes_per_token"], found["num_gpu_blocks"]) == (131_072, 1952)
    assert found["max_concurrency_at_max_model_len"] == pytest.approx(1.56, abs=0.005)
    longer = load(
        "v1_concurrency_from_kv", "engine.max_model_len=29000", f"engine.kv_cache_memory_bytes={1478 * 2**21}"
    )
    with pytest.raises(ScenarioError, match="the largest max_model_len that fits is 23648"):
        explain(longer)


def test_v2_requests_at_once():
    scenario = load("v2_requests_at_once")
    found = explain(scenario)
    assert found["max_concurrency_at_max_model_len"] == pytest.approx(4.61, abs=0.005)
    assert found["num_gpu_blocks"] // -(-800 // found["block_size"]) == 47
    summary = sim.run(scenario).summary()
    assert (summary["iterations"]["peak_num_running"], summary["limits"]["binds"]) == (47, "kv")


def test_v3_beyond_capacity():
    flooded, less, below = summaries("v3_beyond_capacity")
    capacity = flooded["throughput"]["requests_per_s"]
    assert capacity == pytest.approx(2.3, abs=0.1)
    assert less["throughput"]["requests_per_s"] == pytest.approx(capacity, rel=0.01)
    assert flooded["makespan_s"] == pytest.approx(435, rel=0.05)
    ttft = flooded["metrics"]["ttft_ms"]
    assert ttft["max"] / 1e3 == pytest.approx(flooded["makespan_s"], rel=0.05)
    assert ttft["mean"] == pytest.approx(ttft["max"] / 2, rel=0.05)
    assert below["metrics"]["ttft_ms"]["p99"] < 1000


def test_v4_more_slots_worse_itl():
    few, many = summaries("v4_more_slots_worse_itl")
    assert (few["limits"]["binds"], many["limits"]["binds"]) == ("slots", "arrivals")
    assert [round(ms, 1) for ms in column([few, many], "metrics", "itl_ms", "mean")] == [8.5, 8.9]
    assert few["metrics"]["ttft_ms"]["mean"] > 100 * many["metrics"]["ttft_ms"]["mean"]
    assert few["throughput"]["requests_per_s"] < 12.7 < 15 < many["throughput"]["requests_per_s"]
    assert few["causes"]["ttft"]["p99"]["parts_ms"]["slots"] > 0.9 * few["causes"]["ttft"]["p99"]["mean_ms"]


def test_v5_token_budget():
    found = summaries("v5_token_budget")
    assert (np.diff(column(found, "metrics", "itl_ms", "p99")) > 0).all()
    ttft = np.array(column(found, "metrics", "ttft_ms", "mean"))
    assert (np.diff(ttft) < 0).all()
    assert ttft[0] - ttft[2] > 5 * (ttft[2] - ttft[-1])  # the knee


def test_v6_chunked_offline():
    chunked, whole = column(summaries("v6_chunked_offline"), "makespan_s")
    assert chunked > 1.005 * whole
    free = summaries("v6_chunked_offline", "cost.base_ms=0", "cost.per_context_token_ns=0")
    chunked, whole = column(free, "makespan_s")
    assert chunked == pytest.approx(whole, rel=1e-6)


def test_v8_preemption_thrash():
    short, more, ample, fewer = summaries("v8_preemption_thrash")
    recomputed = column([short, more, ample], "kv", "recomputed_tokens")
    assert recomputed == sorted(recomputed, reverse=True)
    assert (recomputed[-1], fewer["kv"]["num_preemptions"]) == (0, 0)
    assert fewer["throughput"]["goodput_requests_per_s"] > 1.5 * short["throughput"]["goodput_requests_per_s"]
    requests = sim.run(load("v8_preemption_thrash")).tables.requests
    assert requests["num_preemptions"].max() >= 4
    assert requests["recomputed_tokens"].sum() == short["kv"]["recomputed_tokens"]


def test_v12_static_against_continuous():
    spreads = [
        "128",
        "{kind: uniform, low: 64, high: 192}",
        "{kind: uniform, low: 1, high: 255}",
        "{kind: lognormal, mean: 128, cv: 1.5}",
    ]
    gains = []
    for spread in spreads:
        rates = column(
            summaries("v12_static_against_continuous", f"traffic.offline.output_tokens={spread}"),
            "throughput",
            "output_tokens_per_s",
        )
        gains.append([rate / rates[0] for rate in rates[1:]])
    continuous, paged = np.array(gains).T
    assert continuous[0] == 1
    assert (np.diff(continuous) > 0.2).all()
    assert (np.diff(paged) > 0.2).all()
    assert (paged > continuous).all()


def test_v12_without_batching_the_kth_finishes_after_k_services():
    alone = sim.run(load("v12_static_against_continuous", "engine.max_batch_size=1", "run.num_requests=10"))
    ends_ns = alone.tables.requests["finished_ns"]
    assert ends_ns == pytest.approx(ends_ns[0] * np.arange(1, 11), rel=1e-6)
