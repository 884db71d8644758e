"""How far the errors of a calibration move the answers."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

import sim
from sim.cli import main
from sim.cost.artifact import Residual
from sim.cost.linear import Linear, LinearOptions
from sim.cost.table import Table
from sim.planning.uncertainty import NUM_RERUNS
from sim.report.console import summary_report
from sim.rng import stream
from tests.unit.test_cost_table import artifact, decodes

LINEAR = {"kind": "linear", "base_ms": 10.0, "per_prefill_token_us": 50.0}
SCENARIO = {
    "seed": 7,
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "rtx-4090"},
    "engine": {"policy": "vllm-v1", "num_gpu_blocks": 1000, "max_model_len": 2048},
    "cost": LINEAR | {"relative_error": 0.1},
    "traffic": [
        {
            "name": "all",
            "arrivals": {"kind": "poisson", "rate_per_s": 20},
            "prompt_tokens": {"kind": "uniform", "low": 30, "high": 600},
            "output_tokens": {"kind": "constant", "value": 20},
        }
    ],
    "run": {"num_requests": 30},
}


def residual(**changes):
    content = {"term": "iteration", "region": "all", "num_points": 10, "mean_error": 0.0, "spread": 0.1}
    return Residual(**content | {"mean_absolute_error": 0.08} | changes)


def factors(model, num=400):
    """How many times dearer draws of a model are."""
    price = model.price(decodes(15, 25))
    return np.array([model.perturbed(stream(1, str(i))).price(decodes(15, 25)) / price for i in range(num)])


def test_whole_iterations_left_out_say_how_far_all_times_are_off():
    own = artifact(residuals=[residual(), residual(region="b", mean_error=0.1, spread=0.0)], step_us=1000)
    found = factors(Table(own))
    assert np.median(found) == pytest.approx(1, abs=0.02)
    assert np.log(found).std() == pytest.approx(0.1, rel=0.1)
    dearer = own.perturbed(stream(1, "0"))
    ratios = {
        us / before
        for term, old in zip(dearer.terms, own.terms, strict=True)
        for us, before in zip(term.us, old.us, strict=True)
    }
    assert [*ratios] == pytest.approx([dearer.step_us / 1000] * len(ratios))


def test_else_every_term_is_off_by_its_own_errors():
    own = artifact(holdout_error={"tokens": 0.08, "decode_attention": 0.04})
    dearer = {term.name: term.us[0] for term in own.perturbed(stream(1, "0")).terms}
    ratio = {term.name: dearer[term.name] / term.us[0] for term in own.terms}
    assert ratio["sequences"] == ratio["prefill_attention"] == 1.0
    assert ratio["tokens"] != ratio["decode_attention"]
    drawn = [own.perturbed(stream(1, str(i))).terms[0].us[0] / own.terms[0].us[0] for i in range(400)]
    assert np.abs(np.log(drawn)).mean() == pytest.approx(0.08, rel=0.1)


def test_linear_costs_are_off_by_the_error_of_their_fit():
    found = factors(Linear(LinearOptions(base_ms=10.0, per_decode_us=100.0, relative_error=0.2)))
    assert np.log(found).std() == pytest.approx(0.2, rel=0.1)


@pytest.fixture(scope="module")
def banded():
    return sim.run_with_cost_uncertainty(sim.parse_scenario(SCENARIO))


def test_the_band_lies_around_the_run_and_is_as_wide_as_the_error(banded):
    summary, plain = banded.summary(), sim.run(SCENARIO).summary()
    assert summary["metrics"] == plain["metrics"]
    found = summary["cost"]["uncertainty"]
    assert (found["num_reruns"], found["level"]) == (NUM_RERUNS, 0.9)
    for metric in ("ttft_ms", "itl_ms"):
        low, high = found["metrics"][metric]["p50"]
        assert 1.1 < high / low < 2.0
        assert low < plain["metrics"][metric]["p50"] < high


def test_the_same_seed_gives_the_same_band_and_it_survives_the_disk(banded, tmp_path):
    again = sim.run_with_cost_uncertainty(sim.parse_scenario(SCENARIO))
    assert again.summary() == banded.summary()
    banded.save(tmp_path)
    assert sim.Results.load(tmp_path).summary()["cost"] == banded.summary()["cost"]


def test_a_report_says_the_band(banded):
    console = Console(width=200, record=True, file=io.StringIO())
    for part in summary_report(banded.summary(), title="x"):
        console.print(part)
    assert "note: with times off as their fit was, 90 % of 20 reruns have TTFT p50" in console.export_text()


def test_the_command_gives_the_band_or_the_reason_why_not(tmp_path, capsys):
    path = tmp_path / "x.yaml"
    path.write_text(json.dumps(SCENARIO | {"name": "x"}))
    assert main(["run", str(path), "--cost-uncertainty", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"]["uncertainty"]["metrics"]["itl_ms"]["p99"]
    path.write_text(json.dumps(SCENARIO | {"name": "x", "cost": {"kind": "roofline"}}))
    assert main(["run", str(path), "--cost-uncertainty"]) == 2
    assert "x.yaml: cost: roofline knows no errors of its own" in capsys.readouterr().err


def test_costs_without_errors_cannot_be_perturbed():
    rng = stream(1, "x")
    assert Table(artifact()).perturbed(rng) is None
    assert Linear(LinearOptions(base_ms=1.0)).perturbed(rng) is None
