import numpy as np
import pytest
from pydantic import ValidationError

from sim.errors import TraceError
from sim.workload.base import LENGTHS
from sim.workload.joint import JointLengthOptions, build_joint, length_tables
from sim.workload.traffic import TrafficClass


def options_of(value):
    return TrafficClass.model_validate({"name": "c", "share": 1.0, "prompt_tokens": value}).prompt_tokens


def draw(value, num=50_000, seed=1):
    options = options_of(value)
    return LENGTHS.load(options.kind).build(options).draw(num, np.random.default_rng(seed))


def refusal(value) -> str:
    with pytest.raises(ValidationError) as caught:
        options_of(value)
    return caught.value.errors()[0]["msg"]


def joint(**options):
    return build_joint(JointLengthOptions(**options))


def test_a_plain_integer_is_a_constant():
    assert options_of(7) == options_of({"kind": "constant", "value": 7})
    assert draw(7, num=3).tolist() == [7, 7, 7]


def test_uniform_includes_both_bounds():
    lengths, counts = np.unique(draw({"kind": "uniform", "low": 3, "high": 5}), return_counts=True)
    assert lengths.tolist() == [3, 4, 5]
    assert counts / 50_000 == pytest.approx(1 / 3, abs=0.01)
    assert draw({"kind": "uniform", "low": 4, "high": 4}, num=2).tolist() == [4, 4]


@pytest.mark.parametrize("spread", [{"cv": 1.0}, {"sigma": np.sqrt(np.log(2))}])
def test_lognormal_has_its_mean_and_cv(spread):
    lengths = draw({"kind": "lognormal", "mean": 1000, **spread}, num=200_000)
    assert lengths.mean() == pytest.approx(1000, rel=0.01)
    assert lengths.std() / lengths.mean() == pytest.approx(1.0, rel=0.03)


def test_lognormal_moves_what_lies_outside_to_the_bounds():
    free = draw({"kind": "lognormal", "mean": 100, "cv": 2})
    bounded = draw({"kind": "lognormal", "mean": 100, "cv": 2, "min": 10, "max": 400})
    assert bounded.tolist() == np.clip(free, 10, 400).tolist()
    assert free.min() == 1


def test_empirical_values_and_weights():
    lengths = draw({"kind": "empirical", "values": [5, 9, 7], "weights": [3, 0, 1]})
    assert sorted(set(lengths.tolist())) == [5, 7]
    assert (lengths == 5).mean() == pytest.approx(0.75, abs=0.01)
    assert set(draw({"kind": "empirical", "values": [5, 9]}).tolist()) == {5, 9}


def test_empirical_quantiles_are_met_and_linear_in_between():
    lengths = draw({"kind": "empirical", "quantiles": {0: 10, 0.5: 20, 1: 120}}, num=200_000)
    assert (lengths.min(), lengths.max()) == (10, 120)
    assert np.quantile(lengths, [0.25, 0.5, 0.75]) == pytest.approx([15, 20, 70], abs=1)


def test_empirical_reads_a_column(tmp_path):
    (tmp_path / "one.csv").write_text("tokens\n4\n6\n")
    (tmp_path / "two.csv").write_text("a,b\n4,1\n6,2\n")
    assert set(draw({"kind": "empirical", "path": str(tmp_path / "one.csv")}).tolist()) == {4, 6}
    assert set(draw({"kind": "empirical", "path": str(tmp_path / "two.csv"), "column": "b"}).tolist()) == {1, 2}
    with pytest.raises(TraceError) as caught:
        draw({"kind": "empirical", "path": str(tmp_path / "two.csv")})
    assert (
        str(caught.value) == f"{tmp_path}/two.csv:1: the file has 2 columns; columns: a, b. Name one of them as column."
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "Input should be greater than or equal to 1"),
        (2.5, "Input should be a valid integer"),
        ("many", "expected a mapping with 'kind', got 'many'; known: constant, uniform, lognormal, empirical"),
        ({"kind": "uniform", "low": 5, "high": 4}, "low 5 is above high 4; low must not exceed high"),
        ({"kind": "lognormal", "mean": 5}, "neither cv nor sigma is given; give one of them"),
        ({"kind": "lognormal", "mean": 5, "cv": 1, "sigma": 1}, "both cv and sigma are given; give one of them"),
        (
            {"kind": "lognormal", "mean": 5, "cv": 1, "min": 9, "max": 8},
            "min 9 is above max 8; min must not exceed max",
        ),
        ({"kind": "empirical"}, "nothing is given; give one of path, values, quantiles"),
        (
            {"kind": "empirical", "values": [1], "path": "x"},
            "path and values is given; give one of path, values, quantiles",
        ),
        (
            {"kind": "empirical", "values": [1], "weights": [1, 2]},
            "2 weights for 1 values; give one weight for each of values",
        ),
        ({"kind": "empirical", "values": [1], "weights": [0]}, "the weights add up to 0; their sum must be above 0"),
        (
            {"kind": "empirical", "values": [1], "column": "a"},
            "column is given without path; column names a column of the file",
        ),
        (
            {"kind": "empirical", "quantiles": {0: 1, 0.5: 2}},
            "quantiles are given for [0.0, 0.5]; 0 and 1 must be among them",
        ),
        (
            {"kind": "empirical", "quantiles": {0: 1, 0.5: 9, 1: 2}},
            "the quantile 2 at 1 is below 9 at 0.5; quantiles must not fall",
        ),
        (
            {"kind": "empirical", "quantiles": {0: 0.5, 1: 2}},
            "quantiles reach from 0.5 to 2; lengths lie between 1 and 1000000000000",
        ),
    ],
)
def test_bad_options_are_refused(value, message):
    assert refusal(value) == message


def test_joint_rows_stay_together(tmp_path):
    (tmp_path / "rows.csv").write_text("in,note,out\n1,x,10\n2,y,20\n3,z,30\n")
    rows = joint(path=str(tmp_path / "rows.csv"), prompt_column="in", output_column="out")
    prompts, outputs = rows.draw(3000, np.random.default_rng(1))
    assert (outputs == 10 * prompts).all()
    assert np.unique(prompts, return_counts=True)[1] / 3000 == pytest.approx(1 / 3, abs=0.04)


def test_joint_rows_of_a_real_table(shared):
    path = shared / "data/traces/length_tables/sharegpt_8k_first10000.csv"
    rows = joint(path=str(path), prompt_column="num_prefill_tokens", output_column="num_decode_tokens")
    prompts, outputs = rows.draw(10_000, np.random.default_rng(1))
    assert len(set(prompts.tolist())) > 1000
    assert outputs.max() <= 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing is given; give table or path"),
        ({"table": "azure-code", "path": "x"}, "both table and path are given; give table or path"),
        (
            {"table": "azure-chat"},
            "unknown length table 'azure-chat'; known: azure-code, azure-conversation. Did you mean 'azure-code'?",
        ),
        ({"path": "x", "prompt_column": "a"}, "the file's columns are not named; give prompt_column and output_column"),
    ],
)
def test_bad_joint_options_are_refused(options, message):
    with pytest.raises(ValidationError) as caught:
        JointLengthOptions(**options)
    assert caught.value.errors()[0]["msg"] == message


def test_bundled_tables_hold_together():
    assert length_tables() == ("azure-code", "azure-conversation")
    for name in length_tables():
        prompts, outputs = joint(table=name).draw(20_000, np.random.default_rng(1))
        assert prompts.min() >= 1
        assert outputs.min() >= 1
