"""What the scenarios of papers take from elsewhere: costs from published timings, lengths from means and tables."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import sim
from benchmarks.papers import FOLDER
from sim.gpu import load_gpu
from sim.model import load_model
from sim.replica import cost_model
from sim.step import StepShape


def costs(name: str) -> dict[str, float]:
    """The figures of a scenario's costs, but its kind."""
    return sim.load_scenario(FOLDER / f"{name}.yaml").cost.model_dump(exclude={"kind"}, exclude_unset=True)


def traffic(name: str) -> dict[str, dict[str, object]]:
    """The lengths of a scenario's only class."""
    (only,) = sim.load_scenario(FOLDER / f"{name}.yaml").traffic
    return only.model_dump()


def clipped_moments(lengths: dict[str, object]) -> tuple[float, float]:
    """Mean and mean square of a lognormal that is cut at its maximum, tokens."""
    variance = np.log1p(float(lengths["cv"]) ** 2)
    draws = np.random.default_rng(1).lognormal(np.log(lengths["mean"]) - variance / 2, variance**0.5, 1_000_000)
    cut = np.minimum(draws, lengths["max"])
    return float(cut.mean()), float((cut**2).mean())


@pytest.mark.parametrize("name", ["vllm_opt13b_sharegpt", "vllm_opt66b_sharegpt", "vllm_opt175b_sharegpt"])
def test_lengths_have_the_printed_means_and_the_spread_of_figure_2(name: str):
    lengths = traffic(name)
    prompts, outputs = clipped_moments(lengths["prompt_tokens"]), clipped_moments(lengths["output_tokens"])
    assert prompts[0] == pytest.approx(161.31, rel=0.01)
    assert outputs[0] == pytest.approx(337.99, rel=0.01)
    assert outputs[1] / 2 / outputs[0] == pytest.approx(299, rel=0.01)


@pytest.mark.parametrize("name", ["sarathi_table4_sharegpt", "sarathi_capacity_yi34b", "sarathi_capacity_mistral7b"])
def test_lengths_are_quantiles_of_the_authors_table(name: str, shared: Path):
    table = pd.read_csv(shared / "data/traces/length_tables/sharegpt_8k_first10000.csv")
    for lengths, column in (("prompt_tokens", "num_prefill_tokens"), ("output_tokens", "num_decode_tokens")):
        quantiles = traffic(name)[lengths]["quantiles"]
        assert quantiles == {part: round(table[column].quantile(part)) for part in quantiles}
    assert abs(table["num_prefill_tokens"].corr(table["num_decode_tokens"])) < 0.1


@pytest.mark.parametrize("name", ["vllm_opt13b_sharegpt", "vllm_opt13b_alpaca", "anyscale_opt13b", "distserve_opt13b"])
def test_costs_of_vllm_with_opt_13b_are_what_distserve_fitted(name: str, shared: Path):
    fits = json.loads((shared / "data/profiles/distserve/opt13b_fitted_coefficients.json").read_text())["vllm"]["1"]
    fixed, context, decode = fits["decoding_smallbs"]
    _, token, square = fits["prefill"]
    gpu = load_gpu(sim.load_scenario(FOLDER / f"{name}.yaml").hardware.gpu)
    slower = load_gpu("a100-sxm-80gb").bandwidth_bytes_per_s / gpu.bandwidth_bytes_per_s
    assert costs(name) == pytest.approx(
        {
            "base_ms": fixed,
            "per_decode_us": decode * 1e3,
            "per_context_token_ns": context * 1e6 * slower,
            "per_prefill_token_us": token * 1e3,
            "per_prefill_pair_ns": 2 * square * 1e6,
        },
        rel=0.005,
    )


@pytest.mark.parametrize("name", ["vllm_opt66b_sharegpt", "vllm_opt175b_sharegpt", "distserve_opt66b"])
def test_costs_of_vllm_with_larger_opt_grow_from_those_of_opt_13b(name: str, shared: Path):
    fits = json.loads((shared / "data/profiles/distserve/opt13b_fitted_coefficients.json").read_text())["vllm"]
    scenario = sim.load_scenario(FOLDER / f"{name}.yaml")
    num_gpus, own, small = scenario.hardware.tensor_parallel, load_model(scenario.model), load_model("opt-13b")
    parameters, small_parameters = (
        sum(product.num_layers * product.parameters for product in model.products(1)) for model in (own, small)
    )
    layers = own.num_hidden_layers / small.num_hidden_layers
    rows = layers * own.hidden_size / small.hidden_size
    token = {gpus: fits[gpus]["prefill"][1] * 1e3 for gpus in ("1", "4")}
    exchanged = (token["4"] - token["1"] / 4) * rows * (num_gpus - 1) / num_gpus / (3 / 4)
    slower = load_gpu("a100-sxm-80gb").bandwidth_bytes_per_s / load_gpu(scenario.hardware.gpu).bandwidth_bytes_per_s
    assert costs(name) == pytest.approx(
        {
            "base_ms": fits["4"]["decoding_smallbs"][0] * layers,
            "per_decode_us": fits["4"]["decoding_smallbs"][2] * 1e3,
            "per_context_token_ns": fits["1"]["decoding_smallbs"][1] * 1e6 * rows / num_gpus * slower,
            "per_prefill_token_us": token["1"] * parameters / small_parameters / num_gpus + exchanged,
            "per_prefill_pair_ns": 2 * fits["1"]["prefill"][2] * 1e6 * rows / num_gpus,
        },
        rel=0.005,
    )


