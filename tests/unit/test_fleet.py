"""Fleets as scenarios describe them, and what is reported of them."""

import functools
from pathlib import Path

import numpy as np
import pytest

from sim.build import run
from sim.errors import ScenarioError
from sim.planning.next_change import next_change
from sim.replica import replicas
from sim.report.console import summary_report
from sim.report.plots import save_all
from sim.request import Request
from sim.results import Results
from sim.routing.base import ReplicaView
from sim.routing.least import LeastRequests
from sim.routing.prefix_affinity import PrefixAffinity
from sim.routing.vllm_dp import VllmDP
from sim.scenario import load_scenario, parse_scenario
from sim.tokens import Run, TokenRuns
from tests.laws.test_fleets import same

CHAT = {
    "name": "chat",
    "arrivals": {"kind": "poisson", "rate_per_s": 80.0},
    "prompt_tokens": {"kind": "uniform", "low": 1, "high": 300},
    "output_tokens": {"kind": "uniform", "low": 1, "high": 40},
}
BASE = {
    "name": "tiny",
    "seed": 1,
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": {"policy": "vllm-v1", "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512},
    "traffic": [CHAT],
    "run": {"num_requests": 200},
    "slo": {"p90_ttft_ms": 200},
}
OTHERS = [{"replicas": 1, "hardware": {"gpu": "a100-sxm-80gb"}, "engine": {"max_num_seqs": 4}}]
MIXED = BASE | {"fleet": {"replicas": 2, "others": OTHERS, "router": {"kind": "least_requests"}}}


@functools.cache
def mixed():
    return run(MIXED)


def test_one_replica_is_the_engine_without_a_router():
    alone, fleet = run(BASE), run(BASE | {"fleet": {}})
    assert same(fleet.tables, alone.tables)
    assert same(fleet.replicas[0].tables, alone.tables)
    ours, theirs = fleet.summary(), alone.summary()
    differing = {key for key in ours if ours[key] != theirs[key]}
    assert differing == {"replicas", "provenance"}
    assert (len(ours["replicas"]), theirs["replicas"]) == (1, [])


def test_replicas_that_differ():
    results = mixed()
    fast, _, slow = (parts.limits.num_gpu_blocks for parts in replicas(parse_scenario(MIXED)))
    assert [facts.num_blocks for facts in results.facts.replicas] == [fast, fast, slow]
    assert slow != fast
    summary = results.summary()
    assert [replica["name"] for replica in summary["replicas"]] == [
        "0: 1 × h100-sxm, vllm-v1",
        "1: 1 × h100-sxm, vllm-v1",
        "2: 1 × a100-sxm-80gb, vllm-v1",
    ]
    assert sum(replica["num_requests"] for replica in summary["replicas"]) == 200
    peaks = [int(replica.tables.iterations["num_running"].max()) for replica in results.replicas]
    assert peaks[2] == 4 < max(peaks) <= 8
    assert summary["kv"]["num_blocks"] == 2 * fast + slow
    running = [replica["mean_num_running"] for replica in summary["replicas"]]
    assert summary["iterations"]["mean_num_running"] == pytest.approx(sum(running))


def test_figures_of_a_fleet_are_those_of_its_replicas_together():
    results = mixed()
    ttft_ns = np.concatenate([replica.latencies["ttft"].values_ns for replica in results.replicas])
    assert sorted(ttft_ns) == sorted(results.latencies["ttft"].values_ns)
    gaps = [np.repeat(replica.gaps.values_ns, replica.gaps.weights) for replica in results.replicas]
    assert sorted(np.concatenate(gaps)) == np.repeat(results.gaps.values_ns, results.gaps.weights).tolist()
    for causes in (results.ttft_causes, results.itl_causes):
        assert np.array_equal(sum(causes.parts.values()), causes.values_ns)
    shares = results.limits.shares
    each = [replica.limits.shares for replica in results.replicas]
    assert shares == pytest.approx({name: np.mean([own[name] for own in each]) for name in shares})


def test_a_saved_fleet_and_its_resolved_scenario(tmp_path: Path):
    results = mixed()
    results.save(tmp_path)
    loaded = Results.load(tmp_path)
    assert loaded.summary() == results.summary()
    again = run(results.facts.provenance["scenario"])
    assert same(again.tables, results.tables)
    assert again.facts.provenance["scenario_sha256"] == results.facts.provenance["scenario_sha256"]


