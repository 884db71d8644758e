"""What a search does besides finding the boundary: refusals, clients, headroom, replicas, the answer's shape."""

import math

import numpy as np
import pytest

import sim
from sim.errors import ScenarioError
from sim.planning.boundary import crossing
from sim.planning.capacity import find_capacity
from sim.planning.fleet_size import fleet_at, fleet_size, num_gpus
from sim.planning.headroom import answer, changes
from sim.planning.probe import Observation, Tally, Target, targets_of
from sim.planning.ratio import compare_capacities
from sim.planning.replications import load_of, replication, seed_of
from sim.planning.workers import Workers
from tests.statistical.test_capacity import queue

CSV = {
    "kind": "csv",
    "arrival_column": "arrival_s",
    "prompt_column": "prompt_tokens",
    "output_column": "output_tokens",
}
ONE = Workers(num_jobs=1)
QUICK = {"workers": ONE, "num_requests": 1000, "max_replications": 6}


def clients(num_clients, slo, **changes):
    arrivals = {"kind": "closed_loop", "num_clients": num_clients}
    traffic = [{"name": "all", "arrivals": arrivals, "prompt_tokens": 4000, "output_tokens": 1}]
    return queue(4000, slo, traffic=traffic, **changes)


@pytest.fixture(scope="module")
def found():
    return find_capacity(queue(4000, {"mean_queue_ms": 4.0}), **QUICK)


def test_the_answer_is_plain_and_complete(found):
    said = answer(found, changes(found, ONE))
    assert said["boundary"] | {"value": 0, "ci_low": 0, "ci_high": 0} == {
        "variable": "rate_per_s",
        "unit": "requests/s",
        "value": 0,
        "ci_low": 0,
        "ci_high": 0,
        "level": 0.95,
    }
    assert said["boundary"]["ci_low"] < said["boundary"]["value"] < said["boundary"]["ci_high"]
    assert (said["binding"], said["replications"], said["requests_per_run"]) == ("mean_queue_ms", 6, 1000)
    assert said["headroom"]["room"] == pytest.approx(said["boundary"]["value"] / 50 - 1)
    assert [(change["what"], change["factor"], change["holds"]) for change in said["headroom"]["changes"]] == [
        (what, factor, True) for what in ("rate", "prompt_tokens", "output_tokens") for factor in (1.1, 1.25)
    ]
    assert said["replicas"] is None
    assert "mean_queue_ms binds" in said["verdict"]
    assert said["economy"]["output_tokens_per_gpu_s"] == pytest.approx(said["boundary"]["value"])  # one token each


def test_a_price_becomes_a_cost_per_token(found):
    priced = queue(4000, {"mean_queue_ms": 4.0}, hardware={"gpu": "h100-sxm", "price_per_gpu_hour": 3.6})
    economy = answer(find_capacity(priced, **QUICK), [])["economy"]
    assert economy["price_per_million_output_tokens"] == pytest.approx(1000 / found.boundary.value)
    assert answer(found, [])["economy"]["price_per_million_output_tokens"] is None


def test_more_workers_change_nothing(found):
    again = find_capacity(queue(4000, {"mean_queue_ms": 4.0}), **QUICK | {"workers": Workers(num_jobs=2)})
    assert answer(again, []) == answer(found, [])


def test_a_load_beyond_the_boundary_has_no_headroom():
    found = find_capacity(queue(4000, {"mean_queue_ms": 4.0}, rate_per_s=240.0), **QUICK)
    assert changes(found, ONE) == []
    assert "the scenario's 240 exceed it by" in answer(found, [])["verdict"]


def test_closed_loops_are_searched_in_whole_clients():
    """With k clients and no think time a request waits for k - 1 others, 4 ms each."""
    found = find_capacity(clients(2, {"mean_queue_ms": 38.0}), **QUICK)
    assert (found.load.variable, found.boundary.value) == ("num_clients", 10)
    with pytest.raises(ScenarioError, match="the scenario's load is clients, not a rate"):
        fleet_size(found, 5.0)


