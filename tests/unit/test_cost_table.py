import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.cost.artifact import Artifact, Axis, Shape, Term, read_artifact
from sim.cost.base import Coverage, Resource, Target
from sim.cost.grids import Line, bilinear, trilinear
from sim.cost.table import Table, TableOptions
from sim.errors import ArtifactError
from sim.gpu import load_gpu
from sim.model import load_model
from sim.step import StepShape
from tests.unit.test_cost import as_arrays

TARGET = Target(load_model("llama-3.1-8b"), load_gpu("rtx-4090"), 1, 2.0)


def term(kind, us, **axes):
    points = [Axis(name=name, points=values) for name, values in axes.items()]
    return Term(name=kind, kind=kind, calls=2, axes=points, us=us)


ROWS = term("tokens", [10, 30, 50], num_tokens=[1, 101, 201])  # 9.8 + 0.2 a token
SAMPLED = term("sequences", [3, 4], num_sequences=[1, 11])
DECODES = term("decode_attention", [1, 11, 2, 22], num_decode=[1, 2], context=[10, 110])  # each: 0.1 a token
PROMPT = term("prefill_attention", [5, 6, 9, 20], num_tokens=[10, 50], context=[0, 100])
MIXED = term(
    "mixed_attention",
    [float(v) for v in range(16)],
    num_decode=[1, 3],
    num_tokens=[10, 50],
    prefill_context=[0, 100],
    context=[10, 110],
)
SKEW = term("decode_skew", [0, 0, 0, 0, 0, 0, 0, 8], num_decode=[2, 4], ratio=[0.2, 0.6], spread=[0, 100])


def artifact(*terms, **changes):
    content = {
        "hardware": "toy",
        "gpu": "rtx-4090",
        "model": "toy",
        "shape": Shape.of(TARGET.model),
        "dtype": "bfloat16",
        "kv_dtype_bytes": 2.0,
        "tensor_parallel": 1,
        "measured_on": "2026-01-01",
        "versions": {},
        "source": "made up",
        "licence": "none",
        "cuda_graph_sizes": [],
        "terms": terms or (ROWS, SAMPLED, DECODES, PROMPT),
        "missing": [],
        "holdout_error": {},
    }
    return Artifact(**content | changes)


def decodes(*contexts):
    return StepShape(
        len(contexts), sum(contexts), sum(c * c for c in contexts), max(contexts), num_sampled=len(contexts)
    )