def test_a_limit_of_the_client_holds_for_the_whole_fleet():
    limited = run(MIXED | {"traffic": [CHAT | {"max_connections": 3}]})
    requests = limited.tables.requests
    sent, over = np.sort(requests["queued_ns"]), np.sort(requests["released_ns"])
    at_once = np.arange(1, 201) - np.searchsorted(over, sent, side="right")
    assert at_once.max() == 3
    assert limited.limits.binds == "client"


def test_every_replica_gets_more_in_the_next_change():
    found = next_change(parse_scenario(MIXED | {"run": {"num_requests": 60}}))
    assert {change.resource: change.factor for change in found.changes}["slots"] == 9 / 8


def test_pictures_and_tables_of_a_fleet(tmp_path: Path):
    names = {path.stem for path in save_all(mixed(), tmp_path)}
    assert {"latency_cdf", "latency_causes", "replicas"} <= names
    assert names.isdisjoint({"timeline", "scheduled_tokens", "waste"})
    many = run(BASE | {"fleet": {"replicas": 20}, "run": {"num_requests": 30}})
    rows = [part for part in summary_report(many.summary(), "x") if getattr(part, "row_count", 0) == 17]
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        ({"router": {"kind": "round_robbin"}}, "fleet.router.kind: unknown routing policy 'round_robbin'; known: "),
        ({"others": [{"engine": {"max_num_seq": 1}}]}, "fleet.others[0]: engine.max_num_seq: unknown key"),
        ({"others": [{"hardware": {"gpu": "h100"}}]}, "hardware.gpu: unknown GPU 'h100'"),
        ({"replicas": 0}, "fleet.replicas: expected at least 1, got 0"),
        (
            {"others": [{"engine": {"policy": "static"}}]},
            "fleet.others: some replicas stream their answers and others do not",
        ),
    ],
)
def test_mistakes(fleet, message):
    with pytest.raises(ScenarioError) as caught:
        run(BASE | {"fleet": fleet})
    assert message in str(caught.value)


class View(ReplicaView):
    def __init__(self, num_requests=0, waiting=0, running=0):
        self.num_requests, self.num_tokens = num_requests, 0
        self._waiting, self._running = waiting, running

    def num_waiting(self):
        return self._waiting

    def num_running(self):
        return self._running

    def kv_usage(self):
        return 0.0


def picks(policy, views, requests, now_ns=0):
    return [policy.pick(request, 0, now_ns, views) for request in requests]


def test_equal_scores_take_turns():
    policy = LeastRequests()
    assert picks(policy, [View(2), View(1), View(1)], [None] * 4) == [1, 2, 1, 2]


def test_vllm_counts_waiting_four_times_and_looks_again_after_its_interval():
    policy = VllmDP(VllmDP.Options(kind="vllm_dp", stats_interval_ms=100))
    views = [View(running=9), View(waiting=1, running=2), View(running=7)]
    assert picks(policy, views, [None] * 4) == [1, 2, 0, 1]
    views[0] = View()
    assert picks(policy, views, [None], now_ns=99_999_999) == [2]
    assert picks(policy, views, [None], now_ns=100_000_000) == [0]


def text(*runs, prompt=None):
    prefix = tuple(Run(*run) for run in runs)
    return Request(0, prompt or sum(length for _, length in prefix), 5, tokens=TokenRuns(prefix, "answer"))


def test_prefix_affinity_follows_the_longest_match_until_the_load_is_uneven():
    options = PrefixAffinity.Options(kind="prefix_affinity", min_match=0.5, balance_abs=2, balance_rel=1.5)
    policy = PrefixAffinity(options, 2)
    idle, busy = [View(), View()], [View(9), View(1)]
    assert picks(policy, idle, [text(("a", 10)), text(("b", 10))]) == [0, 1]
    assert picks(policy, idle, [text(("b", 8)), text(("a", 10), ("answer", 4)), text(("a", 10))]) == [1, 0, 0]
    assert picks(policy, busy, [text(("a", 10))]) == [1]  # too uneven
    assert picks(policy, [View(1), View(2)], [text(("b", 4), prompt=10)]) == [0]  # too short a match


def test_the_example():
    path = Path(__file__).resolve().parents[2] / "scenarios" / "fleet_routing.yaml"
    kinds = ("round_robin", "session_sticky")
    runs = [run(load_scenario(path, [f"fleet.router.kind={kind}", "run.num_requests=800"])) for kind in kinds]
    blind, sticky = (results.summary() for results in runs)
    assert sticky["kv"]["cached_prompt_tokens"] > 1.5 * blind["kv"]["cached_prompt_tokens"]
    assert sticky["metrics"]["ttft_ms"]["mean"] < 0.8 * blind["metrics"]["ttft_ms"]["mean"]
