"""Comparisons: same arrivals, ratios, and the sentence."""

import json
from pathlib import Path

import pytest

from sim.errors import ScenarioError
from sim.planning.compare import MAX_NAME, compare, folder_names
from sim.planning.verdict import verdict
from sim.scenario import parse_scenario

BASE = {
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": {"policy": "static", "max_batch_size": 4, "max_model_len": 1024, "num_gpu_blocks": 256},
    "cost": {"kind": "constant", "step_ms": 10.0},
    "traffic": [
        {
            "name": "job",
            "arrivals": {"kind": "burst", "num_requests": 16, "at_s": 0.0},
            "prompt_tokens": 16,
            "output_tokens": {"kind": "uniform", "low": 2, "high": 60},
        }
    ],
    "compare": {
        "orca": {"engine": {"policy": "orca", "max_batch_size": 4}},
        "vllm": {
            "engine": {
                "policy": "vllm-v1",
                "max_num_seqs": 4,
                "max_num_batched_tokens": 256,
                "async_scheduling": False,
            }
        },
    },
}


def test_ratios_refer_to_the_base_and_arrivals_are_the_same(tmp_path: Path):
    comparison = compare(parse_scenario(BASE))
    assert list(comparison.results) == ["static", "orca", "vllm"]
    assert (comparison.baseline, comparison.has_same_traffic) == ("static", True)
    static, orca, vllm = comparison.table
    assert static["ratios"]["makespan_s"] == 1.0
    assert orca["ratios"]["makespan_s"] == orca["values"]["makespan_s"] / static["values"]["makespan_s"] < 1
    assert orca["values"] == vllm["values"]
    assert comparison.verdict.startswith("orca wins (level with vllm): its output tokens per second are ")
    assert "because static kept places of its batch for finished requests" in comparison.verdict
    written = comparison.save(tmp_path)
    assert {path.parent.name for path in written} == {"static", "orca", "vllm", tmp_path.name}
    assert json.loads((tmp_path / "comparison.json").read_text()) == json.loads(json.dumps(comparison.to_dict()))


def test_the_advantage_vanishes_when_all_outputs_are_equal():
    equal = BASE["traffic"][0] | {"output_tokens": 30}
    comparison = compare(parse_scenario(BASE | {"traffic": [equal]}))
    assert [row["ratios"]["makespan_s"] for row in comparison.table] == [1.0, 1.0, 1.0]
    assert comparison.verdict == "Nobody wins: goodput, output and latency differ by less than 2 %."


def test_scenarios_with_other_requests_are_told_apart():
    def named(name: str, **changes: object):
        return parse_scenario(BASE | {"name": name, "compare": {}} | changes, place=f"{name}.yaml")

    same = compare(named("one"), named("same"))
    assert (list(same.results), same.has_same_traffic) == (["one", "same"], True)
    assert not compare(named("one"), named("two", seed=5)).has_same_traffic
    with pytest.raises(ScenarioError) as caught:
        compare(named("one"), named("one"))
    assert str(caught.value) == "one.yaml: is given twice."


def test_variants_that_share_the_policy_are_compared_with_the_base():
    data = BASE | {"compare": {"eight": {"engine": {"max_batch_size": 8}}}}
    assert list(compare(parse_scenario(data)).results) == ["base", "eight"]


def test_nothing_to_compare():
    with pytest.raises(ScenarioError) as caught:
        compare(parse_scenario(BASE | {"compare": {}}, place="x.yaml"))
    message = "x.yaml: has nothing to compare. Give it a `compare` section, or name several scenarios."
    assert str(caught.value) == message