def test_lines_are_flat_before_and_go_on_after_their_points():
    line = Line.through(np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 22.0]))
    places = [0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [line.at(x) for x in places] == [10, 10, 15, 20, 21, 22, 24]
    assert line.at_all(np.array(places)).tolist() == [line.at(x) for x in places]


def test_grids_reproduce_what_is_linear_in_each_variable():
    axes = [[0.0, 1.0, 4.0], [0.0, 2.0], [1.0, 3.0]]

    def value(x, y, z):
        return 1 + 2 * x + 3 * y + 5 * z + 7 * x * y * z

    cube = [[[value(x, y, z) for z in axes[2]] for y in axes[1]] for x in axes[0]]
    assert trilinear(axes, cube, 3, 1, 2) == value(3, 1, 2)
    assert trilinear(axes, cube, 5, 1, 2) == value(5, 1, 2), "beyond the last point"
    assert trilinear(axes, cube, -1, 1, 2) == value(0, 1, 2), "before the first point"
    assert bilinear(axes[:2], [row[0:2] for row in [[1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]], 1, 1) == 4


def test_a_decode_step_by_hand():
    cost = Table(artifact(step_us=100))
    us = 100 + 2 * (10 + 0.2) + 2 * 3.1 + 2 * (2 + 0.2 * (20 + 1 - 10))
    assert cost.price(decodes(15, 25)) == us * 1000
    parts = cost.breakdown(as_arrays([decodes(15, 25)]))
    assert {resource.value: part.tolist() for resource, part in parts.items()} == {
        "compute": [pytest.approx(2 * 0.2 * 1000 + 2 * 0.1 * 1000)],
        "bandwidth": [pytest.approx(2 * (10 + 3 + 4.2) * 1000)],
        "communication": [0],
        "overhead": [100_000],
    }


def test_a_mixed_step_is_the_sum_of_its_halves_unless_both_were_measured_together():
    shape = decodes(59)._replace(prefills=((30, 50),))
    rows_us = 2 * (10 + 30 * 0.2) + 2 * 3
    assert Table(artifact()).price(shape) == (rows_us + 2 * 10 + 2 * 6) * 1000
    together = Table(artifact(ROWS, SAMPLED, DECODES, PROMPT, MIXED))
    assert together.price(shape) == (rows_us + 2 * (0 + 2 + 1 + 0.5)) * 1000


def test_several_prompts_count_as_one_with_as_many_pairs():
    cost = Table(artifact())
    both = cost.price(StepShape(prefills=((14, 0), (14, 0)), num_sampled=2))
    one = cost.price(StepShape(prefills=((20, 0),), num_sampled=2))  # 210 pairs, as two of 14 have
    assert both - one == 8 * 0.2 * 2 * 1000


def test_rows_of_prompts_alone_cost_what_whole_iterations_say():
    own = term("prefill_tokens", [0, 100], num_tokens=[1, 101])
    cost, plain = Table(artifact(own, DECODES, PROMPT, step_us=7)), Table(artifact(ROWS, DECODES, PROMPT))
    assert cost.price(decodes(15, 25)) == (7 + 2 * (2 + 0.2 * (20 + 1 - 10))) * 1000
    mixed = decodes(15, 25)._replace(prefills=((21, 0), (30, 0)))
    added = 7 + 2 * 50 - 2 * (10 + 52 * 0.2)  # 51 rows of prompts, 53 rows
    assert cost.price(mixed) - plain.price(mixed) == pytest.approx(added * 1000, abs=1)
    beyond = mixed._replace(prefills=((20_000, 0),))
    steps = as_arrays([mixed, beyond, decodes(15, 25)])
    assert sum(cost.breakdown(steps).values()).tolist() == pytest.approx(
        [cost.price(shape) for shape in (mixed, beyond, decodes(15, 25))], abs=1
    )
    alone = StepShape(prefills=((21, 0), (20, 0)), num_sampled=2)
    assert cost.coverage(as_arrays([mixed, alone, decodes(15, 25)])).tolist() == [
        Coverage.EXTRAPOLATED,
        Coverage.INTERPOLATED,
        Coverage.INTERPOLATED,
    ], "iterations with both were not timed"


EXPERTS = term("experts", [1, 5, 2, 6, 3, 7], num_tokens=[1, 3, 5], num_experts=[1, 5])  # one a row pair, one an expert
MIXTURE = Shape.of(TARGET.model).model_copy(
    update={"num_moe_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
)


def test_experts_are_priced_at_the_number_of_them_that_a_batch_is_expected_to_touch():
    cost, dense = Table(artifact(ROWS, EXPERTS, DECODES, PROMPT, shape=MIXTURE)), Table(artifact(ROWS, DECODES, PROMPT))
    for rows, touched in ((1, 2), (2, 8 * (1 - 0.75**2)), (3, 8 * (1 - 0.75**3))):
        shape = decodes(*[20] * rows)
        added = 1 + (rows - 1) / 2 + touched - 1
        assert cost.price(shape) - dense.price(shape) == pytest.approx(2 * added * 1000, abs=1)
        assert cost.price_decode_run(shape, 2)[0] == cost.price(shape)
    wide = as_arrays([decodes(20, 20), decodes(*[20] * 5)])
    assert cost.coverage(wide).tolist() == [Coverage.INTERPOLATED, Coverage.EXTRAPOLATED], "6.1 experts of 5 timed"
    with pytest.raises(
        ArtifactError, match="experts is of experts, of 0, 0 for each token; expected the shape of a mi"
    ):
        Table(artifact(ROWS, EXPERTS, DECODES, PROMPT))


def test_batches_are_padded_up_to_the_largest_graph_that_the_engine_captures():
    padding = artifact(cuda_graph_sizes=[1, 4, 8])
    one_row_ns = 2 * 0.2 * 1000
    eager = Table(padding, 0)
    for largest, padded in ((8, {2: 4, 4: 4, 5: 8, 9: 9}), (4, {2: 4, 5: 5})):
        for rows, runs_as in padded.items():
            shape = StepShape(rows, rows * 20, rows * 400, 20, (), 0)
            assert Table(padding, largest).price(shape) - eager.price(shape) == round((runs_as - rows) * one_row_ns)


def test_unequal_contexts_add_what_two_groups_of_their_spread_add():
    cost, plain = Table(artifact(ROWS, SAMPLED, DECODES, PROMPT, SKEW)), Table(artifact())
    assert cost.price(decodes(30, 30, 30, 30)) == plain.price(decodes(30, 30, 30, 30))
    # two of four are longer by 40: ratio 0.5 lies at 3/4 of the way to 0.6, spread 40 at 2/5
    added = cost.price(decodes(30, 30, 70, 70)) - plain.price(decodes(30, 30, 70, 70))
    assert added == pytest.approx(2 * 8 * 0.75 * 0.4 * 1000, abs=1)


@pytest.fixture(scope="module", params=["plain", "skewed"])
def cost(request):
    return Table(artifact(ROWS, SAMPLED, DECODES, PROMPT, *((SKEW,) if request.param == "skewed" else ())))


@given(contexts=st.lists(st.integers(1, 200_000), min_size=1, max_size=8), num_steps=st.integers(1, 40))
def test_a_run_of_decodes_costs_what_its_steps_cost(cost, contexts, num_steps):
    expected = [cost.price(decodes(*(context + i for context in contexts))) for i in range(num_steps)]
    assert cost.price_decode_run(decodes(*contexts), num_steps).tolist() == expected


PREFILLS = st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 200_000)), max_size=3)


