"""A fit finds the physics that made the times, and says honestly where it does not."""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from calibration import iterations, raw
from calibration.cli import app
from calibration.fit import fit, worst_regions
from calibration.models import gpu_of_driver
from calibration.raw import KEY
from sim.cost.artifact import read_artifact
from sim.cost.table import Table
from sim.errors import ArtifactError
from sim.step import StepShape
from tests.unit import synthetic_raw as made

SHAPES = [(1, 300, 0, 0), (5, 900, 0, 0), (64, 3000, 0, 0), (0, 0, 700, 0), (0, 0, 100, 3000), (16, 600, 500, 100)]
"""Decodes, their context, tokens of a prompt, its context: between the timed points, and at them."""

TIMES = ["median_ns", "ci_low_ns", "ci_high_ns"]


def errors(artifact):
    """How far the prices of whole iterations are from the truth."""
    cost = Table(artifact)
    found = []
    for batch, context, tokens, cached in SHAPES:
        prefills = ((tokens, cached),) if tokens else ()
        shape = StepShape(batch, batch * context, batch * context**2, context, prefills, batch + (tokens > 0))
        found.append(cost.price(shape) / made.step_ns(batch, batch * context, tokens, cached) - 1)
    return np.abs(found)


def term(artifact, name):
    return next(own for own in artifact.terms if own.name == name)


def test_physics_come_back_from_the_times_that_they_made():
    artifact = fit(made.raw_file(made.points()))
    assert errors(artifact).max() < 0.01
    assert artifact.step_us == pytest.approx(made.GAP_NS * 1e-3, rel=0.02)
    assert term(artifact, "work per sequence").us[0] == pytest.approx(made.SEQUENCE_NS * 1e-3, rel=0.02)
    assert term(artifact, "work per iteration with prompts").us == pytest.approx([made.PROMPT_NS * 1e-3] * 2, rel=0.05)
    qkv = term(artifact, "qkv_proj")
    assert (qkv.calls, qkv.points) == (4, [list(made.ROWS)])
    expected = [made.DENSE_IN_COMPANY * made.dense_ns("qkv_proj", rows) * 1e-3 for rows in made.ROWS]
    assert qkv.us == pytest.approx(expected, rel=0.005)
    assert qkv.note == "0.900 of its time alone, as within whole iterations"
    assert term(artifact, "decode_attention").note.startswith("kernel of paper; 1.09")
    skew = term(artifact, "decode_skew")
    longest = skew.axes[2].points[-1]
    assert skew.us[-1] == pytest.approx(made.ATTENTION_IN_COMPANY * 3.0 * longest * 1e-3, rel=0.02)


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_noise_is_smoothed_and_held_out_errors_are_as_large_as_it_is(noise):
    artifact = fit(made.raw_file(made.points(noise)))
    assert errors(artifact).max() < max(0.02, noise)
    for name in ("qkv_proj", "decode_attention", "prefill_attention", "iteration"):
        assert noise / 3 < artifact.holdout_error[name] < 3 * noise
    times = np.array(term(artifact, "decode_attention").us).reshape(len(made.BATCHES), -1)
    assert (np.diff(times, axis=0) >= 0).all()
    assert (np.diff(times, axis=1) >= 0).all()


def test_an_error_at_points_left_out_rises_on_a_kink_and_says_where():
    frame = made.points(0.002)
    smooth = fit(made.raw_file(frame)).holdout_error["qkv_proj"]
    at_kink = (frame["operator"] == "qkv_proj") & (frame["num_tokens"] >= 256)
    frame.loc[at_kink, ["median_ns", "ci_low_ns", "ci_high_ns"]] *= 2.5
    artifact = fit(made.raw_file(frame))
    assert artifact.holdout_error["qkv_proj"] > max(10 * smooth, 0.03)
    by_region = {own.region: own.mean_absolute_error for own in artifact.residuals if own.term == "qkv_proj"}
    assert by_region["num_tokens 2 to 16"] < 0.01 < 0.05 < by_region["num_tokens 256 to 1024"]


def test_the_order_of_points_makes_no_difference_to_a_single_byte(tmp_path):
    frame = made.points(0.01)
    for name, own in (("a", frame), ("b", frame.sample(frac=1, random_state=1, ignore_index=True))):
        fit(made.raw_file(own)).write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_without_whole_iterations_nothing_is_corrected_and_that_is_said():
    frame = made.points()
    artifact = fit(made.raw_file(frame[frame["operator"] != "step"].reset_index(drop=True)))
    assert artifact.missing == ["gaps between kernels", "work on the host"]
    expected = [made.dense_ns("qkv_proj", rows) * 1e-3 for rows in made.ROWS]
    assert (artifact.step_us, term(artifact, "qkv_proj").us) == (0, pytest.approx(expected, rel=0.005))