def test_every_variant_has_a_folder_of_its_own():
    names = ("no batching", "a/b", "../x", "vllm-v1", "…", "no_batching", "NO batching", "comparison.json", "y" * 300)
    assert folder_names(names) == [
        *("no_batching", "a_b", "x", "vllm-v1", "_", "no_batching_2", "NO_batching_3", "comparison.json_2"),
        "y" * MAX_NAME,
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 100},
        {"priority": 1},
        {"cancel": {"kind": "after_time", "after_s": 0.01}},
        {"cancel": {"kind": "after_tokens", "tokens": 2}},
        {"prompt_tokens": 8, "prefix": {"groups": 1, "tokens": 8}},
    ],
)
def test_whatever_makes_the_requests_differ_is_noticed(change: dict):
    changed = BASE | {"traffic": [BASE["traffic"][0] | change], "compare": {}}
    one, other = (parse_scenario(data, place=place) for data, place in ((BASE | {"compare": {}}, "a"), (changed, "b")))
    assert not compare(one, other).has_same_traffic
    drawn_again = parse_scenario(changed | {"name": "again"}, place="c", folder="elsewhere")
    assert compare(other, drawn_again).has_same_traffic


def test_how_clients_limit_themselves_leaves_the_requests_alike():
    limited = {"limited": {"traffic": {"job": {"max_connections": 2}}}}
    assert compare(parse_scenario(BASE | {"compare": limited})).has_same_traffic


def summary(**changes: object) -> dict:
    values = {"tokens": 100.0, "good": None, "e2e": 1000.0, "queue": 0.0, "running": 8.0, "busy": 1.0, "padding": 0.0}
    values["answers"] = 1.0
    values |= {
        "finished_slots": 0.0,
        "slots": 0.0,
        "kv": 0.0,
        "admission": 0.0,
        "unused": 0.0,
        "recomputed": 0,
        "cached": 0,
        "stall": 9.0,
        "slowest": 4000.0,
    } | changes
    return {
        "throughput": {
            "requests_per_s": values["answers"],
            "goodput_requests_per_s": values["good"],
            "output_tokens_per_s": values["tokens"],
        },
        "metrics": {
            "e2e_ms": {"mean": values["e2e"], "p99": values["slowest"]},
            "queue_ms": {"mean": values["queue"]},
            "itl_ms": {"max": values["stall"]},
        },
        "iterations": {
            "mean_num_running": values["running"],
            "busy_share": values["busy"],
            "mean_scheduled_tokens": 10.0,
            "count": 100,
        },
        "kv": {
            "recomputed_tokens": values["recomputed"],
            "prefill_tokens": 800 - values["cached"] + values["recomputed"],
            "cached_prompt_tokens": values["cached"],
            "reserved_unused_share": values["unused"],
        },
        "waste": {"finished_slot_share": values["finished_slots"], "padding_share": values["padding"]},
        "limits": {
            "shares": {"budget": 0.0} | {name: values[name] for name in ("slots", "kv", "admission")},
            "verdict": "compute: ...",
        },
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"padding": 0.4}, "computed 40 % of its tokens as padding, for nobody"),
        (
            {"finished_slots": 0.5, "padding": 0.4},
            "kept places of its batch for finished requests 50 % of the time that they were held",
        ),
        ({"recomputed": 250}, "computed 25 % of its tokens again after preemptions"),
        ({"busy": 0.6, "admission": 0.9}, "let the device idle 40 % of the time, waiting for company for a request"),
        (
            {"kv": 0.8, "unused": 0.7},
            "left 70 % of the KV that requests had reserved unused while others waited for it",
        ),
        ({"running": 4.0}, "had 4 requests running on average against 8"),
        ({"running": 0.9999}, "had 1 request running on average against 8"),
        (
            {"running": 4.0, "queue": 500.0},
            "had 4 requests running on average against 8, and kept requests queued for 50 % of their latency",
        ),
        ({"stall": 900.0}, "let running answers stall for up to 900 ms, against 9 ms"),
        (
            {"queue": 500.0, "stall": 900.0},
            "kept requests queued for 50 % of their latency, and let running answers stall for up to 900 ms, "
            "against 9 ms",
        ),
        ({"queue": 500.0}, "kept requests queued for 50 % of their latency"),
        (
            {"queue": 500.0, "slots": 0.6, "admission": 0.2},
            "kept requests queued for 50 % of their latency, mostly for a place in the batch",
        ),
        ({"queue": 500.0, "slots": 0.2, "kv": 0.2, "admission": 0.1}, "kept requests queued for 50 % of their latency"),
        ({}, "is limited by compute: ..."),
    ],
)
def test_the_reason_is_what_the_loser_lost_most_by(changes: dict, reason: str):
    sentence = verdict({"a": summary(tokens=200.0), "b": summary(**changes)})
    assert sentence == f"a wins: its output tokens per second are 2 times those of b, because b {reason}."


