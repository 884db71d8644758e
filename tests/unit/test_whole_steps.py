"""Measurements of whole iterations: coefficients, the terms that they become, and what those price."""

import json

import pandas as pd
import pytest

from calibration.importers import distserve, splitwise, vtc
from calibration.whole_steps import Linear, Step, fit_linear, prompts, terms
from sim.cost.table import Table
from sim.errors import ArtifactError
from sim.gpu import load_gpu
from sim.model import load_model
from sim.step import StepShape
from tests.unit import published

HEADER = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel"


def timed(decodes, context, tokens, pairs):
    return Step(decodes, context, tokens, pairs, 5 + 0.02 * decodes + 4e-4 * context + 0.1 * tokens + 2e-6 * pairs)


def test_coefficients_come_back_from_times_that_they_made():
    steps = [timed(n, n * c, 0, 0) for n in (1, 8, 64) for c in (100, 2000)]
    steps += [timed(0, 0, t, t * (t + 1) / 2) for t in (10, 500, 4000)]
    linear, held_out = fit_linear(steps, "here")
    assert linear == Linear(*map(pytest.approx, (5, 0.02, 4e-4, 0.1, 2e-6)))
    assert held_out == {"decode_attention": pytest.approx(0, abs=1e-4), "prefill_tokens": pytest.approx(0, abs=1e-4)}
    with pytest.raises(ArtifactError, match="here: 4 different iterations timed; 5 or more"):
        fit_linear([*steps[:4], *steps[:4]], "here")


def test_a_point_is_left_out_with_all_its_repeats():
    steps = [timed(n, n * 100, 0, 0) for n in range(1, 12)] + [timed(0, 0, t, t * t) for t in (10, 20, 30)]
    odd = prompts(700, 1, 1000.0)
    _, once = fit_linear([*steps, odd], "here")
    _, often = fit_linear([*steps, *[odd] * 3], "here")
    assert once["prefill_tokens"] > 0.2
    assert often["prefill_tokens"] > once["prefill_tokens"], "its repeats do not vouch for it"


def test_terms_stay_within_what_was_timed():
    steps = [timed(n, n * c, 0, 0) for n in (2, 64) for c in (100, 2000)]
    steps += [timed(0, 0, t, t * (t + 1) / 2) for t in (16, 4000)]
    found = {term.name: term for term in terms(Linear(5, 0.02, 4e-4, 0.1, 2e-6), steps, "here")}
    assert found["decode_attention"].points == [[2, 64], [100, 2000]]
    assert found["decode_attention"].us == [pytest.approx(n * (20 + 0.4 * c)) for n in (2, 64) for c in (100, 2000)]
    assert (found["prefill_tokens"].points, found["prefill_tokens"].us) == ([[1, 4000]], [100, 400_000])
    sizes = found["prefill_attention"].points[0]
    assert (sizes[0], sizes[-1]) == (16, 4000)
    with pytest.raises(ArtifactError, match="here: batches of decodes were timed at 1 size only; expected two or more"):
        terms(Linear(5, 0.02, 4e-4, 0.1, 2e-6), [steps[0], *steps[4:]], "here")


def test_splitwise_rows_are_a_batch_of_prompts_and_a_step_of_their_decodes(tmp_path):
    path = tmp_path / "perf.csv"
    path.write_text(f"{HEADER}\nm2,h,100,4,20,50.5,30.5,2\nm2,h,100,4,20,50.5,30.5,4\n")
    assert splitwise.timed_steps(path, "m-2", "h", 2) == [
        Step(0, 0.0, 400, 4 * 5050, 50.5),
        Step(4, 4 * 110, 0, 0.0, 30.5),
    ]
    with pytest.raises(ArtifactError, match=r"no times of m-2 on 8 x h; timed: \[\('m2', 'h', 2\)"):
        splitwise.timed_steps(path, "m-2", "h", 8)


