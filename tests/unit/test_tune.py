"""The recommendation, the efficient settings and the knee."""

import pytest

import sim
from sim.errors import ScenarioError
from sim.planning.tune import BUDGETS, SEQUENCES, Setting, efficient, knee, recommended, tune
from sim.planning.workers import Workers
from tests.unit.test_sweep import BASE

QUICK = {"workers": Workers(num_jobs=1), "num_requests": 300, "max_replications": 6}


def scenario(**engine):
    return sim.parse_scenario(
        BASE
        | {
            "engine": {"policy": "vllm-v1", "max_model_len": 2048, **engine},
            "traffic": [BASE["traffic"][0] | {"prompt_tokens": 500, "output_tokens": 20}],
            "slo": {"p90_ttft_ms": 300.0, "p90_itl_ms": 200.0},
        }
    )


@pytest.fixture(scope="module")
def slots_bind():
    return tune(scenario(max_num_seqs=2, max_num_batched_tokens=2048), **QUICK)


def test_too_few_sequences_are_found_out(slots_bind):
    assert slots_bind["own"] == {"max_num_batched_tokens": 2048, "max_num_seqs": 2}
    assert slots_bind["recommended"]["max_num_seqs"] >= 64
    assert slots_bind["ratio"]["ci_low"] > 2
    assert "max_num_seqs up: fewer requests wait for a place in the batch" in slots_bind["reason"]


def test_every_setting_is_tried_and_the_efficient_ones_are_marked(slots_bind):
    settings = slots_bind["settings"]
    assert len(settings) == len(BUDGETS) * (len(SEQUENCES) + 1)
    points = [list(row["values"].values()) for row in settings]
    assert [row["is_efficient"] for row in settings] == efficient(points)
    assert any(row["is_efficient"] for row in settings)


def test_it_shows_the_knee_and_the_stresses(slots_bind):
    loads = [point["load"] for point in slots_bind["knee"]["curve"]]
    assert loads == sorted(loads)
    assert slots_bind["knee"]["at"] in loads
    assert set(slots_bind["stress"]) == {"long prompts", "clients leave"}
    own, tuned = slots_bind["stress"]["long prompts"]
    assert tuned["p90_ttft_ms"] <= own["p90_ttft_ms"]


def test_an_engine_without_a_budget_has_nothing_to_tune():
    static = sim.parse_scenario(BASE | {"engine": {"policy": "static", "max_batch_size": 4}}, place="x.yaml")
    with pytest.raises(ScenarioError, match="'static' has no max_num_batched_tokens or max_num_seqs to tune"):
        tune(static, **QUICK)


def test_what_makes_no_difference_is_left_as_it_is():
    scores = {(2048, 64): 0.2, (2048, 1024): 0.0, (8192, 64): 0.1, (8192, 256): -0.1, (8192, 1024): -0.1}
    settings = [Setting(*pair, score, "p99_ttft_ms", {}) for pair, score in scores.items()]
    own = (2048, 1024)
    best = recommended(settings, own)
    assert (best.max_num_batched_tokens, best.max_num_seqs) == (8192, 1024)


def test_a_point_is_efficient_unless_another_one_is_better_and_nowhere_worse():
    assert efficient([(1, 5), (2, 4), (2, 5), (3, 3), (1, 5)]) == [True, True, False, True, True]


def test_the_knee_is_where_a_curve_bends_most():
    assert knee([1, 2, 3, 4, 5], [10, 11, 12, 13, 50]) == 3
    assert knee([0, 10, 20, 30], [1, 2, 20, 40]) == 1
