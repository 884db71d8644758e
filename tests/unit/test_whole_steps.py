import json

import pytest
import yaml
from typer.testing import CliRunner

from calibration.cli import app
from calibration.whole_steps import Step, fit_linear, splitwise_steps, vtc_steps
from sim.cost.linear import LinearOptions
from sim.errors import ArtifactError

HEADER = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel"


def test_coefficients_come_back_from_times_that_they_made():
    def timed(decodes, context, tokens, pairs):
        return Step(decodes, context, tokens, pairs, 5 + 0.02 * decodes + 4e-4 * context + 0.1 * tokens + 2e-6 * pairs)

    steps = [timed(n, n * c, 0, 0) for n in (1, 8, 64) for c in (100, 2000)]
    steps += [timed(0, 0, t, t * (t + 1) / 2) for t in (10, 500, 4000)]
    fit = fit_linear(steps, "here")
    assert fit.options == {
        "base_ms": pytest.approx(5),
        "per_decode_us": pytest.approx(20),
        "per_context_token_ns": pytest.approx(400),
        "per_prefill_token_us": pytest.approx(100),
        "per_prefill_pair_ns": pytest.approx(2),
    }
    assert (len(fit.errors), fit.mean_absolute_error) == (9, pytest.approx(0, abs=1e-6))
    with pytest.raises(ArtifactError, match="here: 4 timed iterations; 5 or more"):
        fit_linear(steps[:4], "here")


def test_splitwise_rows_are_a_batch_of_prompts_and_a_step_of_their_decodes(tmp_path):
    path = tmp_path / "perf.csv"
    path.write_text(f"{HEADER}\nm,h,100,4,20,50.5,30.5,2\nm,h,100,4,20,50.5,30.5,4\n")
    assert splitwise_steps(path, "m", "h", 2) == [
        Step(0, 0.0, 400, 4 * 5050, 50.5),
        Step(4, 4 * 110, 0, 0.0, 30.5),
    ]
    with pytest.raises(ArtifactError, match=r"no times of m on 8 x h; timed: \[\('m', 'h', 2\)"):
        splitwise_steps(path, "m", "h", 8)


def test_vtc_times_are_per_request_and_the_first_token_is_the_prefills(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"100": {"1": [3, 0.5, 0.1], "11": [2, 0.25, 0.5]}}))
    assert vtc_steps(path) == [
        Step(0, 0.0, 300, 3 * 5050, 1500),
        Step(0, 0.0, 200, 2 * 5050, 500),
        Step(2, 2 * 105.5, 0, 0.0, 100),
    ]
    path.write_text("[1]")
    with pytest.raises(ArtifactError, match="is no cost profile"):
        vtc_steps(path)


@pytest.mark.parametrize(
    ("arguments", "least_error", "most_error"),
    [
        (["vtc", "data/profiles/vtc_slora_a10g/cost_profile.json"], 4, 5.5),
        (["splitwise", "data/profiles/splitwise/perf_model_a100.csv"], 9, 10),
    ],
)
def test_what_is_printed_is_a_scenarios_cost(shared, arguments, least_error, most_error):
    kind, path = arguments
    printed = CliRunner().invoke(app, ["fit-linear", kind, str(shared / path)]).stdout
    LinearOptions.model_validate(yaml.safe_load(printed)["cost"])
    assert least_error < float(printed.partition("the fit ")[2].partition(" %")[0]) < most_error
