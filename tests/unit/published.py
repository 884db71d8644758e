"""Small published measurements of every kind, each time a formula: what importers are tested on."""

import itertools
import json
from pathlib import Path

import pandas as pd

from calibration.importers.vidur import LAYER_OPERATORS


def llmservingsim(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "meta.yaml").write_text(
        "{model: meta-llama/Llama-3.1-8B, gpu: Toy, hardware: RTX 4090, profiled_at: '2026-01-02', "
        "vllm_version: 0.19.0, cuda_version: '12.8', variant: bf16}"
    )
    dense = [(name, n, 100 + 0.5 * n) for name in ("qkv_proj", "gate_up_proj") for n in (1, 64)]
    _csv(folder / "tp1_dense.csv", "layer tokens time_us", dense)
    _csv(folder / "tp1_per_sequence.csv", "layer sequences time_us", [("lm_head", 1, 7), ("lm_head", 8, 9)])
    halves = [(0, 0), *itertools.product((16, 64), (0, 64))], [(0, 0), *itertools.product((1, 8), (16, 256))]
    rows = [
        (c, p, n, kv, 5 + 0.01 * c * p + 0.02 * c**2 + 0.1 * n * kv) for (c, p), (n, kv) in itertools.product(*halves)
    ]
    _csv(folder / "tp1_attention.csv", "prefill_chunk kv_prefill n_decode kv_decode time_us", rows[1:])
    return [str(folder)]


def aiconfigurator(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    gemm = [
        ("bfloat16", m, n, k, n * k * (2 / 3e9 + m * 2 / 9e11))
        for m, n, k in itertools.product((1, 64, 16384), (1024, 130_000), (2048, 16384))
    ]
    _csv(folder / "h100_sxm_vllm0.24.0_gemm.csv", "gemm_dtype m n k latency_ms", gemm)
    header = "batch_size isl step num_heads num_key_value_heads kv_cache_dtype latency_ms"
    shape = (32, 8, "bfloat16")
    context = [(1, n, 0, *shape, 0.01 + n * n * 2e-8) for n in (16, 1024, 8192)]
    _csv(folder / "h100_sxm_vllm0.24.0_context_attention_hd128.csv", header, context)
    generation = [(n, 1, kv, *shape, 0.01 + n * kv * 2e-6) for n in (1, 64) for kv in (15, 1023)]
    _csv(folder / "h100_sxm_vllm0.24.0_generation_attention_hd128.csv", header, generation)
    reduced = [(2, size, "vllm_graph", 0.005 + size * 1e-8) for size in (128, 10**7)]
    _csv(folder / "h100_sxm_vllm0.24.0_custom_allreduce.csv", "num_gpus message_size backend latency", reduced)
    (folder / "h100_sxm_system.yaml").write_text(
        "gpu: {mem_bw: 3.35e+12, mem_bw_empirical_scaling_factor: 0.8, mem_empirical_constant_latency: 3.0e-6}"
    )
    return [str(folder), "--model", "llama-3.1-8b"]


def aiconfigurator_package(folder: Path) -> None:
    """The same tables as `aiconfigurator` writes to `folder / "csv"`, laid out as the package installs them."""
    aiconfigurator(folder / "csv")
    systems = folder / "aiconfigurator_core" / "systems"
    systems.mkdir(parents=True)
    (folder / "csv" / "h100_sxm_system.yaml").rename(systems / "h100_sxm.yaml")
    for table, family, head_dim in (
        ("gemm", "gemm", None),
        ("context_attention", "attention", 128),
        ("generation_attention", "attention", 128),
        ("custom_allreduce", "comm", None),
    ):
        rows = pd.read_csv(next((folder / "csv").glob(f"*_{table}*.csv"))).rename(columns={"latency_ms": "latency"})
        if head_dim is not None:
            others = [rows.assign(head_dim=64, window_size=0), rows.assign(head_dim=128, window_size=128)]
            wrong = pd.concat(others).assign(latency=1e3)
            rows = pd.concat([wrong, rows.assign(head_dim=128, window_size=0)])
        for version, factor in (("0.24.0", 1.0), ("0.9.0", 50.0)):
            own = systems / "data" / "h100_sxm" / family / "vllm" / version
            own.mkdir(parents=True, exist_ok=True)
            rows.assign(latency=rows["latency"] * factor).to_parquet(own / f"{table}_perf.parquet")
    info = folder / "aiconfigurator_core-9.8.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aiconfigurator-core\nVersion: 9.8.7\n")