@given(contexts=st.lists(st.integers(1, 5000), max_size=6), prefills=PREFILLS)
def test_the_breakdown_adds_up_to_the_price(cost, contexts, prefills):
    shape = (decodes(*contexts) if contexts else StepShape())._replace(prefills=tuple(prefills))
    parts = cost.breakdown(as_arrays([shape]))
    assert all(part[0] >= 0 for part in parts.values())
    assert sum(parts.values())[0] == pytest.approx(cost.price(shape), rel=1e-9, abs=1)


@given(num_tokens=st.integers(1, 20_000), context=st.integers(0, 200_000), more=st.integers(1, 1000))
def test_more_tokens_never_cost_less(cost, num_tokens, context, more):
    price = cost.price(StepShape(prefills=((num_tokens, context),)))
    assert cost.price(StepShape(prefills=((num_tokens + more, context),))) >= price
    assert cost.price(StepShape(prefills=((num_tokens, context + more),))) >= price


def test_communication_is_a_resource_of_its_own():
    ring = term("tokens", [1, 2], num_tokens=[1, 11]).model_copy(update={"name": "ring", "is_communication": True})
    parts = Table(artifact(ROWS, SAMPLED, DECODES, PROMPT, ring)).breakdown(as_arrays([decodes(20, 20)]))
    assert parts[Resource.COMMUNICATION].tolist() == [pytest.approx(2 * 1.1 * 1000)]


def test_gathering_of_sampled_rows_is_communication_too():
    gather = SAMPLED.model_copy(update={"name": "gather", "is_communication": True})
    with_gather, without = (Table(artifact(ROWS, SAMPLED, DECODES, PROMPT, *more)) for more in ([gather], []))
    steps = as_arrays([decodes(20, 20), StepShape(prefills=((10, 0),))])
    parts, others = with_gather.breakdown(steps), without.breakdown(steps)
    assert parts.pop(Resource.COMMUNICATION).tolist() == [pytest.approx(2 * 3.1 * 1000), 0]
    assert all(parts[resource].tolist() == pytest.approx(others[resource].tolist()) for resource in parts)


def test_no_iterations_have_no_breakdown():
    parts = Table(artifact()).breakdown(as_arrays([]))
    assert {resource: values.tolist() for resource, values in parts.items()} == {resource: [] for resource in parts}


def test_the_worst_coordinate_says_how_far_an_iteration_lies_from_the_measurements():
    steps = [decodes(9), decodes(10), decodes(200), StepShape(prefills=((10, 0), (2, 0)), num_sampled=1)]
    levels = Table(artifact()).coverage(as_arrays(steps))
    assert [Coverage(level).name for level in levels] == ["MEASURED", "INTERPOLATED", "EXTRAPOLATED", "INTERPOLATED"]


