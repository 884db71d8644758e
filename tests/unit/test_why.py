"""Why a run is as slow as it is: bounds, the next change, and the command that shows them."""

import functools
import json

import numpy as np
import pytest

from sim.build import run
from sim.cli import main
from sim.cost.base import COST_MODELS
from sim.cost.linear import Linear, LinearOptions
from sim.cost.sped_up import SpedUp
from sim.planning.bounds import bounds, verdict
from sim.planning.next_change import Change, NextChange, next_change
from sim.replica import replica
from sim.scenario import parse_scenario
from sim.step import StepShape

BASE = {
    "name": "tiny",
    "seed": 1,
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": {"policy": "vllm-v1", "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 2048},
    "traffic": [
        {
            "name": "chat",
            "arrivals": {"kind": "poisson", "rate_per_s": 40.0},
            "prompt_tokens": {"kind": "uniform", "low": 100, "high": 500},
            "output_tokens": {"kind": "uniform", "low": 20, "high": 200},
        }
    ],
    "run": {"num_requests": 150},
}
FEW_BLOCKS = BASE | {"engine": BASE["engine"] | {"num_gpu_blocks": 200}}
LINEAR = (
    BASE
    | {"engine": BASE["engine"] | {"async_scheduling": False}}
    | {"cost": {"kind": "linear", "base_ms": 8.0, "per_prefill_token_us": 20.0, "host_us": 500}}
)


@functools.cache
def next_changes(name):
    return next_change(parse_scenario({"few blocks": FEW_BLOCKS, "linear": LINEAR, "base": BASE}[name]))


def test_the_next_change_of_a_server_that_is_short_of_kv():
    found = next_changes("few blocks")
    assert [change.resource for change in found.changes] == ["kv", "bandwidth", "compute", "host", "slots", "budget"]
    assert [change.factor for change in found.changes] == [1.1, 1.1, 1.1, 1.1, 71 / 64, 564 / 512]
    kv, *_, slots, _ = found.changes
    assert kv.ratios["output_tokens_per_s"] > 1.03
    assert 0.3 < kv.elasticity("output_tokens_per_s") < 1.2
    assert slots.ratios["output_tokens_per_s"] == 1
    assert found.to_dict()["changes"][0]["elasticities"]["makespan_s"] == kv.elasticity("makespan_s")


def test_measured_prices_know_no_parts_of_a_gpu():
    changes = {change.resource: change for change in next_changes("linear").changes}
    assert list(changes) == ["kv", "device", "host", "slots", "budget"]
    assert changes["device"].ratios["itl_p99_ms"] == pytest.approx(1 / 1.1, rel=0.2)
    assert changes["device"].ratios["output_tokens_per_s"] > 1.01
    assert changes["host"].ratios["e2e_mean_ms"] < 0.999


def test_links_count_where_there_are_several_gpus():
    several = BASE | {"hardware": {"gpu": "h100-sxm", "tensor_parallel": 2}, "run": {"num_requests": 5}}
    assert "link" in [change.resource for change in next_change(parse_scenario(several)).changes]


def more(label, purchase, **ratios):
    everything = dict.fromkeys(["output_tokens_per_s", "ttft_p99_ms", "e2e_mean_ms", "itl_p99_ms"], 1.0)
    return Change(label, label, purchase, 1.1, {}, everything | {"goodput_requests_per_s": None} | ratios)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (
            [more("KV blocks", "memory", output_tokens_per_s=1.08), more("compute", "FLOPs", output_tokens_per_s=1.02)],
            "buy memory: 10 % more changes output tokens per second by +8.0 % (against FLOPs +2.0 %)",
        ),
        (
            [more("max_num_seqs", "", ttft_p99_ms=0.5), more("compute", "FLOPs", ttft_p99_ms=0.9)],
            "first raise max_num_seqs: 10 % more changes p99 TTFT by -50.0 %; "
            "buy FLOPs: 10 % more changes p99 TTFT by -10.0 %",
        ),
        (
            [more("max_num_seqs", "", ttft_p99_ms=0.5), more("compute", "FLOPs")],
            "first raise max_num_seqs: 10 % more changes p99 TTFT by -50.0 %; "
            "of what can be bought, nothing moves p99 TTFT by 1 %",
        ),
        (
            [more("compute", "FLOPs", itl_p99_ms=1.5)],
            "nothing to buy and nothing to raise: 10 % more of any resource moves neither output nor latency by 1 %",
        ),
    ],
)
def test_the_advice(changes, advice):
    assert NextChange({}, tuple(changes)).advice() == advice


def test_prices_of_a_faster_device_and_host():
    options = LinearOptions(kind="linear", base_ms=1.0, per_context_token_ns=7.0, host_us=300)
    cost = SpedUp(Linear(options), device_speed=1.1, host_speed=3.0)
    shape = StepShape(3, 100, 4000, 50, (), 3)
    assert (cost.price(shape), cost.host_ns(shape)) == (round(1_000_721 / 1.1), 100_000)
    grown = [cost.price(shape._replace(decode_context_sum=100 + 3 * i)) for i in range(20)]
    assert cost.price_decode_run(shape, 20).tolist() == grown
    assert "sped_up" not in COST_MODELS


def bounds_of(**changes):
    scenario = parse_scenario(BASE | changes)
    parts = replica(scenario)
    return bounds(run(scenario), parts)


def test_no_run_beats_the_data_sheet():
    found = bounds_of()
    assert [bound.is_broken for bound in found] == [False] * 4
    step, prompt, output, little = found
    assert step.simulated > step.bound > 0.9 * 16.06e9 / 3.35e12 * 1e3  # ms to read the weights once
    assert prompt.simulated > prompt.bound
    assert output.simulated < output.bound
    assert little.simulated == pytest.approx(little.bound, rel=0.02)
    assert verdict(found).startswith("no bound is broken")


def test_prices_that_cannot_be_are_named():
    found = bounds_of(cost={"kind": "constant", "step_ms": 0.5})
    assert [bound.is_broken for bound in found] == [True, True, True, False]
    text = verdict(found)
    assert text.startswith("the cost model cannot be right: step that only decodes, mean: ")
    assert "requests are shorter than the GPU's peak allows" in text


def test_a_run_without_requests_that_ran_has_no_bounds():
    scenario = parse_scenario(BASE | {"run": {"num_requests": 1}, "traffic": [BASE["traffic"][0] | GONE]})
    assert bounds(run(scenario), replica(scenario)) == []


GONE = {"cancel": {"kind": "after_time", "after_s": 0.0}}


def test_the_command(tmp_path, capsys):
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(FEW_BLOCKS | {"run": {"num_requests": 40}}), encoding="utf-8")
    assert main(["why", str(path), "--next-change"]) == 0
    shown = capsys.readouterr().out
    for words in ("what TTFT is made of", "waiting for KV blocks", "together", "next change: ", "what limits you: "):
        assert words in shown
    assert main(["why", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["causes", "limits", "bounds", "next_change"]
    assert data["next_change"] is None
    band = data["causes"]["ttft"]["p99"]
    assert np.isclose(sum(band["parts_ms"].values()), band["mean_ms"])
