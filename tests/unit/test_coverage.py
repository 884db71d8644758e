"""What a run says of the measurements that its times rest on."""

import io

import numpy as np
import pytest
from rich.console import Console

import sim
from sim.cli import main
from sim.metrics.coverage import coverage_line, coverage_shares, first_beyond
from sim.report.console import summary_report
from tests.unit.test_cost_table import artifact

SCENARIO = {
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "rtx-4090"},
    "engine": {"policy": "vllm-v1", "num_gpu_blocks": 1000, "max_model_len": 2048},
    "cost": {"kind": "table", "artifact": "a.json"},
    "traffic": [
        {
            "name": "all",
            "arrivals": {"kind": "constant", "rate_per_s": 1000},
            "prompt_tokens": {"kind": "constant", "value": 30},
            "output_tokens": {"kind": "constant", "value": 20},
        }
    ],
    "run": {"num_requests": 2},
}


@pytest.fixture
def folder(tmp_path):
    artifact(missing=["work on the host"], holdout_error={"rows": 0.02, "attention": 0.04}).write(tmp_path / "a.json")
    return tmp_path


def run(folder, **changes):
    cost = SCENARIO["cost"] | changes
    return sim.run(sim.parse_scenario(SCENARIO | {"cost": cost}, place="x.yaml", folder=folder))


def text_of(results):
    console = Console(width=200, record=True, file=io.StringIO())
    for part in summary_report(results.summary(), title="x"):
        console.print(part)
    return console.export_text()


def test_shares_are_of_iterations_and_of_their_time():
    levels = np.array([0, 1, 1, 2], dtype=np.int8)
    iterations = {"start_ns": np.array([0, 10, 20, 30]), "end_ns": np.array([10, 20, 30, 100])}
    assert coverage_shares(levels, iterations) == {
        "iterations": {"measured": 0.25, "interpolated": 0.5, "extrapolated": 0.25},
        "time": {"measured": 0.1, "interpolated": 0.2, "extrapolated": 0.7},
    }
    assert (first_beyond(levels), first_beyond(levels[:3])) == (3, None)


def test_no_iterations_are_no_extrapolation():
    none = {"start_ns": np.array([]), "end_ns": np.array([])}
    assert coverage_shares(np.array([], dtype=np.int8), none)["time"]["measured"] == 1


def test_a_summary_says_what_its_times_rest_on(folder, tmp_path):
    results = run(folder)
    cost = results.summary()["cost"]
    assert cost["coverage"]["iterations"] == {"measured": 0.0, "interpolated": 1.0, "extrapolated": 0.0}
    assert coverage_line(cost).startswith("toy on 1 × toy, measured 2026-01-01: 0.0 % of iterations")
    assert coverage_line(cost).endswith("points left out were missed by 3.0 % on average")
    assert "not in those times: work on the host" in text_of(results)
    results.save(tmp_path / "run")
    assert sim.Results.load(tmp_path / "run").summary() == results.summary()


def test_a_model_without_measurements_says_nothing(folder):
    assert sim.run(SCENARIO | {"cost": {"kind": "roofline"}}).summary()["cost"] is None


@pytest.mark.parametrize("policy", ["warn", "allow"])
def test_iterations_beyond_the_measurements_are_told(folder, policy):
    results = run(folder, out_of_range=policy)
    data = SCENARIO["traffic"][0] | {"output_tokens": {"kind": "constant", "value": 200}}
    longer = SCENARIO | {"traffic": [data], "cost": SCENARIO["cost"] | {"out_of_range": policy}}
    beyond = sim.run(sim.parse_scenario(longer, place="x.yaml", folder=folder))
    told = "some iterations lie beyond what was measured"
    assert told not in text_of(results)
    assert (told in text_of(beyond)) == (policy == "warn")
    assert beyond.summary()["cost"]["coverage"]["time"]["extrapolated"] > 0.4


def test_iterations_beyond_the_measurements_can_be_refused(folder):
    data = SCENARIO["traffic"][0] | {"output_tokens": {"kind": "constant", "value": 200}}
    longer = SCENARIO | {"traffic": [data], "cost": SCENARIO["cost"] | {"out_of_range": "error"}}
    message = r"^x\.yaml: cost\.out_of_range: iteration \d+ \(2 tokens, 2 of them decodes, longest context \d+\) lies"
    with pytest.raises(sim.ArtifactError, match=message):
        sim.run(sim.parse_scenario(longer, place="x.yaml", folder=folder))


def test_an_artifact_that_is_not_there_is_named_with_the_scenario(tmp_path):
    with pytest.raises(sim.ArtifactError, match=r"^x\.yaml: cost\.artifact: cannot read '.*a\.json'"):
        run(tmp_path)


def test_the_command_line_finds_calibration(capsys):
    assert main(["calibrate", "--help"]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert main(["calibrate", "import", "nobody", "x", "--out", "y"]) == 2
    assert "unknown importer 'nobody'; known: " in capsys.readouterr().err