def test_what_is_left_of_a_part_of_the_layers_grows_with_them():
    frame = made.points()
    config = made.CONFIG | {"num_hidden_layers": 8}
    whole, part = (fit(made.raw_file(frame, config=own)) for own in (made.CONFIG, config))
    assert part.step_us == pytest.approx(2 * whole.step_us, rel=1e-5)
    assert [term(own, "norm").calls for own in (whole, part)] == [9, 17]
    assert part.missing[0].startswith("layers beyond the 4 timed together")


def test_kernels_that_waited_for_their_launch_do_not_count_where_a_graph_was_timed():
    frame = made.points()
    waiting = frame[frame["operator"] == "qkv_proj"].copy()
    waiting[["median_ns", "ci_low_ns", "ci_high_ns"]] += 50e3
    is_small = (frame["operator"] == "qkv_proj") & (frame["num_tokens"] <= 128)
    frame.loc[is_small, "mode"] = "graph"
    both = pd.concat([frame, waiting[waiting["num_tokens"] <= 128]], ignore_index=True)
    mixed, plain = (fit(made.raw_file(own)) for own in (both, frame))
    assert mixed.terms == plain.terms
    assert 512 in mixed.cuda_graph_sizes
    throttled = waiting.assign(throttled=True)
    assert fit(made.raw_file(pd.concat([frame, throttled], ignore_index=True))).terms == plain.terms


def test_the_largest_points_bound_what_counts_as_measured():
    frame = made.points()
    total = frame["decode_context_tokens"]
    timed = fit(made.raw_file(frame[(frame["operator"] != "decode_attention") | (total <= 8 * 4095)]))
    assert term(timed, "decode_attention").corners == [[8, 4096], [16, 2048], [32, 1024], [64, 512]]
    assert term(fit(made.raw_file(frame)), "decode_attention").corners == []


def slower(batch):
    """The part by which attention of few decodes is slower within iterations."""
    return 0.15 * np.log2(64 / batch)


def test_attention_is_what_iterations_of_its_kind_took(monkeypatch):
    frame = made.points()
    alone = (frame["operator"] == "step") & (frame["num_decodes"] > 0) & (frame["chunk_tokens"] == 0)
    kernel_ns = 4 * made.decode_ns(frame["num_decodes"], frame["decode_context_tokens"])
    for column in TIMES:
        frame[column] += np.where(alone, slower(frame["num_decodes"].clip(lower=1)) * kernel_ns, 0.0)

    def missed():
        """Mean absolute error of batches that are slower."""
        cost, found = Table(fit(made.raw_file(frame))), []
        for batch in (4, 8, 16, 32):
            total = batch * 4095
            true_ns = made.step_ns(batch, total, 0, 0) + slower(batch) * 4 * made.decode_ns(batch, total)
            found.append(abs(cost.price(StepShape(batch, total, total * 4095, 4095, (), batch)) / true_ns - 1))
        return np.mean(found)

    corrected = missed()
    monkeypatch.setattr(iterations, "LEAST_OF_A_KIND", 1000)
    assert corrected < 0.03 < 0.05 < missed()


def test_the_next_point_to_time_lies_where_least_is_known():
    frame = made.points(0.002)
    at = [("qkv_proj", 96), ("qkv_proj", 2048), ("qkv_proj", 8000), ("moe", 8)]
    candidates = made.as_frame([{"operator": name, "num_tokens": n, "ns": 1.0} for name, n in at])[list(KEY)]
    before = frame.copy()
    between, timed, beyond, unknown = worst_regions(frame, candidates)
    assert max(timed, between) < 0.01 < beyond < unknown == 1.0
    pd.testing.assert_frame_equal(frame, before)
    at_kink = (frame["operator"] == "qkv_proj") & (frame["num_tokens"] >= 128)
    frame.loc[at_kink, ["median_ns", "ci_low_ns", "ci_high_ns"]] *= 2.5
    kinked = worst_regions(frame, candidates)
    assert kinked[0] > 10 * between
    step = frame[frame["operator"] == "step"][list(KEY)].head(3)
    assert (worst_regions(frame, step) < 0.5).all()


