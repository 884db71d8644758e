import dataclasses

import pytest

from sim.errors import ScenarioError
from sim.gpu import load_gpu
from sim.kv.memory import GIB, KVSource, activation_bytes_per_token, derive_kv_memory, kv_dtype_bytes, max_concurrent
from sim.model import load_model
from sim.policies.base import EngineOptions

LLAMA_8B = load_model("llama-3.1-8b")


def derive(gpu="rtx-3090", model=LLAMA_8B, tensor_parallel=1, num_tokens=2048, num_seqs=256, **options):
    return derive_kv_memory(
        model,
        load_gpu(gpu),
        tensor_parallel,
        EngineOptions(policy="vllm-v1", **options),
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_seqs,
    )


def error_of(**arguments):
    with pytest.raises(ScenarioError) as error:
        derive(**arguments)
    return str(error.value)


def test_concurrency_that_vllm_printed_for_3_81_gib():
    """vllm#10517: 3.81 GiB are 1952 blocks and 1.56 requests of 20,000 tokens."""
    memory = derive(max_model_len=20000, kv_cache_memory_bytes=round(3.81 * GIB))
    assert memory.num_gpu_blocks == pytest.approx(1952, abs=2)
    assert round(memory.max_concurrency, 2) == 1.56
    assert memory.source == KVSource.KV_CACHE_MEMORY_BYTES


def test_too_long_a_context_is_refused_with_the_longest_that_fits():
    """vllm#10517: with 1478 blocks vLLM refuses 29,000 tokens."""
    message = error_of(max_model_len=29000, kv_cache_memory_bytes=1478 * 16 * 131072)
    assert message == (
        "engine.max_model_len: 29000 tokens need 3.54 GiB of KV per GPU, there is 2.89 GiB; the largest max_model_len "
        "that fits is 23648. Lower max_model_len, or raise gpu_memory_utilization or tensor_parallel."
    )
    assert derive(max_model_len=23648, kv_cache_memory_bytes=1478 * 16 * 131072).max_concurrency == 1


def test_less_than_one_block():
    message = error_of(max_model_len=10, kv_cache_memory_bytes=1000)
    assert message == (
        "engine.max_model_len: 10 tokens need 0.00 GiB of KV per GPU, there is 0.00 GiB; not even one block fits. "
        "Lower max_model_len, or raise gpu_memory_utilization or tensor_parallel."
    )


def test_requests_of_one_length_that_a_server_holds():
    """vllm#8031: 4.61 requests of 8192 tokens are about 47 of 800."""
    assert max_concurrent(int(4.61 * 8192 / 16), 800, 16) == 47


def test_the_derivation_term_by_term():
    memory = derive(max_model_len=8192)
    lines = dict(memory.lines)
    assert lines == {
        "memory of one rtx-3090": 25436943811,
        "left to others (gpu_memory_utilization 0.9)": int(25436943811 * 0.9) - 25436943811,
        "weights of llama-3.1-8b": -16060522496,
        "activations of 2048 tokens": -2048 * 110592,
        "logits of 256 rows": -256 * 128256 * 6,
        "CUDA context and libraries": -round(0.3 * GIB),
        "CUDA graphs": -round(0.45 * GIB),
    }
    assert memory.num_gpu_blocks == sum(lines.values()) // (16 * 131072)
    assert memory.kv_bytes == memory.num_gpu_blocks * 16 * 131072 <= memory.available_bytes
    assert (memory.source, memory.block_bytes) == (KVSource.DERIVED, 2 * 2**20)


def test_the_derivation_comes_close_to_a_recorded_run():
    """A vLLM 0.19 run with Llama-3.1-8B on a 4090 had 2588 blocks (LLMServingSim, casys-kaist, MIT)."""
    assert derive("rtx-4090", max_model_len=32768).num_gpu_blocks == pytest.approx(2588, rel=0.01)


def test_more_tokens_in_a_pass_cost_kv_as_vllm_logged_it():
    """vllm#10517: 3.81 GiB of KV with 20,000 tokens in the pass, 2.89 GiB with 29,000."""
    bytes_20k, bytes_29k = (derive(num_tokens=tokens, max_model_len=2048).available_bytes for tokens in (20000, 29000))
    assert (bytes_20k - bytes_29k) / GIB == pytest.approx(0.92, abs=0.01)


