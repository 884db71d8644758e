"""The arithmetic behind a scenario, without a run: memory, KV, how many requests fit, what a step costs at least."""

from __future__ import annotations

from typing import Any

from sim.build import replica
from sim.kv.memory import max_concurrent
from sim.scenario import Scenario

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def explain(scenario: Scenario) -> dict[str, Any]:
    """Every term from the GPU's memory to the requests that its KV pool holds. Raises what `sim.build` raises."""
    parts = replica(scenario)
    memory, model, gpu = parts.memory, parts.target.model, parts.target.gpu
    lengths = [length for length in _LENGTHS if length < memory.max_model_len] + [memory.max_model_len]
    return {
        "model": model.name,
        "num_parameters": model.num_parameters,
        "gpu": gpu.name,
        "tensor_parallel": parts.target.tensor_parallel,
        "terms": [{"term": label, "bytes": num_bytes} for label, num_bytes in memory.lines],
        "available_bytes": memory.available_bytes,
        "num_gpu_blocks_from": memory.source.value,
        "num_gpu_blocks": memory.num_gpu_blocks,
        "block_size": memory.block_size,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "block_bytes": memory.block_bytes,
        "kv_bytes": memory.kv_bytes,
        "max_model_len": memory.max_model_len,
        "max_concurrency_at_max_model_len": memory.max_concurrency,
        "requests_that_fit": [
            {"tokens_each": length, "requests": max_concurrent(memory.num_gpu_blocks, length, memory.block_size)}
            for length in lengths
        ],
    }