def scaled(frame, factor):
    return frame.assign(**{column: frame[column] * factor for column in TIMES})


def with_value(frame, column, value):
    """The frame with its row 3 spoiled."""
    return frame.assign(**{column: frame[column].where(frame.index != 3, value)})


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (lambda f: scaled(f, 0.05), "LM head took 20150 ns for 1 rows and 3.28e\\+07 bytes of weights; on made up"),
        (lambda f: scaled(f, 1e4), r"LM head took .*; on made up that takes .* Times are in nanoseconds"),
        (lambda f: scaled(f, 1e-3), "no kernel takes less than 50"),
        (lambda f: with_value(f, "median_ns", np.nan), r"row 3 \(down_proj\): median_ns is nan; expected a time"),
        (lambda f: with_value(f, "ci_low_ns", 0.0), r"row 3 \(down_proj\): ci_low_ns is 0\.0"),
        (lambda f: with_value(f, "num_tokens", -1), "num_tokens is negative"),
        (lambda f: f.assign(throttled=True), "all points were timed on a throttled GPU"),
        (lambda f: f[f["operator"] != "lm_head"], "has no times of lm_head"),
        (lambda f: f.head(0), "has no points"),
        (
            lambda f: f[(f["operator"] != "o_proj") | (f["num_tokens"] == 1)],
            "o_proj was timed at one num_tokens only; expected two or more",
        ),
    ],
)
def test_points_that_cannot_be_are_refused(spoiled, message):
    with pytest.raises(ArtifactError, match=message):
        fit(made.raw_file(spoiled(made.points())))


@pytest.mark.parametrize(
    ("hardware", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("Some CPU", None),
    ],
)
def test_drivers_names_of_gpus_are_known(hardware, gpu):
    assert gpu_of_driver(hardware) == gpu


@pytest.fixture
def files(tmp_path):
    path, out = tmp_path / "raw.parquet", tmp_path / "artifact.json"
    frame = made.points(0.01)
    raw.append(path, frame.to_dict("records"), made.METADATA)
    return path, out


def test_the_command_fits_checks_and_shows(files):
    path, out = files
    ran = CliRunner().invoke(app, ["fit", str(path), "--out", str(out), "--tp", "1", "--model", "tiny"])
    assert (ran.exit_code, ran.exception) == (0, None)
    assert "14 terms from 269 timed points" in ran.output
    assert "iteration, decodes alone: 21 points left out missed by" in ran.output
    ran = CliRunner().invoke(app, ["check", str(path), str(out)])
    assert (ran.exit_code, "is what" in ran.output) == (0, True)
    ran = CliRunner().invoke(app, ["show", str(out)])
    assert "iteration, a prompt alone: 10 points left out" in ran.output
    assert "work per sequence: sequences, 1 calls" in ran.output


def test_a_check_names_what_differs(files):
    path, out = files
    CliRunner().invoke(app, ["fit", str(path), "--out", str(out)])
    artifact = read_artifact(out)
    terms = [own for own in artifact.terms if own.name != "norm"]
    terms[0] = terms[0].model_copy(update={"us": [us * 1.1 for us in terms[0].us]})
    artifact.model_copy(update={"terms": terms, "licence": "mine"}).write(out)
    ran = CliRunner().invoke(app, ["check", str(path), str(out)])
    assert ran.exit_code == 1
    assert ran.output.splitlines() == [
        "licence: that of whoever timed it from the raw file, mine in the artifact",
        "decode_attention: times up to 10 % apart",
        "norm: only from the raw file",
    ]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--tp", "2"], r"--tp: 2 is asked for, and the raw file is of 1"),
        (["--model", "other"], r"--model: other is asked for, and the raw file is of tiny"),
        (["--dtype", "float32"], r"--dtype: float32 is asked for, and the raw file is of bfloat16"),
    ],
)
def test_a_profile_of_something_else_is_refused(files, option, message):
    path, out = files
    ran = CliRunner().invoke(app, ["fit", str(path), "--out", str(out), *option])
    assert isinstance(ran.exception, ArtifactError)
    assert message in str(ran.exception)
    assert not out.exists()


def test_a_damaged_raw_file_is_refused(files):
    path, out = files
    path.write_bytes(path.read_bytes()[:1000])
    ran = CliRunner().invoke(app, ["fit", str(path), "--out", str(out)])
    assert isinstance(ran.exception, ArtifactError)
    assert "no raw file of a profile" in str(ran.exception)