def test_tensor_parallel_splits_weights_and_kv_and_adds_nccl():
    memory = derive("h100-sxm", load_model("llama-3.1-70b"), tensor_parallel=4, max_model_len=8192)
    lines = dict(memory.lines)
    assert lines["weights of llama-3.1-70b / 4"] == -load_model("llama-3.1-70b").weight_bytes(4)
    assert lines["NCCL buffers"] == -392 * 2**20
    assert memory.kv_bytes_per_token == 327680 // 4


def test_a_model_that_does_not_fit_says_by_how_much():
    assert error_of(gpu="h100-sxm", model=load_model("llama-3.1-70b")) == (
        "hardware.gpu: llama-3.1-70b does not fit h100-sxm: weights 131.42 GiB, activations and overhead 1.36 GiB, "
        "usable 71.20 GiB, so 61.57 GiB too much before any KV. Raise tensor_parallel or gpu_memory_utilization, "
        "lower max_num_batched_tokens, or take a larger GPU."
    )


def test_given_blocks_are_taken_as_they_are():
    memory = derive(model=load_model("llama-3.1-70b"), num_gpu_blocks=100)
    assert (memory.source, memory.num_gpu_blocks, memory.kv_bytes) == (KVSource.NUM_GPU_BLOCKS, 100, 100 * 16 * 327680)
    assert memory.max_model_len == 131072
    assert memory.available_bytes < 0


def test_blocks_and_bytes_together_are_an_error():
    assert error_of(num_gpu_blocks=100, kv_cache_memory_bytes=10**9) == (
        "engine.kv_cache_memory_bytes: given together with num_gpu_blocks 100. Give one of them."
    )


def test_the_model_bounds_the_context():
    assert error_of(max_model_len=131073) == (
        "engine.max_model_len: 131073 is more than llama-3.1-8b supports; at most 131072."
    )


def test_fp8_kv_doubles_the_blocks():
    half, full = (derive(max_model_len=8192, kv_cache_dtype=dtype).num_gpu_blocks for dtype in ("auto", "fp8"))
    assert full in (2 * half, 2 * half + 1)
    assert [kv_dtype_bytes(LLAMA_8B, dtype) for dtype in ("auto", "bf16", "fp16", "fp8")] == [2, 2, 2, 1]


def test_experts_and_latents_need_memory_of_their_own():
    """Two workspaces of a row per token and expert; latents of 65,536 tokens and what 16 heads make of them."""
    memory = derive("h100-sxm", load_model("deepseek-v2-lite"), max_model_len=16384)
    lines = dict(memory.lines)
    # the dense layer's MLP needs more than the experts of the others: 6 · (2048 + 2816) + 2048
    assert lines["activations of 2048 tokens"] == -2048 * 2 * (3 * 2048 + max(3 * 10944, 6 * (2048 + 2816) + 2048))
    assert lines["expansion of latents in cache"] == -65536 * 2 * (512 + 64 + 16 * (128 + 128))
    assert memory.kv_bytes_per_token == 31104
    assert activation_bytes_per_token(load_model("mixtral-8x7b"), 2) == 2 * (4 * 4096 + 2 * (7168 + 14336))


def test_short_contexts_need_less_for_the_expansion_of_latents():
    memory = derive("h100-sxm", load_model("deepseek-v2-lite"), max_model_len=1024, num_seqs=100)
    assert dict(memory.lines)["expansion of latents in cache"] == -8192 * 2 * (512 + 64 + 16 * (128 + 128))


def test_contexts_beyond_a_window_of_all_layers_are_refused():
    model = load_model("mistral-7b-v0.1")
    assert derive("h100-sxm", model, max_model_len=4096).max_model_len == 4096
    message = (
        "engine.max_model_len: {} is more than the window that every layer of mistral-7b-v0.1 attends to, and freeing "
        "the KV behind a window is not modelled; at most 4096."
    )
    assert error_of(gpu="h100-sxm", model=model, max_model_len=4097) == message.format(4097)
    assert error_of(gpu="h100-sxm", model=model, num_gpu_blocks=99) == message.format(32768)
    mixed = dataclasses.replace(model, num_sliding_layers=16)
    assert derive("h100-sxm", mixed).max_model_len == 32768
