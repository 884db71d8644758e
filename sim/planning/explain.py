"""The arithmetic behind a scenario, without a run: memory, KV, and how many requests fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sim.build import draw
from sim.kv.memory import KVMemory, max_concurrent
from sim.replica import replica
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
        "at_once": _at_once(scenario, memory),
        "host": scenario.cost.describe_host(),
    }


def _at_once(scenario: Scenario, memory: KVMemory) -> dict[str, Any]:
    """How many requests of the scenario's mean size run at once, by the KV pool and by slots, and which is less."""
    traffic = draw(scenario)
    output_tokens = np.minimum(traffic.output_tokens, traffic.max_tokens)
    tokens_each = math.ceil(float(np.mean(traffic.prompt_tokens + output_tokens)))
    by_kv = max_concurrent(memory.num_gpu_blocks, tokens_each, memory.block_size)
    key, slots = _slots(scenario, memory.max_model_len)
    binds = "kv" if slots is None or by_kv < slots else "slots"
    held = by_kv if slots is None else min(by_kv, slots)
    limit = f"{key} ({slots}; the KV cache would hold {by_kv:,})" if binds == "slots" else "the KV cache"
    if binds == "kv" and slots is not None:
        limit += f", below {key} {slots}"
    if scenario.fleet is not None:
        limit += f", on each of {scenario.fleet.replicas} replicas with a KV cache of its own"
    verdict = f"requests at once, {tokens_each:,} tokens each (the traffic's mean): {held:,}, by {limit}"
    return {"tokens_each": tokens_each, "by_kv": by_kv, "slots": slots, "binds": binds, "verdict": verdict}


def _slots(scenario: Scenario, max_model_len: int) -> tuple[str, int | None]:
    """The option that limits how many requests run at once, and its value; None: only memory does."""
    engine = scenario.engine
    for key in ("max_num_seqs", "max_batch_size"):
        if hasattr(engine, key):
            return key, getattr(engine, key) or engine.largest_pass(max_model_len)[1]
    return "", None