@pytest.mark.parametrize(("router", "replicas"), [("random", 3), ("round_robin", 2), ("least_requests", 2)])
def test_a_fleet_is_as_large_as_its_router_makes_it(router, replicas):
    """Of 380 requests/s a random router gives each of two M/D/1 queues a load of 0.76, and waits of 6.3 ms; every
    second one of them waits half as long (E2/D/1).
    """
    one = find_capacity(queue(4000, {"mean_queue_ms": 4.0}, fleet={"router": {"kind": router}}), **QUICK)
    size = fleet_size(one, 380.0, workers=ONE)
    assert (one.boundary.value, size.copies, size.low, size.high) == (pytest.approx(500 / 3, rel=0.04), *[replicas] * 3)
    said = answer(one, [], size)
    assert said["replicas"] == {
        "rate_per_s": 380.0,
        "replicas": replicas,
        "ci_low": replicas,
        "ci_high": replicas,
        "gpus": replicas,
        "router": router,
        "is_simulated": True,
    }
    assert said["verdict"].endswith(f"380 requests/s need {replicas} replicas, {replicas} GPUs, behind {router}.")


def test_a_fleet_is_copied_with_all_its_kinds():
    fleet = {"replicas": 2, "others": [{"replicas": 1, "hardware": {"tensor_parallel": 2}}]}
    mixed = find_capacity(queue(4000, {"mean_queue_ms": 4.0}, fleet=fleet), **QUICK)
    size = fleet_size(mixed, 0.9 * mixed.boundary.value, workers=ONE)
    assert (size.copies, size.to_dict()["replicas"], size.to_dict()["gpus"]) == (1, 3, 4)
    fleets = fleet_at(mixed, 3, 100.0)
    assert (fleets.fleet.replicas, fleets.fleet.others[0].replicas, num_gpus(fleets)) == (6, 3, 12)


def test_of_the_largest_fleets_each_replica_is_taken_to_bear_as_much_as_one(found):
    size = fleet_size(found, 20_000.0, workers=ONE)
    assert (size.is_simulated, size.copies) == (False, math.ceil(20_000 / found.boundary.value))
    assert "if each bears an equal share as one alone would" in answer(found, [], size)["verdict"]


def message(scenario, **options):
    with pytest.raises(ScenarioError) as caught:
        find_capacity(scenario, **QUICK | options)
    return str(caught.value)


def test_an_slo_that_no_load_meets_names_the_term_and_the_best_value():
    assert message(queue(4000, {"p50_e2e_ms": 100.0, "mean_ttft_ms": 3.0})) == (
        "scenario: slo.mean_ttft_ms: not even 0.0122 requests/s meet it: 4 ms at best; 3 ms was asked for. "
        "Relax it, or change model, hardware or engine."
    )


def test_a_range_without_the_boundary_is_refused():
    scenario = queue(4000, {"mean_queue_ms": 4.0})
    assert "even 100 requests/s meet it (mean_queue_ms" in message(scenario, low=50.0, high=100.0)
    assert "not even 200 requests/s meet it" in message(scenario, low=200.0, high=300.0)
    assert "3 to 2 is no range" in message(scenario, low=3.0, high=2.0)
    assert "3 to inf is no range" in message(scenario, low=3.0, high=math.inf)
    assert "nan to 2 is no range" in message(scenario, low=math.nan, high=2.0)


def test_a_capacity_needs_an_slo():
    assert "slo: there is nothing to meet" in message(queue(4000, {}))


