"""Every scenario runs, says what it is for, and shows what its header promises."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sim

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))
QUESTIONS = sorted((ROOT / "scenarios" / "questions").glob("*.yaml"))
NUM_REQUESTS = 250
"""Of each scenario, enough to run all of it."""


@pytest.fixture(autouse=True)
def _without_shared_data(monkeypatch: pytest.MonkeyPatch):
    """Scenarios work for those who have only this repository."""
    monkeypatch.setenv("SERVESIM_SHARED", "/nonexistent")


@pytest.mark.parametrize("path", SCENARIOS + QUESTIONS, ids=lambda path: path.stem)
def test_it_says_what_it_is_for(path: Path):
    header = re.match(r"(#.*\n)+", path.read_text())
    assert header, "a scenario begins with a comment"
    for word in ("Question:", "Answer:", "Run time:"):
        assert word in header[0]
    assert sim.load_scenario(path).name == path.stem


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_it_runs(path: Path):
    scenario = sim.load_scenario(path, [f"run.num_requests={NUM_REQUESTS}"])
    results = [sim.run(scenario)] if not scenario.compare else sim.compare(scenario).results.values()
    for result in results:
        summary = result.summary()
        assert sum(summary["outcomes"].values()) == NUM_REQUESTS
        assert summary["outcomes"]["unfinished"] == 0
        assert sum(summary["limits"]["shares"].values()) == pytest.approx(1)


def load(name: str, *overrides: str) -> sim.Scenario:
    return sim.load_scenario(ROOT / "scenarios" / f"{name}.yaml", overrides)


def test_kv_pressure_is_limited_by_kv():
    summary = sim.run(load("kv_pressure")).summary()
    assert summary["limits"]["binds"] == "kv"
    assert summary["kv"]["num_preemptions"] > 100
    assert summary["kv"]["peak_usage"] > 0.99


def test_who_gives_up_kv_decides_how_often_and_how_much_is_computed_again():
    comparison = sim.compare(load("victim_rules"))
    found = {name: results.tables.requests for name, results in comparison.results.items()}
    preemptions = {name: int(requests["num_preemptions"].sum()) for name, requests in found.items()}
    recomputed = {name: int(requests["recomputed_tokens"].sum()) for name, requests in found.items()}
    for name in ("oldest arrival", "most blocks"):
        assert preemptions[name] < 0.6 * preemptions["base"]
        assert recomputed[name] > 2 * recomputed["base"]
    assert found["base"]["num_preemptions"].max() == 5
    assert found["oldest arrival"]["num_preemptions"].max() > 50
    tokens_per_s = [s["throughput"]["output_tokens_per_s"] for s in comparison.summaries.values()]
    assert max(tokens_per_s) < 1.01 * min(tokens_per_s)
    slowest_ns = {}
    for name in ("base", "lowest priority"):
        requests = found[name]
        for index, traffic_class in enumerate(("chat", "reports")):
            latency_ns = (requests["finished_ns"] - requests["arrival_ns"])[requests["class_index"] == index]
            slowest_ns[name, traffic_class] = np.percentile(latency_ns, 99)
    assert slowest_ns["lowest priority", "chat"] < 0.9 * slowest_ns["base", "chat"]
    assert slowest_ns["lowest priority", "reports"] < 1.01 * slowest_ns["base", "reports"]


def test_a_client_with_eight_connections_never_shows_more_than_eight():
    comparison = sim.compare(load("client_limit"))
    limited, unlimited = comparison.summaries.values()
    assert limited["limits"]["binds"] == "client"
    assert limited["iterations"]["peak_num_running"] == 8
    assert limited["metrics"]["client_queue_ms"]["mean"] > 1000
    assert unlimited["metrics"]["client_queue_ms"]["max"] == 0
    assert unlimited["iterations"]["peak_num_running"] > 8


def test_continuous_batching_gains_with_the_spread_of_outputs_and_nothing_without():
    """Outputs between 256 - spread and 256 + spread: the fewer are alike, the more places stand idle."""
    ratios = []
    for spread in (0, 64, 192, 255):
        outputs = f"traffic[0].output_tokens={{kind: uniform, low: {256 - spread}, high: {256 + spread}}}"
        scenario = load("static_vs_continuous_equal", outputs, "traffic[0].arrivals.num_requests=256")
        table = sim.compare(scenario).table
        ratios.append(table[0]["values"]["makespan_s"] / table[-1]["values"]["makespan_s"])
    assert ratios[0] == pytest.approx(1, abs=0.005)
    assert ratios == sorted(ratios)
    assert ratios[-1] > 1.4


def test_an_instance_more_brings_more_than_a_larger_batch_and_one_queue_more_than_two():
    summaries = sim.compare(load("triton_instances", "run.num_requests=1500")).summaries
    p99_ms = {name: summary["metrics"]["e2e_ms"]["p99"] for name, summary in summaries.items()}
    order = ["4 instances", "2 instances", "2 replicas in turn", "batch of 32", "base"]
    assert sorted(p99_ms, key=p99_ms.__getitem__) == order


def test_iteration_level_scheduling_gains_nothing_without_selective_batching():
    spans_s = {name: s["makespan_s"] for name, s in sim.compare(load("selective_batching")).summaries.items()}
    assert 2 * spans_s["orca"] < spans_s["static"] < spans_s["no selective batching"] / 5
    equal = ("traffic[0].prompt_tokens=272", "traffic[0].output_tokens=64")
    alike = {name: s["makespan_s"] for name, s in sim.compare(load("selective_batching", *equal)).summaries.items()}
    assert alike["no selective batching"] == alike["orca"]


def test_prompt_release_pays_when_clients_leave():
    aborted, kept = sim.compare(load("cancellations", "run.num_requests=400")).summaries.values()
    assert aborted["cancellation"]["tokens_for_departed"] < 0.1 * kept["cancellation"]["tokens_for_departed"]
    assert aborted["metrics"]["ttft_ms"]["p99"] < kept["metrics"]["ttft_ms"]["p99"]


@pytest.mark.parametrize("name", ["prefix_caching", "multi_turn"])
def test_what_the_cache_finds_is_not_computed_again(name: str):
    comparison = sim.compare(load(name, "run.num_requests=800"))
    cached, computed, small = comparison.summaries.values()
    assert computed["kv"]["cached_prompt_tokens"] == 0
    assert 0 < small["kv"]["cached_prompt_tokens"] < cached["kv"]["cached_prompt_tokens"]
    assert 3 * cached["metrics"]["ttft_ms"]["p99"] < computed["metrics"]["ttft_ms"]["p99"]
    requests = comparison.results["base"].tables.requests
    assert requests["cached_prompt_tokens"].sum() > 0.8 * requests["prompt_tokens"].sum()


def test_chunked_prefill_bounds_the_stall_of_running_answers():
    summaries = sim.compare(load("long_prompt_burst")).summaries.values()
    by_class = [summary["by_class"] for summary in summaries]
    whole, chunks_of_2048, chunks_of_512 = (classes["chat"]["metrics"]["itl_ms"]["max"] for classes in by_class)
    assert whole > 500 > 100 > chunks_of_2048 > chunks_of_512
    ttfts = [classes["documents"]["metrics"]["ttft_ms"]["mean"] for classes in by_class]
    assert ttfts == sorted(ttfts)


def waits_s(summary: dict[str, Any]) -> dict[str, float]:
    """The longest wait of each client."""
    return {name: client["longest_wait_ms"] / 1e3 for name, client in summary["fairness"]["by_client"].items()}


def test_low_priority_starves_until_the_overload_is_over_and_aging_bounds_its_wait():
    starved, aged, fcfs = (waits_s(summary) for summary in sim.compare(load("starvation")).summaries.values())
    assert starved["batch"] > 200 > 20 > starved["chat"]
    assert aged["batch"] < aged["chat"] + 20 < 60
    assert fcfs["batch"] < 30


def test_what_protects_a_client_from_a_noisy_one():
    summaries = sim.compare(load("noisy_neighbour")).summaries
    p99_s = {name: s["by_class"]["steady"]["metrics"]["ttft_ms"]["p99"] / 1e3 for name, s in summaries.items()}
    assert p99_s["base"] > 30
    assert p99_s["VTC"] < 1
    assert p99_s["VTC"] < p99_s["quota"] < 0.2 * p99_s["base"]
    assert summaries["rate limit"]["turned_away"].keys() == {"token_bucket"}
    assert max(p99_s["rate limit"], p99_s["short queue and VTC"]) < 1 < p99_s["refused when late"] < 4


def test_styles_of_batching_on_real_traffic():
    """Whole batches fall behind; whole prompts stall running answers, chunks do not."""
    found = sim.compare(load("azure_batching_styles", "run.num_requests=600")).summaries
    stable = {name: summary["steady"]["is_stable"] for name, summary in found.items()}
    assert [name for name in stable if not stable[name]] == ["one by one", "static", "dynamic"]
    stalls_ms = {name: found[name]["metrics"]["itl_ms"]["max"] for name in stable if stable[name]}
    assert min(stalls_ms["orca"], stalls_ms["vllm-v0"]) > 140 > 70 > stalls_ms["vllm-v1"] > stalls_ms["sarathi"]
    good = {name: summary["throughput"]["goodput_requests_per_s"] for name, summary in found.items()}
    assert max(good["one by one"], good["static"], good["dynamic"]) < 0.1 * good["vllm-v0"]
    assert min(good["vllm-v1"], good["sarathi"]) > 1.15 * max(good["orca"], good["vllm-v0"])


def test_ways_out_of_short_memory_on_real_traffic():
    """Each has its own price: tokens computed anew, idle KV, failed requests, or queues in place of pressure."""
    found = sim.compare(load("azure_memory_pressure")).summaries
    ttft_ms = {name: summary["metrics"]["ttft_ms"]["p99"] for name, summary in found.items()}
    assert ttft_ms["reject"] < ttft_ms["swap"] < ttft_ms["base"] < ttft_ms["pause"] < ttft_ms["reserve"]
    assert {name for name, summary in found.items() if summary["outcomes"]["rejected"]} == {"reject"}
    assert {name for name, summary in found.items() if summary["kv"]["recomputed_tokens"] == 0} == {
        "swap",
        "reject",
        "reserve",
    }
    assert found["swap"]["kv"]["num_preemptions"] > 20
    assert found["reserve"]["kv"]["num_preemptions"] == 0


@pytest.mark.parametrize(("model", "lost"), [("llama-3.1-8b", (0.11, 0.13)), ("llama-3.2-1b", (0.37, 0.43))])
def test_what_the_scheduler_costs_and_planning_ahead_hides(model: str, lost: tuple[float, float]):
    found = sim.compare(load("scheduler_overhead", f"model={model}")).summaries
    tokens = {name: summary["throughput"]["output_tokens_per_s"] for name, summary in found.items()}
    ratio = {name: tokens[name] / tokens["base"] for name in found}
    assert lost[0] < 1 - ratio["sync, measured"] < 1 - ratio["sync, linear"] < lost[1]
    assert 0.9 < ratio["sync, 0.3 ms"] < 0.99
    assert min(ratio["async, linear"], ratio["async, measured"], ratio["async, free"]) > 0.97


def longest_decode_step_ms(results: sim.Results) -> float:
    """Of the steps that only decode and follow such a step: from its end to theirs, host time included."""
    iterations = results.tables.iterations
    only_decodes = iterations["num_prefills"] == 0
    return float(np.diff(iterations["end_ns"])[only_decodes[1:] & only_decodes[:-1]].max()) / 1e6


def test_admission_for_latency_keeps_a_target_that_memory_alone_breaks():
    comparison = sim.compare(load("admission_for_latency"))
    by_memory, at_12, at_10 = comparison.results.values()
    assert (
        longest_decode_step_ms(by_memory) > 16 > 12 > longest_decode_step_ms(at_12) > 10 > longest_decode_step_ms(at_10)
    )
    most = [results.tables.iterations["num_running"].max() for results in (by_memory, at_12, at_10)]
    assert most == [430, 259, 176]
    summaries = list(comparison.summaries.values())
    assert [summary["kv"]["num_preemptions"] > 0 for summary in summaries] == [True, False, False]
    p99_itl_ms = [summary["metrics"]["itl_ms"]["p99"] for summary in summaries]
    assert p99_itl_ms == sorted(p99_itl_ms, reverse=True)
    ttft_ms = [summary["metrics"]["ttft_ms"]["mean"] for summary in summaries]
    assert ttft_ms == sorted(ttft_ms)
    tokens = [summary["throughput"]["output_tokens_per_s"] for summary in summaries]
    assert 0.8 < tokens[1] / tokens[0] < 0.86 > 0.7 > tokens[2] / tokens[0]


def test_a_real_trace_is_preferred_where_there_is_one(shared: Path, monkeypatch: pytest.MonkeyPatch):
    assert "in place of" in sim.run(load("azure_code", "run.num_requests=5")).facts.provenance["notes"][0]
    monkeypatch.setenv("SERVESIM_SHARED", str(shared))
    notes = sim.run(load("azure_code", "run.num_requests=5")).facts.provenance["notes"]
    assert notes == ["class 'code' plays ${SERVESIM_SHARED}/data/traces/azure_llm_2023/code_first30min.csv"]