def vidur(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    medians = " ".join(f"time_stats.{name}.median" for name in LAYER_OPERATORS)
    mlp = [(n, 2, 4096, 11008, 32, *[0.01 + n * 1e-4] * len(LAYER_OPERATORS)) for n in (1, 64, 4096)]
    header = f"num_tokens num_tensor_parallel_workers n_embd n_expanded_embd n_head {medians}"
    _csv(folder / "a100_mlp.csv", header, mlp)
    kernels = "attn_decode attn_prefill attn_output_reshape"
    medians = " ".join(f"time_stats.{name}.median" for name in kernels.split())
    header = "n_embd n_q_head n_kv_head num_tensor_parallel_workers batch_size prefill_chunk_size kv_cache_size "
    shape = (4096, 32, 32, 2)
    rows = [(*shape, n, 0, kv, False, 0.01 + n * kv * 5e-6, "", 0.001) for n in (1, 8) for kv in (32, 1024)]
    rows += [(*shape, 1, c, kv, True, "", 0.01 + c * (c + kv) * 1e-7, 0.001) for c in (64, 1024) for kv in (0, 64)]
    _csv(folder / "a100_attention.csv", f"{header} is_prefill {medians}", rows)
    reduced = [(2, 2, size, 0.01 + size * 1e-8) for size in (2048, 10**7)]
    _csv(folder / "net.csv", "num_workers devices_per_node size time_stats.all_reduce.median", reduced)
    parts = ("prepare_inputs_e2e", "sampler_e2e", "model_execution_launch")
    header = "batch_size tensor_parallel_degree " + " ".join(f"{part}_median" for part in parts)
    _csv(folder / "cpu.csv", header, [(n, 2, *[0.1 + 0.01 * n] * 3) for n in (1, 8, 64)])
    files = [str(folder / name) for name in ("a100_mlp.csv", "a100_attention.csv", "net.csv")]
    return [*files, "--model", "llama-2-7b", "--tp", "2", "--host-from", str(folder / "cpu.csv")]


def splitwise(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    points = [(p, 1, 128) for p in (128, 512, 2048)] + [(512, n, 128) for n in (2, 8, 32)]
    rows = [
        ("llama2-70b", "a100-80gb", p, n, out, 40 + 0.1 * p * n + 1e-5 * n * p * (p + 1) / 2, 40 + 0.5 * n, 8)
        for p, n, out in points
    ]
    header = "model hardware prompt_size batch_size token_size prompt_time token_time tensor_parallel"
    _csv(folder / "perf_model.csv", header, rows)
    return [str(folder / "perf_model.csv")]


def vtc(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    profile = {
        str(prompt): {
            str(output): [
                n := 10_000 // (prompt + output),
                0.02 / n + 2e-4 * prompt,
                (output - 1) * (0.02 / n + 2e-4 + 1e-6 * (prompt + output / 2)) + 1e-6,
            ]
            for output in (1, 64, 256)
        }
        for prompt in (8, 128, 512)
    }
    (folder / "cost_profile.json").write_text(json.dumps(profile, indent=1))
    return [str(folder / "cost_profile.json")]


def distserve(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    own = {
        "decoding_large_small_bs_threshold": 95,
        "prefill": [18.0, 0.1, 7e-6],
        "decoding_smallbs": [20.0, 6e-4, 0.04],
        "decoding_largebs": [7.0, 5e-4, 0.16],
    }
    (folder / "coefficients.json").write_text(json.dumps({"distserve": {"1": own}}, indent=1))
    return [str(folder / "coefficients.json")]


def _csv(path: Path, header: str, rows: list[tuple[object, ...]]) -> None:
    lines = [",".join(map(str, row)) for row in (header.split(), *rows)]
    path.write_text("\n".join(lines) + "\n")