def test_batches_that_were_faster_than_the_gpus_can_be_are_left_out(tmp_path):
    published.splitwise(tmp_path)
    path = tmp_path / "perf_model.csv"
    sound = splitwise.import_table(path)
    path.write_text(path.read_text() + "llama2-70b,a100-80gb,512,64,128,800,72,8\n")
    odd = splitwise.import_table(path)
    assert odd.of_kind("prefill_tokens")[0].points == sound.of_kind("prefill_tokens")[0].points
    assert odd.of_kind("decode_attention")[0].points[0] == [1, 64], "its decodes are kept"


def test_vtc_times_are_per_request_and_the_first_token_is_the_prefills(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"100": {"1": [3, 0.5, 0.1], "11": [2, 0.25, 0.5]}}))
    assert vtc.timed_steps(path) == [
        Step(0, 0.0, 300, 3 * 5050, 1500),
        Step(0, 0.0, 200, 2 * 5050, 500),
        Step(2, 2 * 105.5, 0, 0.0, 100),
    ]


@pytest.mark.parametrize(
    ("read", "path", "decode_error", "prefill_error"),
    [
        (splitwise.import_table, "splitwise/perf_model_a100.csv", 0.045, 0.19),
        (vtc.import_profile, "vtc_slora_a10g/cost_profile.json", 0.07, 0.05),
    ],
)
def test_published_iterations_are_met_at_points_left_out(shared, read, path, decode_error, prefill_error):
    held_out = read(shared / "data/profiles" / path).holdout_error
    assert 0 < held_out["decode_attention"] < decode_error
    assert 0 < held_out["prefill_tokens"] < prefill_error


@pytest.fixture(scope="module")
def distserve_files(shared):
    folder = shared / "data/profiles/distserve"
    return folder / "opt13b_fitted_coefficients.json", folder / "max_num_tokens.csv"


@pytest.mark.parametrize("engine", ["distserve", "vllm"])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_distserves_formulas_are_what_its_artifact_prices(distserve_files, engine, tensor_parallel):
    path = distserve_files[0]
    own = json.loads(path.read_text())[engine][str(tensor_parallel)]
    table = Table(distserve.import_coefficients(path, engine, tensor_parallel))

    def ms(num_decode, context, lengths):
        tokens = num_decode * (context - 1)
        shape = StepShape(num_decode, tokens, num_decode * (context - 1) ** 2, context, tuple(lengths), 1)
        return table.price(shape) / 1e6

    # times must not fall with the batch: where the two fits meet, they are made to
    for batch, context, error in ((8, 1, 1e-3), (40, 300, 1e-3), (95, 2048, 0.07), (256, 700, 2e-3), (512, 128, 1e-3)):
        a, b, c = own["decoding_smallbs" if batch < 95 else "decoding_largebs"]
        assert ms(batch, context, ()) == pytest.approx(a + b * batch * context + c * batch, rel=error)
    a, b, c = own["prefill"]
    for lengths in ((300,), (512, 512), (2048, 100, 7)):
        expected = a + b * sum(lengths) + c * sum(length**2 for length in lengths)
        assert ms(0, 1, [(length, 0) for length in lengths]) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("model", ["opt-13b", "opt-66b"])
def test_distserves_largest_numbers_of_tokens_are_what_is_left_beside_the_weights(distserve_files, model):
    described = load_model(model)
    rows = pd.read_csv(distserve_files[1])
    rows = rows[
        (rows["model"] == f"facebook/{model}") & (rows["pp"] == 1) & (described.num_attention_heads % rows["tp"] == 0)
    ]
    memory_bytes = 80e9  # of an A100-SXM-80GB, by its name; DistServe leaves none for activations
    assert load_gpu("a100-sxm-80gb").memory_bytes > memory_bytes
    assert len(rows) >= 4
    for tensor_parallel, num_tokens in zip(rows["tp"], rows["max_num_tokens"], strict=True):
        free_bytes = memory_bytes - described.weight_bytes(tensor_parallel)
        assert free_bytes / described.kv_bytes_per_token(2.0, tensor_parallel) == pytest.approx(
            num_tokens, rel=0.01 if model == "opt-13b" else 0.05
        )
