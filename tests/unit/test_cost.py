import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.cost.base import Resource, Target, prefill_sums
from sim.cost.constant import Constant, ConstantOptions
from sim.cost.linear import Linear, LinearOptions
from sim.cost.roofline import Roofline, RooflineOptions
from sim.errors import ScenarioError
from sim.gpu import Gpu, load_gpu
from sim.model import Experts, LatentAttention, Model, Quantization, load_model
from sim.step import StepArrays, StepShape

H100 = Target(load_model("llama-3.1-8b"), load_gpu("h100-sxm"), 1, 2.0)
LINEAR = LinearOptions(
    base_ms=5.1,
    per_decode_us=3.3,
    per_prefill_token_us=17.7,
    per_context_token_ns=41.3,
    per_prefill_pair_ns=0.7,
    host_us=200,
    host_us_per_request=2.5,
)
MODELS = {
    "roofline": Roofline.build(RooflineOptions(), H100),
    "roofline, 70B on 4": Roofline.build(
        RooflineOptions(), Target(load_model("llama-3.1-70b"), load_gpu("a100-sxm-80gb"), 4, 1.0)
    ),
    "roofline, experts": Roofline.build(RooflineOptions(), dataclasses.replace(H100, model=load_model("mixtral-8x7b"))),
    "roofline, latent attention and experts in fp8": Roofline.build(
        RooflineOptions(), Target(load_model("deepseek-v3"), load_gpu("h200-sxm"), 8, 1.0)
    ),
    "roofline, a window in some layers": Roofline.build(
        RooflineOptions(),
        dataclasses.replace(
            H100, model=dataclasses.replace(load_model("mistral-7b-v0.1"), num_sliding_layers=20, sliding_window=4096)
        ),
    ),
    "roofline, 4-bit weights": Roofline.build(
        RooflineOptions(), Target(load_model("qwen2.5-32b-awq"), load_gpu("a100-sxm-80gb"), 2, 2.0)
    ),
    "linear": Linear.build(LINEAR, H100),
    "constant": Constant.build(ConstantOptions(step_ms=7.5), H100),
}
every_model = pytest.mark.parametrize("name", MODELS)

# one thousandth of a byte and of a FLOP per ns make round figures
TOY_MODEL = Model(
    name="toy",
    num_hidden_layers=2,
    hidden_size=8,
    intermediate_size=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    vocab_size=10,
    tie_word_embeddings=False,
    dtype_bytes=2,
    max_position_embeddings=64,
    source="made up",
)
TOY_GPU = Gpu(
    "toy",
    2**30,
    bandwidth_bytes_per_s=1e9,
    bf16_flops=10e9,
    fp8_flops=None,
    link_bytes_per_s=2e9,
    host_link_bytes_per_s=1e9,
    source="",
)
TOY_OPTIONS = RooflineOptions(
    gemm_compute_efficiency=1,
    expert_compute_efficiency=1,
    attention_compute_efficiency=1,
    memory_efficiency=1,
    allreduce_efficiency=1,
    allreduce_latency_us=1,
    layer_overhead_us=10,
    step_overhead_us=100,
)


@st.composite
def decodes(draw):
    contexts = draw(st.lists(st.integers(1, 200_000), max_size=8))
    num_more = draw(st.integers(0, 1000)) if contexts else 0
    contexts += contexts[:1] * num_more
    return {
        "num_decode": len(contexts),
        "decode_context_sum": sum(contexts),
        "decode_context_sum_sq": sum(context**2 for context in contexts),
        "decode_context_max": max(contexts, default=0),
    }


@st.composite
def shapes(draw):
    prefills = draw(st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 200_000)), max_size=4))
    fields = draw(decodes())
    num_sampled = fields["num_decode"] + draw(st.integers(0, len(prefills)))
    return StepShape(**fields, prefills=tuple(prefills), num_sampled=num_sampled)


