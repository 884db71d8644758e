"""Published closed-loop points on H100s, priced from AIConfigurator's H100 tables.

Fitted on the points: nothing. The host's time is vLLM's own scheduler, timed by itself, and Vidur's CPU timings.
How InferenceMAX loads a server (10 prompts a client, lengths between 80 % and all of the nominal ones,
asynchronous scheduling) is its own protocol; the other points have fixed lengths.
"""

import json

import pytest
from typer.testing import CliRunner

from calibration.cli import app
from calibration.serving_points import read_points
from sim.errors import ArtifactError

TABLE = "data/groundtruth/inferencemax_silicon/dense_agg_h100.csv"


def run(shared, *options):
    paths = {
        "--profile": "data/profiles/aiconfigurator",
        "--points": TABLE,
        "--host-from": "data/profiles/vidur/history_a100_cpu_overheads_B.csv",
    }
    given = [text for option, path in paths.items() for text in (option, str(shared / path))]
    return CliRunner().invoke(app, ["points", *given, *options])


def groups(shared, *options):
    content = json.loads(run(shared, *options, "--json").stdout)
    return {group["name"]: group for group in content["groups"]}, content["points"]


def test_the_vllm_points_that_state_fp8(shared):
    found, points = groups(shared, "--backend", "vllm", "--precision", "fp8")
    every = found["all"]
    assert every["num_points"] == len(points) == 48
    assert every["tpot_error"] <= 0.05
    assert every["throughput_error"] <= 0.05
    assert every["throughput_rank"] >= 0.975
    stated = found["all that state their clients"]
    assert stated["num_points"] == 45
    assert stated["ttft_error"] <= 0.07
    assert min(stated["tpot_rank"], stated["throughput_rank"]) >= 0.99
    worst = max(abs(point["tpot_error"]) for point in points if point["states_clients"])
    assert worst <= 0.13, "eight GPUs with 16 to 64 clients: the tables' all-reduces are of a newer vLLM"


@pytest.mark.slow
def test_the_other_vllm_points(shared):
    found, _ = groups(shared, "--backend", "vllm")
    own = found["vllm 0.12.0, qwen3-32b"]
    assert own["num_points"] == 90
    assert own["tpot_error"] <= 0.05
    assert own["throughput_error"] <= 0.05
    assert own["tpot_rank"] >= 0.99


def test_two_gpus_need_not_hold_what_their_batch_size_says(shared):
    """Without stated clients the batch size stands in, and is too many: weights and KV alone would take longer."""
    point = next(p for p in read_points(shared / TABLE, "vllm") if not p.states_clients and p.tensor_parallel == 2)
    gib_read = (32 + point.num_clients * (point.prompt_tokens + point.output_tokens / 2) * 262144 / 2**30) / 2
    assert gib_read * 2**30 / 3.35e12 * 1e3 > point.tpot_ms


def test_what_is_printed(shared, tmp_path):
    lines = (shared / TABLE).read_text(encoding="utf-8").splitlines()
    chosen = [line for line in lines if "vllm_fp8_agg_1024x1024_c4_tp2" in line]
    (tmp_path / "one.csv").write_text("\n".join([lines[0], *chosen]), encoding="utf-8")
    done = run(shared, "--points", str(tmp_path / "one.csv"))
    assert done.stdout.count("vllm, llama-3.1-70b-fp8") == 1
    assert "c4_tp2_ep1" in done.stdout
    assert "TPOT 17.4 ms measured, 18.1 simulated (+4 %)" in done.stdout


def test_points_that_are_none_are_refused(shared, tmp_path):
    done = run(shared, "--backend", "vlm")
    assert isinstance(done.exception, ArtifactError)
    assert "has no points of vlm, any precision" in str(done.exception)
    (tmp_path / "x.csv").write_text("isl,osl,batch_size,tp_size,silicon_ttft_ms,silicon_tpot_ms\n1,1,1,1,1,1\n")
    with pytest.raises(ArtifactError, match="no column id, backend"):
        read_points(tmp_path / "x.csv")
    lines = (shared / TABLE).read_text(encoding="utf-8").splitlines()[:3]
    place = lines[0].split(",").index("concurrency")
    cells = lines[2].split(",")
    (tmp_path / "y.csv").write_text("\n".join([*lines[:2], ",".join([*cells[:place], "many", *cells[place + 1 :]])]))
    with pytest.raises(ArtifactError, match=r"y\.csv:3: concurrency is many"):
        read_points(tmp_path / "y.csv")