def test_variants_are_compared_replication_by_replication():
    """5 % longer service bears some 5 % less load, and surely: both meet the same arrivals."""
    scenario = queue(
        4000,
        {"mean_queue_ms": 100.0},
        compare={
            "slow": {"cost": {"kind": "linear", "base_ms": 0, "per_prefill_token_us": 1.05, "per_decode_us": 1.0}}
        },
    )
    comparison = compare_capacities(scenario, **QUICK)
    ratio = comparison.ratios["slow"]
    assert ratio.value == pytest.approx(1 / 1.05, rel=0.01)
    assert ratio.relative_half_width < 0.3 * comparison.capacities["slow"].boundary.relative_half_width
    said = comparison.to_dict()
    assert (said["baseline"], said["has_same_traffic"], said["missing"]) == ("base", True, {})
    assert said["verdict"].startswith("slow bears 0.9")


def test_a_variant_that_never_meets_the_slo_is_said_so():
    scenario = queue(
        4000,
        {"mean_e2e_ms": 6.0},
        compare={"slow": {"cost": {"kind": "linear", "base_ms": 7, "per_prefill_token_us": 1, "per_decode_us": 1}}},
    )
    comparison = compare_capacities(scenario, **QUICK)
    assert list(comparison.capacities) == ["base"]
    assert "slow has no capacity: not even" in comparison.verdict


def test_replications_have_seeds_of_their_own_and_traces_are_resampled(tmp_path):
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,1\n1,20,2\n2,30,3\n")
    traffic = [{"name": "replay", "trace": {**CSV, "path": str(tmp_path / "trace.csv")}}]
    scenario = queue(1, {"mean_ttft_ms": 1.0}, traffic=traffic, run={})
    assert load_of(scenario).value == pytest.approx(3 / 2)
    seeds = [replication(scenario, i, 50).seed for i in range(3)]
    assert seeds == [3, seed_of(3, 1), seed_of(3, 2)]
    assert len(set(seeds)) == 3
    results = [sim.run(replication(scenario, i, 50)) for i in range(2)]
    first, second = (result.tables.requests["prompt_tokens"].tolist() for result in results)
    assert len(first) == 50
    assert set(first) == {10, 20, 30}
    assert first != second


def observation(*tallies):
    return Observation((tallies,), np.empty(0), 100, 0, 1.0, 1.0, 1.0, 0.0)


def test_the_crossing_interpolates_between_loads_and_averages_over_replications():
    target = targets_of(queue(1, {"mean_ttft_ms": 10.0}), has_stability=False)
    observations = [
        [observation(Tally(10 * mean, 10, mean)) for mean in means] for means in ((8.0, 8.5, 7.5), (12.5, 13.0, 12.0))
    ]
    found = crossing(target, [100, 110], observations)
    share = math.log(10 / 8) / math.log(12.5 / 8)
    assert found.interval.value == pytest.approx(100 * 1.1**share)
    assert found.interval.low < found.interval.value < found.interval.high
    assert np.mean(found.log_loads) == pytest.approx(math.log(found.interval.value), abs=0.01)


def test_a_percentile_is_judged_by_the_share_beyond_its_limit():
    (target,) = targets_of(queue(1, {"p99_ttft_ms": 10.0}), has_stability=False)
    assert target.score([Tally(1, 100, 9.0)]) == pytest.approx(0)
    assert target.score([Tally(2, 100, 9.0), Tally(0, 100, 9.0)]) == pytest.approx(0)
    assert target.score([Tally(4, 100, 9.0)]) == pytest.approx(math.log(4))
    assert target.score([Tally(0, 0, None)]) == math.log(0.01)
    assert Target("goodput", 0.9).score([Tally(20, 100, 0.8)]) == pytest.approx(math.log(2))


def test_a_target_that_is_never_near_its_limit_leaves_the_crossing_finite():
    target = targets_of(queue(1, {"mean_ttft_ms": 10.0}), has_stability=False)
    observations = [[observation(Tally(0, 0, None)) for _ in range(3)] for _ in range(2)]
    assert crossing(target, [100, 110], observations).interval.value == pytest.approx(110 * 1.1)