VIDUR = {
    "sarathi_capacity_yi34b": ("Llama-2-70b", 2, "pairwise_nvlink", "codellama/CodeLlama-34b-Instruct-hf"),
    "sarathi_table4_sharegpt": ("Llama-2-70b", 2, "pairwise_nvlink", "codellama/CodeLlama-34b-Instruct-hf"),
    "sarathi_table4_arxiv": ("Llama-2-70b", 2, "pairwise_nvlink", "codellama/CodeLlama-34b-Instruct-hf"),
    "sarathi_capacity_mistral7b": ("Llama-2-7b", 1, None, "meta-llama/Llama-2-7b-hf"),
    "fastgen_llama2_70b": ("Llama-2-70b", 4, "dgx", "meta-llama/Llama-2-70b-hf"),
}
"""Scenario: the model whose products were timed, GPUs, their links, and the model whose host was timed."""


@pytest.mark.parametrize("name", VIDUR)
def test_costs_of_sarathi_and_fastgen_are_vidurs_timings(name: str, shared: Path):
    model, num_gpus, links, host = VIDUR[name]
    folder = shared / "data/profiles/vidur"
    expected = products(folder, model, num_gpus) | hosts(folder, host, num_gpus)
    expected["attention_compute_efficiency"] = attention(folder)
    if links is not None:
        expected |= all_reduce(folder, links, num_gpus)
    assert costs(name) == pytest.approx(expected, rel=0.02)


def products(folder: Path, name: str, num_gpus: int) -> dict[str, float]:
    """Matrix products of a layer: the part of the peak with many tokens, and of the bandwidth with few."""
    model = load_model(name.lower())
    rows = pd.read_csv(folder / f"a100_{name}-hf_mlp.csv")
    rows = rows[rows["num_tensor_parallel_workers"] == num_gpus]
    heads = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    elements = model.hidden_size * (heads + model.hidden_size + 3 * model.intermediate_size) / num_gpus
    operators = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    time_s = sum(rows[f"time_stats.{operator}.median"] for operator in operators) / 1e3
    gpu = load_gpu("a100-sxm-80gb")
    compute = 2 * rows["num_tokens"] * elements / time_s / gpu.bf16_flops
    memory = 2 * elements / time_s / gpu.bandwidth_bytes_per_s
    return {
        "gemm_compute_efficiency": compute[rows["num_tokens"] >= 512].median(),
        "memory_efficiency": memory[rows["num_tokens"] <= 32].median(),
    }


def attention(folder: Path) -> float:
    """Of pieces of prompts from 512 tokens on, Llama-2-70B on two GPUs: the part of the peak."""
    rows = pd.read_csv(folder / "history_a100_attention_llama2_70b_shape_tp.csv.gz")
    rows = rows[rows["is_prefill"] & (rows["prefill_chunk_size"] >= 512)]
    pairs = rows["prefill_chunk_size"] * (rows["kv_cache_size"] + (rows["prefill_chunk_size"] + 1) / 2)
    flops = pairs * 4 * 128 * 32 / (rows["time_stats.attn_prefill.median"] / 1e3)
    return float((flops / load_gpu("a100-sxm-80gb").bf16_flops).median())


def all_reduce(folder: Path, links: str, num_gpus: int) -> dict[str, float]:
    """A line through the times of 1 to 120 MB."""
    rows = pd.read_csv(folder / f"net_a100_{links}_all_reduce.csv")
    rows = rows[(rows["num_workers"] == num_gpus) & (rows["devices_per_node"] == num_gpus)]
    rows = rows[rows["size"].between(1e6, 1.2e8)]
    us_per_byte, us = np.polyfit(rows["size"], rows["time_stats.all_reduce.median"] * 1e3, 1)
    link = load_gpu("a100-sxm-80gb").link_bytes_per_s
    rate = 2 * (num_gpus - 1) / num_gpus / us_per_byte * 1e6
    return {"allreduce_efficiency": rate / link, "allreduce_latency_us": us}


def hosts(folder: Path, model: str, num_gpus: int) -> dict[str, float]:
    """A line through scheduling, inputs, sampling and outputs, by batch size."""
    rows = pd.read_csv(folder / "history_a100_cpu_overheads_B.csv")
    rows = rows[(rows["model_name"] == model) & (rows["tensor_parallel_degree"] == num_gpus)]
    parts = ("schedule", "sampler_e2e", "prepare_inputs_e2e", "process_model_outputs")
    us = sum(rows[f"{part}_median"] for part in parts) * 1e3
    per_request, fixed = np.polyfit(rows["batch_size"], us, 1)
    return {"host_us": fixed, "host_us_per_request": per_request}


@pytest.mark.parametrize(
    ("name", "limit_ms", "error"), [("sarathi_capacity_yi34b", 200, 0.10), ("sarathi_capacity_mistral7b", 100, 0.15)]
)
def test_a_decode_iteration_is_the_fifth_of_the_strict_limit_that_sarathi_says(
    name: str, limit_ms: float, error: float
):
    cost = cost_model(sim.load_scenario(FOLDER / f"{name}.yaml"))
    shape = StepShape(32, 32 * 4096, 32 * 4096**2, 4096, num_sampled=32)
    assert cost.price(shape) / 1e6 == pytest.approx(limit_ms / 5, rel=error)
