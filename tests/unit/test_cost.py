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
from sim.model import Model, load_model
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
TOY_GPU = Gpu("toy", 2**30, bandwidth_bytes_per_s=1e9, bf16_flops=10e9, fp8_flops=None, link_bytes_per_s=2e9, source="")
TOY_OPTIONS = RooflineOptions(
    gemm_compute_efficiency=1,
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


def toy_cost(tensor_parallel=1, kv_dtype_bytes=2.0, **options):
    options = TOY_OPTIONS.model_copy(update=options)
    return Roofline.build(options, Target(TOY_MODEL, TOY_GPU, tensor_parallel, kv_dtype_bytes))


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
    ["gemm_compute_efficiency", "attention_compute_efficiency", "memory_efficiency", "allreduce_efficiency"],
)
def test_every_efficiency_matters(option):
    target = dataclasses.replace(H100, tensor_parallel=2)
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