def as_arrays(shapes):
    def column(values):
        return np.array(list(values), dtype=np.int64)

    chunks = [(i, *chunk) for i, shape in enumerate(shapes) for chunk in shape.prefills]
    return StepArrays(
        num_decode=column(shape.num_decode for shape in shapes),
        decode_context_sum=column(shape.decode_context_sum for shape in shapes),
        decode_context_sum_sq=column(shape.decode_context_sum_sq for shape in shapes),
        decode_context_max=column(shape.decode_context_max for shape in shapes),
        num_sampled=column(shape.num_sampled for shape in shapes),
        num_padding_tokens=column(shape.num_padding_tokens for shape in shapes),
        num_swapped_blocks=column(shape.num_swapped_blocks for shape in shapes),
        num_new_requests=column(shape.num_new_requests for shape in shapes),
        prefill_iteration=column(i for i, _, _ in chunks),
        prefill_num_tokens=column(num_tokens for _, num_tokens, _ in chunks),
        prefill_context=column(context for _, _, context in chunks),
    )


def test_pairs_are_those_of_the_causal_mask():
    brute = sum(1 for query in range(3) for key in range(5 + 3) if key <= 5 + query)
    assert prefill_sums(((3, 5), (2, 0))) == (5, brute + 3, 8 + 2)


@every_model
@given(shape=shapes())
def test_prices_are_whole_nanoseconds_above_zero(name, shape):
    price, host = MODELS[name].price(shape), MODELS[name].host_ns(shape)
    assert (type(price), type(host)) == (int, int)
    assert price >= 1
    assert host >= 0


@every_model
@given(shape=shapes(), data=st.data())
def test_more_never_costs_less(name, shape, data):
    more = data.draw(st.sampled_from(["decode", "context", "sampled", "chunk", "longer chunk", "deeper chunk"]))
    amount = data.draw(st.integers(1, 1000))
    prefills = shape.prefills or ((1, 0),)
    (num_tokens, context), rest = prefills[0], prefills[1:]
    shape = shape._replace(prefills=prefills)
    larger = {
        "decode": shape._replace(num_decode=shape.num_decode + amount),
        "context": shape._replace(decode_context_sum=shape.decode_context_sum + amount),
        "sampled": shape._replace(num_sampled=shape.num_sampled + amount),
        "chunk": shape._replace(prefills=(*prefills, (amount, 0))),
        "longer chunk": shape._replace(prefills=((num_tokens + amount, context), *rest)),
        "deeper chunk": shape._replace(prefills=((num_tokens, context + amount), *rest)),
    }[more]
    model = MODELS[name]
    assert model.price(larger) >= model.price(shape)
    assert model.host_ns(larger) >= model.host_ns(shape)


@every_model
@given(fields=decodes(), num_steps=st.integers(1, 40))
def test_a_run_of_decodes_costs_what_its_steps_cost(name, fields, num_steps):
    first = StepShape(**fields, num_sampled=fields["num_decode"])
    expected = [
        MODELS[name].price(first._replace(decode_context_sum=first.decode_context_sum + i * first.num_decode))
        for i in range(num_steps)
    ]
    run = MODELS[name].price_decode_run(first, num_steps)
    assert (run.dtype, run.tolist()) == (np.int64, expected)


@every_model
@settings(max_examples=50)
@given(steps=st.lists(shapes(), max_size=5))
def test_the_breakdown_adds_up_to_the_prices(name, steps):
    parts = MODELS[name].breakdown(as_arrays(steps))
    assert list(parts) == list(Resource)
    assert all((part >= 0).all() for part in parts.values())
    prices = np.array([MODELS[name].price(shape) for shape in steps], dtype=float)
    np.testing.assert_allclose(sum(parts.values()), prices, rtol=1e-12, atol=1.0)


def toy_cost(tensor_parallel=1, kv_dtype_bytes=2.0, gpu=TOY_GPU, **changes):
    model = dataclasses.replace(TOY_MODEL, **changes)
    return Roofline.build(TOY_OPTIONS, Target(model, gpu, tensor_parallel, kv_dtype_bytes))