def test_prompts_that_the_winner_found_in_its_cache_are_a_reason():
    winner = summary(tokens=200.0, cached=600)
    assert verdict({"a": winner, "b": summary(cached=200, queue=500.0)}) == (
        "a wins: its output tokens per second are 2 times those of b, because b computed 75 % of its prompt tokens, "
        "which it found in no cache."
    )
    again = verdict({"a": winner, "b": summary(cached=560, recomputed=250)})
    assert again.endswith("because b computed 25 % of its tokens again after preemptions.")


def test_goodput_decides_before_output_and_output_before_latency():
    better = {"a": summary(good=1.0, tokens=50.0, e2e=2000.0), "b": summary(good=0.0)}
    assert verdict(better).startswith("a wins: b had no request within the SLO, because")
    level = {"a": summary(good=1.0, e2e=500.0), "b": summary(good=1.0, tokens=101.0), "c": summary(good=1.0, e2e=505.0)}
    assert verdict(level) == (
        "a wins (level with c): its mean end-to-end latency is 2 times shorter than that of b, "
        "because b is limited by compute: ...."
    )


def test_no_ratio_is_made_of_a_goodput_near_none():
    runs = {"a": summary(good=1.0), "b": summary(good=0.009), "c": summary(good=0.5, queue=500.0)}
    compute = "is limited by compute: ..."
    assert verdict(runs) == (
        "a wins: its requests within the SLO per second are 2 times those of c, while almost none of the requests of b "
        f"meet the SLO, because b {compute}; c kept requests queued for 50 % of their latency."
    )
    more = runs | {"d": summary(good=0.0), "e": summary(good=0.001)}
    assert verdict(more).startswith(
        "a wins: its requests within the SLO per second are 2 times those of c, while almost none of the requests of b "
        "and e meet the SLO and d had no request within the SLO, because d "
    )
    low = {"a": summary(good=0.009), "b": summary(good=0.003)}
    assert verdict(low).startswith("a wins: its requests within the SLO per second are 3 times those of b, because")


def test_the_runner_up_is_explained_beside_the_first_run():
    runs = {"a": summary(padding=0.5), "b": summary(tokens=300.0), "c": summary(tokens=200.0, running=4.0)}
    assert verdict(runs) == (
        "b wins: its output tokens per second are 1.5 times those of c, 3 times a, because a computed 50 % of its "
        "tokens as padding, for nobody; c had 4 requests running on average against 8."
    )


def test_a_run_without_an_answer_does_not_win_by_latency():
    sentence = verdict({"a": summary(e2e=None), "b": summary()})
    assert sentence == "b wins: a had no answer, because a is limited by compute: ...."
    nobody = "Nobody wins: goodput, output and latency differ by less than 2 %."
    assert verdict({"a": summary(e2e=None), "b": summary(e2e=None)}) == nobody


def test_who_wins_at_the_price_of_the_slowest_requests_is_told_so():
    runs = {"a": summary(tokens=200.0, slowest=6000.0), "b": summary(), "c": summary(slowest=4001.0)}
    assert verdict(runs).endswith(
        " Its slowest requests pay for it: their p99 end-to-end latency is 1.5 times that of b."
    )
    assert "pay for it" not in verdict(runs | {"a": summary(tokens=200.0, slowest=5999.0)})
    assert "pay for it" not in verdict(runs | {"a": summary(tokens=200.0, slowest=None)})
    assert "pay for it" not in verdict({"a": summary(tokens=200.0, slowest=6000.0), "b": summary(slowest=None)})


def test_two_percent_are_a_tie_and_five_are_not():
    assert verdict({"a": summary(tokens=101.0), "b": summary()}).startswith("Nobody wins")
    close = verdict({"a": summary(tokens=105.0), "b": summary()})
    assert close.startswith("a wins: its output tokens per second are 1.05 times those of b, because b ")
