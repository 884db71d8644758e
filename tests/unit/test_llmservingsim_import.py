import numpy as np
import pytest

from calibration.grids import fill_gaps, holdout_error, rising, straight_on, to_grid
from calibration.importers.llmservingsim import import_profile
from calibration.models import bundled_name
from calibration.ring import Link
from sim.cost.table import Table
from sim.errors import ArtifactError
from sim.step import StepShape

META = """
model: meta-llama/Llama-3.1-8B
gpu: Toy GPU
hardware: RTX 4090
profiled_at: '2026-01-02T03:04:05'
vllm_version: 0.19.0
cuda_version: '12.8'
variant: bf16
skew_fit: {enabled: true}
"""
CONTEXTS, BATCHES, CHUNKS = (16, 256), (1, 8), (16, 64)


def attention_us(chunk, context, batch, kv):
    return 5 + 0.01 * chunk * context + 0.02 * chunk**2 + 0.1 * batch * kv


def profile(folder):
    """A bundle whose every time is a formula."""
    folder.mkdir(exist_ok=True)
    (folder / "meta.yaml").write_text(META)
    layers = ["qkv_proj", "layernorm", "embedding"]
    dense = [f"{name},{n},{100 + 0.5 * n}" for name in layers for n in (1, 64)]
    (folder / "tp1_dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]))
    (folder / "tp1_per_sequence.csv").write_text("layer,sequences,time_us\nlm_head,1,7\nlm_head,8,9\n")
    rows = [(0, 0, b, k) for b in BATCHES for k in CONTEXTS]
    rows += [(c, p, 0, 0) for c in CHUNKS for p in (0, 64)]
    rows += [(c, p, b, k) for c in CHUNKS for p in (0, 64) for b in BATCHES for k in CONTEXTS]
    lines = [",".join(map(str, (*row, attention_us(*row)))) for row in rows]
    (folder / "tp1_attention.csv").write_text(
        "\n".join(["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", *lines])
    )
    header = "regime,n,nb,ratio,skew,pc,kp,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us,alpha"
    skew = [
        f"x,8,2,{ratio},4.0,{pc},0,{kvs},{4 * kvs},{kvs},{3 * attention_us(pc, 0, 8, kvs)},1,"
        f"{3 * (attention_us(pc, 0, 8, kvs) + 0.1 * kvs)},0"
        for pc in (0, 16)
        for ratio in (0.25, 0.5)
        for kvs in CONTEXTS
    ]
    skew += [line.replace("x,8,", "x,4,") for line in skew]
    (folder / "tp1_skew.csv").write_text("\n".join([header, *skew]))
    return folder


def test_layers_are_counted_and_times_kept(tmp_path):
    artifact = import_profile(profile(tmp_path / "p"))
    calls = {term.name: term.calls for term in artifact.terms}
    assert calls == {
        "embedding": 1,
        "layernorm": 64,
        "qkv_proj": 32,
        "lm_head": 1,
        "decode_attention": 32,
        "prefill_attention": 32,
        "mixed_attention": 32,
        "decode_skew": 32,
        "mixed_skew": 32,
    }
    assert (artifact.gpu, artifact.measured_on, artifact.tensor_parallel) == ("rtx-4090", "2026-01-02", 1)
    decode = artifact.of_kind("decode_attention")[0]
    assert decode.us == [pytest.approx(attention_us(0, 0, b, k)) for b in BATCHES for k in CONTEXTS]


def test_skew_is_told_to_be_a_sum_over_repeats_and_taken_per_call(tmp_path):
    skew = import_profile(profile(tmp_path / "p")).of_kind("mixed_skew")[0]
    assert skew.points == [[4, 8], [0.25, 0.5], [0, 48, 768]]
    assert skew.us == [pytest.approx(us) for us in [0, 1.6, 25.6] * 4]


def test_skew_stays_out_where_the_bundle_says_so(tmp_path):
    folder = profile(tmp_path / "p")
    (folder / "meta.yaml").write_text(META.replace("true", "false"))
    assert import_profile(folder).of_kind("decode_skew") == []


def test_a_bundle_that_lost_its_skew_names_it_as_missing(tmp_path):
    folder = profile(tmp_path / "p")
    assert "spread of contexts" not in import_profile(folder).missing
    (folder / "tp1_skew.csv").unlink()
    assert "spread of contexts" in import_profile(folder).missing


def mixture(folder):
    """The same of Mixtral-8x7B, its experts by rows and experts touched."""
    profile(folder)
    (folder / "meta.yaml").write_text(META.replace("meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1"))
    rows = [f"{n},{touched},{10 * n + 100 * touched}" for n in (1, 64) for touched in (1, 2, 8) if n * 2 >= touched]
    (folder / "tp1_moe.csv").write_text("\n".join(["tokens,activated_experts,time_us", *rows]))
    return folder


def test_experts_are_a_table_of_rows_and_experts_touched(tmp_path):
    artifact = import_profile(mixture(tmp_path / "p"))
    experts = artifact.of_kind("experts")[0]
    assert (experts.calls, experts.points) == (32, [[1, 64], [1, 2, 8]])
    assert experts.us == [110, 210, 210, 740, 840, 1440], "one row cannot touch eight: as two"
    assert (artifact.shape.num_experts, artifact.shape.num_experts_per_tok, artifact.shape.num_moe_layers) == (8, 2, 32)
    table = Table(artifact)
    dense = Table(artifact.model_copy(update={"terms": [own for own in artifact.terms if own.kind != "experts"]}))
    for rows in (1, 64):
        shape = StepShape(rows, rows * 20, rows * 400, 20, (), rows)
        touched = 8 * (1 - 0.75**rows)
        added = 32 * (10 * rows + 100 * touched)
        assert table.price(shape) - dense.price(shape) == pytest.approx(added * 1000, rel=1e-4)


def test_layers_with_experts_have_no_other_mlp(tmp_path):
    folder = mixture(tmp_path / "p")
    path = folder / "tp1_dense.csv"
    path.write_text(path.read_text() + "\nact_fn,1,1\nact_fn,64,2\n")
    with pytest.raises(ArtifactError, match="act_fn was timed, and every layer of mixtral-8x7b has experts in its"):
        import_profile(folder)


def test_times_of_experts_and_models_with_experts_go_together(tmp_path):
    folder = mixture(tmp_path / "p")
    with pytest.raises(ArtifactError, match=r"has times of experts, and llama-3\.1-8b has none"):
        import_profile(folder, model="llama-3.1-8b")
    (folder / "tp1_moe.csv").unlink()
    with pytest.raises(ArtifactError, match=r"has no times of the experts of mixtral-8x7b"):
        import_profile(folder)


@pytest.mark.parametrize(
    ("hugging_face_id", "name"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("nobody/Thing-9B-it", "thing-9b-it"),
    ],
)
def test_models_are_recognized_by_their_ids(hugging_face_id, name):
    assert bundled_name(hugging_face_id) == name


def test_equal_files_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        import_profile(profile(tmp_path / "p")).write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_all_reduces_are_missing_unless_the_link_is_known(tmp_path):
    folder = profile(tmp_path / "p")
    for path in folder.glob("tp1_*"):
        path.rename(folder / path.name.replace("tp1", "tp2"))
    assert "all-reduce between GPUs" in import_profile(folder, 2).missing
    known = import_profile(folder, 2, link=Link(bytes_per_us=1000, latency_us=3))
    sums, gather = (term for term in known.terms if term.is_communication)
    # 2 steps of half the hidden states of one token: 4096 * 2 bytes / 2
    assert (sums.name, sums.us[0], sums.calls) == ("allreduce", pytest.approx(2 * (3 + 4.096), rel=1e-5), 65)
    # 1 step of half the logits of one token: 128256 * 2 bytes / 2
    assert (gather.name, gather.us[0], gather.calls) == ("logits_gather", pytest.approx(3 + 128.256, rel=1e-5), 1)
    assert "all-reduce between GPUs" not in known.missing


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("tp1_dense.csv", "time_us", "time_ms", r"tp1_dense\.csv: no column time_us; it has layer, tokens, time_ms"),
        (
            "tp1_dense.csv",
            "qkv_proj,64,132.0",
            "qkv_proj,64,0",
            r"tp1_dense\.csv:3: time_us is 0\.0; expected a number",
        ),
        ("tp1_dense.csv", "qkv_proj,64,132.0", "qkv_proj,64,", r"tp1_dense\.csv:3: time_us is nan"),
        (
            "tp1_dense.csv",
            "qkv_proj,64,132.0",
            "qkv_proj,64,fast",
            r"tp1_dense\.csv:3: time_us is fast; expected a number above zero",
        ),
        ("tp1_per_sequence.csv", "lm_head,8,9\n", "", "lm_head: was timed at 1 point only"),
        ("meta.yaml", "gpu: Toy GPU", "", r"meta\.yaml: does not say gpu"),
        ("meta.yaml", "bf16", "fp8", r"variant is 'fp8'; expected bf16 or fp16"),
        ("meta.yaml", "Llama-3.1-8B", "Llama-9", r"--model: unknown model 'llama-9'"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, file, old, new, message):
    folder = profile(tmp_path / "p")
    path = folder / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(Exception, match=message):
        import_profile(folder)


def test_a_folder_without_a_profile_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"there is no .*meta\.yaml"):
        import_profile(tmp_path)