def test_a_decode_step_by_hand():
    # 1 byte/ns, 10 FLOP/ns; everything is bound by memory.
    qkv = 2 * 2 * (128 + 3 * (8 + 16))  # layers, bytes; weights and, for each of 3 rows, inputs and outputs
    o = 2 * 2 * (64 + 3 * (8 + 8))
    mlp = 2 * 2 * (288 + 3 * (8 + 24 + 12 + 8))
    lm_head = 2 * (80 + 3 * (8 + 10))
    elementwise = 2 * 2 * 3 * (8 * 8 + 24 + 12)
    kv = (2 * 2 * 2 * 2 * 2) * (20 + 3)  # K and V, layers, heads, elements, bytes; contexts and the rows themselves
    memory = qkv + o + mlp + lm_head + elementwise + kv
    shape = StepShape(num_decode=3, decode_context_sum=20, num_sampled=3)
    assert toy_cost().price(shape) == 100_000 + 2 * 10_000 + memory
    parts = toy_cost().breakdown(as_arrays([shape]))
    assert {resource.value: part.tolist() for resource, part in parts.items()} == {
        "compute": [0],
        "bandwidth": [pytest.approx(memory)],
        "communication": [0],
        "overhead": [120_000],
    }


def test_a_prefill_step_by_hand():
    # a GPU that computes at 0.001 FLOP/ns: every product and the attention are bound by compute
    slow = dataclasses.replace(TOY_GPU, bf16_flops=1e6)
    cost = Roofline.build(TOY_OPTIONS, Target(TOY_MODEL, slow, 1, 2.0))
    flops = 2 * 2 * 5 * (128 + 64 + 288)  # two per parameter and token, layers
    flops += 2 * 80  # one sampled row
    flops += 2 * 4 * (4 * 2) * (5 * 3 + 15)  # layers, FLOPs per pair and element, elements, pairs
    elementwise = 2 * 2 * 5 * (8 * 8 + 24 + 12)
    assert cost.price(StepShape(prefills=((5, 3),), num_sampled=1)) == 120_000 + flops * 1000 + elementwise


def test_a_chunk_that_samples_nothing_has_no_lm_head():
    last, inner = (toy_cost().price(StepShape(prefills=((5, 3),), num_sampled=rows)) for rows in (1, 0))
    assert last - inner == 2 * (80 + 8 + 10)


def test_tensor_parallel_halves_the_work_and_adds_all_reduces():
    shape = StepShape(num_decode=3, decode_context_sum=20, num_sampled=3)
    parts = toy_cost(tensor_parallel=2).breakdown(as_arrays([shape]))
    # two per layer: 1 us, and each GPU sends 2(2 - 1)/2 of 3 rows of 8 elements at 2 bytes/ns
    assert parts[Resource.COMMUNICATION].tolist() == [pytest.approx(4 * (1000 + 3 * 8 * 2 / 2))]
    qkv, o = 2 * 2 * (64 + 3 * (8 + 8)), 2 * 2 * (32 + 3 * (4 + 8))
    mlp, lm_head = 2 * 2 * (144 + 3 * (8 + 12 + 6 + 8)), 2 * (40 + 3 * (8 + 5))
    elementwise, kv = 2 * 2 * 3 * (8 * 8 + 12 + 6), 16 * 23
    assert parts[Resource.BANDWIDTH].tolist() == [pytest.approx(qkv + o + mlp + lm_head + elementwise + kv)]


def test_fp8_kv_halves_its_reads():
    shape = StepShape(num_decode=3, decode_context_sum=20, num_sampled=3)
    assert toy_cost().price(shape) - toy_cost(kv_dtype_bytes=1.0).price(shape) == 16 * 23


