"""What Vidur's and AIConfigurator's tables say of the same step, beside the data sheet."""

import pytest
from typer.testing import CliRunner

from calibration.cli import app
from calibration.host import vllm_host_us
from calibration.importers import aiconfigurator, vidur
from sim.cost.base import Target
from sim.cost.roofline import Roofline, RooflineOptions
from sim.cost.table import Table
from sim.errors import ArtifactError
from sim.gpu import load_gpu
from sim.model import load_model
from sim.step import StepShape

DECODES = StepShape(32, 32 * 1000, 32 * 1000**2, 1000, (), 32)
PROMPT = StepShape(prefills=((2048, 0),), num_sampled=1)


@pytest.fixture(scope="module")
def vidur_files(shared):
    folder = shared / "data/profiles/vidur"
    attention = folder / "history_a100_attention_llama2_70b_shape_tp.csv.gz"
    return folder / "a100_Llama-2-70b-hf_mlp.csv", attention, folder / "net_a100_dgx_all_reduce.csv"


@pytest.mark.parametrize(("shape", "low", "high"), [(DECODES, 0.9, 1.3), (PROMPT, 0.8, 1.3)], ids=["decodes", "prompt"])
def test_vidurs_tables_are_near_the_roofline(vidur_files, shape, low, high):
    mlp, attention, all_reduce = vidur_files
    table = Table(vidur.import_profile(mlp, attention, "llama-2-70b", 2, all_reduce))
    roofline = Roofline.build(RooflineOptions(), Target(load_model("llama-2-70b"), load_gpu("a100-sxm-80gb"), 2, 2.0))
    assert low < table.price(shape) / roofline.price(shape) < high


@pytest.mark.parametrize(("shape", "low", "high"), [(DECODES, 0.8, 1.1), (PROMPT, 0.8, 1.2)], ids=["decodes", "prompt"])
def test_aiconfigurators_tables_are_near_the_roofline(shared, shape, low, high):
    table = Table(aiconfigurator.import_tables(shared / "data/profiles/aiconfigurator", "llama-3.1-8b"))
    roofline = Roofline.build(RooflineOptions(), Target(load_model("llama-3.1-8b"), load_gpu("h100-sxm"), 1, 2.0))
    assert low < table.price(shape) / roofline.price(shape) < high


def test_the_command_line_takes_vidurs_files(vidur_files, shared, tmp_path):
    host = shared / "data/profiles/vidur/history_a100_cpu_overheads_B.csv"
    out = tmp_path / "a.json"
    paths = list(map(str, vidur_files))
    options = ["--model", "llama-2-70b", "--tp", "2", "--host-from", str(host), "--out", str(out)]
    done = CliRunner().invoke(app, ["import", "vidur", *paths, *options])
    assert "12 terms of llama-2-70b on a100" in done.stdout
    assert "work on the host" not in done.stdout
    shown = CliRunner().invoke(app, ["show", str(out)]).stdout
    assert "allreduce: tokens, 160 calls" in shown
    assert "host: 1387.5 us an iteration and 26.98 us a request" in shown


@pytest.mark.parametrize(
    ("model", "tensor_parallel", "message"),
    [
        ("llama-2-7b", 2, r"n_embd is \[8192\]; llama-2-7b has 4096"),
        ("llama-2-70b", 4, r"num_tensor_parallel_workers is \[2\]; llama-2-70b has 4"),
        ("llama-2-70b", 16, r"fewer than two numbers of tokens on 16 GPUs"),
    ],
)
def test_a_profile_of_another_shape_is_refused(vidur_files, model, tensor_parallel, message):
    mlp, attention, _ = vidur_files
    with pytest.raises(ArtifactError, match=message):
        vidur.import_profile(mlp, attention, model, tensor_parallel)


def test_files_of_another_kind_are_refused(vidur_files, shared, tmp_path):
    mlp, attention, _ = vidur_files
    with pytest.raises(ArtifactError, match=r"no column num_tokens"):
        vidur.import_profile(attention, mlp, "llama-2-70b", 2)
    with pytest.raises(ArtifactError, match=r"no column batch_size"):
        vllm_host_us(mlp)
    with pytest.raises(ArtifactError, match=r"there is no h100_sxm_vllm\*_gemm\.csv"):
        aiconfigurator.import_tables(tmp_path, "llama-3.1-8b")
    with pytest.raises(ArtifactError, match=r"no generation attention of 40 heads and 40 KV heads; timed: "):
        aiconfigurator.import_tables(shared / "data/profiles/aiconfigurator", "llama-2-13b")


def test_fp8_products_take_the_fp8_tables_and_the_rest_stays(shared):
    folder = shared / "data/profiles/aiconfigurator"
    plain, fp8 = (
        {own.name: own for own in aiconfigurator.import_tables(folder, model, tensor_parallel=4).terms}
        for model in ("qwen3-32b", "qwen3-32b-fp8")
    )
    changed = {name for name in plain if plain[name] != fp8[name]}
    assert changed == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    one_row, many = (
        sum(fp8[name].us[i] for name in changed) / sum(plain[name].us[i] for name in changed) for i in (0, -1)
    )
    assert 0.6 < many < one_row < 0.8, "half of the bytes, and the quantization of the inputs"
    with pytest.raises(ArtifactError, match="is a model with quantized weights"):
        aiconfigurator.import_tables(folder, "qwen2.5-32b-awq")