def test_what_no_timed_point_is_as_large_as_is_extrapolated():
    steps = [decodes(9), decodes(9, 9), decodes(50, 50), decodes(109), decodes(60, 60)]
    ragged = DECODES.model_copy(update={"corners": [[1, 110], [2, 55]]})
    levels = Table(artifact(ROWS, SAMPLED, ragged, PROMPT)).coverage(as_arrays(steps))
    names = [Coverage(level).name for level in levels]
    assert names == ["MEASURED", "INTERPOLATED", "INTERPOLATED", "MEASURED", "EXTRAPOLATED"]
    with pytest.raises(ValueError, match="corners of other than 2 coordinates"):
        Term.model_validate(DECODES.model_dump() | {"corners": [[1]]})


def test_rows_count_as_what_they_are_padded_to():
    exact = StepShape(2, 18, 162, 9, (), 1)  # two decodes at the mean context 10
    for sizes, level in (([], Coverage.INTERPOLATED), ([101], Coverage.MEASURED)):
        assert Table(artifact(cuda_graph_sizes=sizes)).coverage(as_arrays([exact])).tolist() == [level]


def test_artifacts_survive_the_way_to_disk_and_back(tmp_path):
    own = artifact()
    own.write(tmp_path / "a.json")
    assert read_artifact(tmp_path / "a.json") == own
    built = Table.build(TableOptions(artifact=str(tmp_path / "a.json")), TARGET)
    assert built.price(decodes(15, 25)) == Table(own).price(decodes(15, 25))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "not JSON"),
        (lambda text: text.replace('"us":[10.0,30.0', '"us":[10.0,31.0'), "its contents are not what its sha256 says"),
        (lambda text: json.dumps(json.loads(text) | {"colour": 1}), r"colour: Extra inputs are not permitted"),
        (lambda text: text.replace("[1.0,101.0,201.0]", "[1.0,1.0,201.0]"), "the points of num_tokens do not rise"),
        (lambda text: text.replace("[10.0,30.0,50.0]", "[10.0,30.0]"), "tokens has 2 times for 3 points"),
        (lambda text: "[]", "no cost artifact"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, message):
    path = tmp_path / "a.json"
    artifact().write(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ArtifactError, match=message):
        read_artifact(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"^cost\.artifact: cannot read .*nowhere\.json"):
        read_artifact(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 2}, r"hardware\.tensor_parallel is 1 in the scenario and 2 in the artifact"),
        ({"kv_dtype_bytes": 1.0}, r"bytes per element of KV is 2\.0 in the scenario and 1\.0 in the artifact"),
        ({"dtype": "fp8"}, r"bits per weight is 16 in the scenario and 8 in the artifact"),
        ({"shape": MIXTURE}, r"num_moe_layers of llama-3\.1-8b is 0 in the scenario and 2 in the artifact"),
        ({"gpu": "h100-sxm"}, r"hardware\.gpu is rtx-4090 in the scenario and h100-sxm in the artifact"),
        (
            {"shape": Shape.of(load_model("qwen3-8b"))},
            r"of llama-3\.1-8b is \d+ in the scenario and \d+ in the artifact",
        ),
    ],
)
def test_an_artifact_of_something_else_is_refused(tmp_path, changes, message):
    artifact(**changes).write(tmp_path / "a.json")
    with pytest.raises(ArtifactError, match=message):
        Table.build(TableOptions(artifact=str(tmp_path / "a.json")), TARGET)


def test_a_needed_term_that_is_missing_is_named():
    with pytest.raises(ArtifactError, match="0 terms of decode_attention; expected one"):
        Table(artifact(ROWS, SAMPLED, PROMPT))
    with pytest.raises(ArtifactError, match="0 terms of tokens or prefill_tokens; expected one"):
        Table(artifact(SAMPLED, DECODES, PROMPT))


def test_hardware_without_a_listed_gpu_fits_any(tmp_path):
    artifact(gpu=None).write(tmp_path / "a.json")
    target = dataclasses.replace(TARGET, gpu=load_gpu("h100-sxm"))
    assert Table.build(TableOptions(artifact=str(tmp_path / "a.json")), target).artifact.gpu is None