@pytest.mark.parametrize(
    "option",
    [
        "gemm_compute_efficiency",
        "expert_compute_efficiency",
        "attention_compute_efficiency",
        "memory_efficiency",
        "allreduce_efficiency",
    ],
)
def test_every_efficiency_matters(option):
    target = dataclasses.replace(H100, model=load_model("mixtral-8x7b"), tensor_parallel=2)
    shape = StepShape(num_decode=8, decode_context_sum=8000, prefills=((2048, 0),), num_sampled=9)
    worse = RooflineOptions.model_validate({option: 0.1})
    assert Roofline.build(worse, target).price(shape) > Roofline.build(RooflineOptions(), target).price(shape)


def test_heads_that_do_not_split_are_refused():
    with pytest.raises(ScenarioError, match=r"^hardware\.tensor_parallel: 3 does not divide the 32 attention heads"):
        Roofline.build(RooflineOptions(), dataclasses.replace(H100, tensor_parallel=3))


def test_a_lone_decode_on_an_h100_is_the_time_to_read_the_weights():
    """15 GB of weights (embeddings are looked up, not read) at 3.35 TB/s: 4.5 ms at the peak; real kernels 6 to 7."""
    price_ms = MODELS["roofline"].price(StepShape(1, 500, 500**2, 500, (), 1)) / 1e6
    assert 15.0e9 / 3.35e12 * 1e3 < price_ms < 7.2


def test_a_prefill_on_an_h100_is_bound_by_its_flops():
    """2 FLOPs per parameter and token: 2048 tokens are 31 ms at the peak; MFU of real prefill is 0.6 to 0.8."""
    steps = [StepShape(prefills=((2048, 0),), num_sampled=1)]
    price_ms = MODELS["roofline"].price(steps[0]) / 1e6
    floor_ms = 2 * 7.5e9 * 2048 / 989e12 * 1e3
    assert floor_ms / 0.8 < price_ms < floor_ms / 0.6
    parts = MODELS["roofline"].breakdown(as_arrays(steps))
    assert max(parts, key=lambda resource: parts[resource][0]) == Resource.COMPUTE


THREE_DECODES = StepShape(num_decode=3, decode_context_sum=20, num_sampled=3)
SLOW_GPU = dataclasses.replace(TOY_GPU, bf16_flops=1e6, fp8_flops=4e6)
"""Computes at 0.001 FLOP/ns, 0.004 in fp8: every product and the attention are bound by compute."""


def test_a_batch_reads_the_experts_that_it_is_expected_to_touch():
    experts = Experts(num_layers=1, num_experts=4, num_experts_per_tok=2, intermediate_size=6)
    dense, cost = toy_cost(), toy_cost(experts=experts)
    # layers, bytes; one of the two layers trades its MLP for the router and the experts
    mlp, activation = 2 * (288 + 3 * (8 + 24 + 12 + 8)), 2 * 3 * (24 + 12)
    router = 2 * (8 * 4 + 3 * (8 + 4))
    touched = 4 * (1 - (1 - 2 / 4) ** 3)
    read = 2 * (touched * 3 * 8 * 6 + 3 * 2 * (8 + 12 + 6 + 8))
    expected = router + read + 2 * 3 * 2 * (12 + 6) - mlp - activation
    assert cost.price(THREE_DECODES) - dense.price(THREE_DECODES) == expected
    shared = dataclasses.replace(experts, shared_intermediate_size=5)
    assert toy_cost(experts=shared).price(THREE_DECODES) - cost.price(THREE_DECODES) == 2 * (
        3 * 8 * 5 + 3 * (8 + 10 + 5 + 8) + 3 * (10 + 5)
    )


def test_expected_experts_are_those_of_a_simulation():
    experts = Experts(num_layers=1, num_experts=16, num_experts_per_tok=3, intermediate_size=6)
    rng = np.random.default_rng(0)
    choices = rng.permuted(np.broadcast_to(np.arange(16), (4000, 7, 16)), axis=2)[:, :, :3].reshape(4000, 21)
    touched = [len(set(batch)) for batch in choices.tolist()]
    assert np.mean(touched) == pytest.approx(16 - 16 * experts.missed**7, abs=4 * np.std(touched) / 4000**0.5)