def test_gaps_are_filled_from_neighbours_and_twice_timed_points_averaged():
    points = [np.array([1.0, 1, 1, 3, 3, 1]), np.array([0.0, 2, 4, 0, 4, 4])]
    axes, table = to_grid(points, np.array([10.0, 12, 13, 30, 34, 15]))
    assert table[0].tolist() == [10, 12, 14]
    assert np.isnan(table[1, 1])
    assert fill_gaps(axes, table, [1, 0], "here").tolist() == [[10, 12, 14], [30, 32, 34]]


def test_tables_go_straight_on_from_the_upper_half_of_their_times():
    points = np.array([0.0, 1, 2, 3, 4, 5])
    nan = np.nan
    table = np.array([[0, nan, 2, 4, nan, nan], [9, 9, 8, 7, nan, nan], [5, nan, nan, nan, nan, nan]])
    assert straight_on(points, table).tolist() == [
        [0, 1, 2, 4, pytest.approx(6), pytest.approx(8)],
        [9, 9, 8, 7, 7, 7],  # noise that falls is not carried on
        [5, 5, 5, 5, 5, 5],
    ]


def test_tables_go_on_no_less_steeply_than_they_must():
    points, table = np.array([0.0, 1, 2, 4]), np.array([[0, 1, 2, np.nan], [0, 1, 2, np.nan]])
    assert straight_on(points, table, np.array([0.5, 3])).tolist() == [[0, 1, 2, pytest.approx(4)], [0, 1, 2, 8]]


def test_noise_moves_tables_up_as_much_as_down():
    assert rising(np.array([1.0, 3.0, 2.0, 4.0])).tolist() == [1, 2.5, 2.5, 4]
    table = rising(np.random.default_rng(0).random((6, 7, 3)))
    assert all((np.diff(table, axis=axis) >= 0).all() for axis in range(3))


def test_holdout_error_is_that_of_the_points_left_out():
    assert holdout_error(np.array([0.0, 1.0, 2.0]), np.array([[10.0, 20.0, 20.0]])) == pytest.approx(0.25)