def test_experts_compute_only_what_is_routed_to_them():
    experts = Experts(num_layers=2, num_experts=4, num_experts_per_tok=2, intermediate_size=6)
    one, two = (
        toy_cost(gpu=SLOW_GPU, experts=dataclasses.replace(experts, num_experts_per_tok=times)) for times in (1, 2)
    )
    # layers, FLOPs per parameter, tokens, ns per FLOP; and the activation between the products
    assert two.price(THREE_DECODES) - one.price(THREE_DECODES) == 2 * 2 * 3 * (3 * 8 * 6) * 1000 + 2 * 2 * 3 * (12 + 6)


LATENT = LatentAttention(kv_lora_rank=16, qk_rope_head_dim=3, qk_nope_head_dim=5, v_head_dim=7)


def attention_ns(shape, gpu=TOY_GPU, **changes):
    """Of latent attention with its products: what is left of a step when all else is taken away."""
    rest = 100_000 + 2 * 10_000
    num_tokens, is_slow = shape.num_decode + shape.prefill_tokens, gpu is SLOW_GPU
    if is_slow:
        rest += 1000 * (2 * 2 * num_tokens * 288 + 2 * shape.num_sampled * 80)
    else:
        rest += 2 * 2 * (288 + num_tokens * (8 + 24 + 12 + 8))
        rest += 2 * (80 + shape.num_sampled * (8 + 10)) if shape.num_sampled else 0
    rest += 2 * 2 * num_tokens * (8 * 8 + 24 + 12)
    return toy_cost(gpu=gpu, latent=LATENT, **changes).price(shape) - rest


def test_decodes_attend_to_latents():
    q_kv, o = 8 * 4 * (5 + 3) + 8 * 19, 4 * 7 * 8
    absorbed = 16 * 4 * (5 + 7)
    rows = 3 * ((8 + 32 + 19) + (28 + 8) + 4 * (5 + 16) + 4 * (16 + 7))
    cache = 19 * (20 + 3)
    assert attention_ns(THREE_DECODES) == 2 * 2 * (q_kv + o + absorbed + rows + cache)
    pairs = 4 * 2 * (19 + 16) * (20 + 3)  # heads, FLOPs per element: scores over 19, values over 16
    assert attention_ns(THREE_DECODES, SLOW_GPU) == 2 * 1000 * (2 * 3 * (q_kv + o + absorbed) + pairs)


def test_prefills_expand_all_latents_that_they_attend_to():
    chunk = StepShape(prefills=((5, 3),))
    q_kv, o = 8 * 4 * (5 + 3) + 8 * 19, 4 * 7 * 8
    expansion = 16 * 4 * (5 + 7)
    rows = 5 * ((8 + 32 + 19) + (28 + 8)) + (5 + 3) * (19 + 4 * (8 + 7))
    keys_and_values = (5 + 3) * 4 * (8 + 7)
    assert attention_ns(chunk) == 2 * 2 * (q_kv + o + expansion + rows + keys_and_values)
    pairs = 4 * 2 * (8 + 7) * (5 * 3 + 15)
    assert attention_ns(chunk, SLOW_GPU) == 2 * 1000 * (2 * 5 * (q_kv + o) + 2 * 8 * expansion + pairs)


def test_latents_are_read_on_every_gpu():
    one, two = (toy_cost(tensor_parallel=tp, latent=LATENT) for tp in (1, 2))
    deeper = THREE_DECODES._replace(decode_context_sum=1020)
    assert [cost.price(deeper) - cost.price(THREE_DECODES) for cost in (one, two)] == [2 * 2 * 19 * 1000] * 2


def test_a_window_bounds_what_prefills_and_decodes_read():
    full, mixed = toy_cost(), toy_cost(sliding_window=6, num_sliding_layers=1)
    token = 2 * 2 * 2 * 2  # K and V, heads, elements, bytes of one layer
    within = THREE_DECODES._replace(decode_context_sum=15)
    assert mixed.price(within) == full.price(within)
    assert full.price(THREE_DECODES) - mixed.price(THREE_DECODES) == token * (23 - 3 * 6)
    chunk = StepShape(prefills=((4, 3), (2, 40)))
    assert full.price(chunk) - mixed.price(chunk) == token * (7 + 42 - 7 - (5 + 2))
    full, mixed = (toy_cost(gpu=SLOW_GPU, **change) for change in ({}, {"sliding_window": 6, "num_sliding_layers": 1}))
    pairs = sum(query + 1 for query in range(3, 7)) + 41 + 42
    windowed = sum(min(query + 1, 6) for query in range(3, 7)) + 6 + 6
    assert full.price(chunk) - mixed.price(chunk) == 4 * (4 * 2) * (pairs - windowed) * 1000


@given(contexts=st.lists(st.integers(1, 20_000), min_size=1, max_size=20))
def test_a_window_over_decodes_is_never_too_little(contexts):
    cost = MODELS["roofline, a window in some layers"]
    together = StepShape(num_decode=len(contexts), decode_context_sum=sum(contexts), num_sampled=len(contexts))
    within = together._replace(decode_context_sum=sum(min(context, 4095) for context in contexts))
    deeper = (sum(contexts) - within.decode_context_sum) * cost._decode_kv_token_ns
    exact = cost.price(within) + deeper
    assert cost.price(together) >= exact - 1
    if max(contexts) < 4096 or min(contexts) >= 4096:
        assert cost.price(together) == pytest.approx(exact, abs=1)


def test_weights_in_few_bits_save_bytes():
    packed = Quantization("awq", weight_bits=4.5)
    plain, fewer = toy_cost().price(THREE_DECODES), toy_cost(quantization=packed).price(THREE_DECODES)
    assert plain - fewer == 2 * (2 - 4.5 / 8) * (128 + 64 + 288)  # the LM head stays
    assert toy_cost(gpu=SLOW_GPU, quantization=packed).price(THREE_DECODES) == toy_cost(gpu=SLOW_GPU).price(
        THREE_DECODES
    )


@pytest.mark.parametrize(("fp8_flops", "times"), [(4e6, 1 - 1 / 4), (None, 0)])
def test_fp8_activations_compute_at_the_fp8_peak_where_there_is_one(fp8_flops, times):
    gpu = dataclasses.replace(SLOW_GPU, fp8_flops=fp8_flops)
    fp8 = Quantization("fp8", weight_bits=8.0, has_fp8_activations=True)
    saved = toy_cost(gpu=gpu).price(THREE_DECODES) - toy_cost(gpu=gpu, quantization=fp8).price(THREE_DECODES)
    assert saved == times * 1000 * 2 * 2 * 3 * (128 + 64 + 288)


def test_linear_by_hand():
    shape = StepShape(num_decode=10, decode_context_sum=990, prefills=((4, 2),), num_sampled=11)
    cost = Linear.build(LINEAR, H100)
    assert cost.price(shape) == 5_100_000 + 33_000 + 4 * 17_700 + 41_300 + round(0.7 * 18)
    assert cost.host_ns(shape) == 200_000 + 11 * 2_500


def test_free_iterations_still_take_a_nanosecond():
    cost = Linear.build(LinearOptions(base_ms=0), H100)
    assert cost.price(StepShape(num_decode=1)) == 1
    assert cost.price_decode_run(StepShape(num_decode=1), 2).tolist() == [1, 1]
    assert Constant.build(ConstantOptions(step_ms=1e-9), H100).price(StepShape()) == 1


def test_constant():
    cost = Constant.build(ConstantOptions(step_ms=7.5, host_us=3), H100)
    assert (cost.price(StepShape(num_decode=99)), cost.host_ns(StepShape())) == (7_500_000, 3_000)
