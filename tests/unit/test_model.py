import json

import pytest

from sim.errors import ArtifactError, ScenarioError
from sim.model import Experts, LatentAttention, Quantization, Rows, load_model, models

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def load_config(tmp_path, config):
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return load_model(str(path))


def error_of(tmp_path, config):
    with pytest.raises(ArtifactError) as error:
        load_config(tmp_path, config)
    return str(error.value).replace(str(tmp_path), "DIR")


def shapes_of(model, tensor_parallel=1):
    """Layers, parameters of one copy and elements of a row, by the product's name."""
    return {
        product.name: (product.num_layers, product.parameters, product.row_elements)
        for product in model.products(tensor_parallel)
    }


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        # as stated by the checkpoints' safetensors indexes
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("opt-13b", 12_853_473_280),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("deepseek-v2-lite", 15_706_484_224),
    ],
)
def test_parameters_are_exact(name, num_parameters):
    model = load_model(name)
    assert (model.num_parameters, model.weight_bytes()) == (num_parameters, 2 * num_parameters)


@pytest.mark.parametrize(
    ("name", "kv_bytes_per_token"),
    [
        ("llama-2-7b", 524288),
        ("llama-2-13b", 819200),
        ("llama-3.1-8b", 131072),
        ("llama-3.1-70b", 327680),
        ("qwen2.5-72b", 327680),
        ("qwen2.5-7b", 57344),
        ("qwen2.5-14b", 196608),
        ("qwen2.5-32b", 262144),
        ("qwen3-8b", 147456),
        ("qwen3-14b", 163840),
        ("qwen3-30b-a3b", 98304),
        ("mixtral-8x7b", 131072),
        ("mistral-7b-v0.1", 131072),
        ("deepseek-v2-lite", 31104),
        ("deepseek-v3", 70272),
        ("qwen2.5-32b-awq", 262144),
    ],
)
def test_kv_per_token(name, kv_bytes_per_token):
    model = load_model(name)
    assert model.kv_bytes_per_token(2) == kv_bytes_per_token
    assert model.kv_bytes_per_token(1) == kv_bytes_per_token // 2


def test_tensor_parallel_splits_heads_and_replicates_few_of_them():
    model = load_model("qwen2.5-7b")
    assert [model.kv_bytes_per_token(2, tp) for tp in (1, 2, 4, 7)] == [57344, 28672, 14336, 14336]
    assert load_model("llama-3.1-8b").kv_bytes_per_token(2, 16) == 131072 // 8


def test_a_tiny_model_by_hand(tmp_path):
    model = load_config(tmp_path, TINY)
    assert (model.name, model.head_dim) == ("tiny", 2)
    assert shapes_of(model) == {
        # inputs times outputs; inputs and outputs of a row
        "qkv": (2, 8 * (4 + 2 * 2) * 2, 8 + 16),
        "o": (2, 4 * 2 * 8, 8 + 8),
        "mlp": (2, 3 * 8 * 12, 8 + 24 + 12 + 8),
        "lm_head": (1, 8 * 10, 8 + 10),
    }
    assert shapes_of(model, 2) == {
        "qkv": (2, 64, 8 + 8),
        "o": (2, 32, 4 + 8),
        "mlp": (2, 144, 8 + 12 + 6 + 8),
        "lm_head": (1, 40, 8 + 5),
    }
    # 2·480 in the layers, 2·80 in and out of the vocabulary, 5 norms of 8
    assert model.num_parameters == 960 + 160 + 40
    assert (model.weight_bytes(), model.weight_bytes(2)) == (2 * 1160, 2 * (480 + 80 + 40))


@pytest.mark.parametrize(
    ("change", "extra"),
    [
        ({"tie_word_embeddings": True}, -80),
        ({"attention_bias": True}, 2 * (16 + 8)),
        ({"mlp_bias": True}, 2 * (24 + 8)),
        ({"model_type": "qwen2"}, 2 * 16),
        ({"model_type": "qwen3"}, 2 * 4),
        ({"num_key_value_heads": None}, 2 * 64),
        ({"head_dim": 4}, 2 * (128 + 64)),
    ],
)
def test_every_field_counts(tmp_path, change, extra):
    assert load_config(tmp_path, {**TINY, **change}).num_parameters == 1160 + extra


def test_a_nested_text_config_is_the_model(tmp_path):
    nested = {"model_type": "llava", "text_config": TINY, "vision_config": {"hidden_size": 99}}
    assert load_config(tmp_path, nested) == load_config(tmp_path, TINY)


def test_a_folder_stands_for_its_config(tmp_path):
    model = load_config(tmp_path, TINY)
    assert load_model(str(tmp_path / "tiny")) == model


MIXTRAL = {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = {
    **TINY,
    "model_type": "qwen2_moe",
    "num_hidden_layers": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
}
LLAMA_4 = {
    **TINY,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 20,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
}
DEEPSEEK = {
    **TINY,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 3,
    "v_head_dim": 7,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [4, 4]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 4, "zero_point": True, "modules_to_not_convert": ["gate"]}


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (MIXTRAL, Experts(2, 4, 2, 12)),
        (QWEN_MOE, Experts(6, 4, 2, 6, 10, has_shared_gate=True)),
        ({**QWEN_MOE, "mlp_only_layers": [0, 5]}, Experts(4, 4, 2, 6, 10, has_shared_gate=True)),
        ({**QWEN_MOE, "decoder_sparse_step": 4}, Experts(1, 4, 2, 6, 10, has_shared_gate=True)),
        (LLAMA_4, Experts(2, 4, 1, 12, 12)),
        (DEEPSEEK, Experts(2, 4, 2, 6, 12, has_router_bias=True)),
        ({**DEEPSEEK, "moe_layer_freq": 2, "topk_method": "greedy"}, Experts(1, 4, 2, 6, 12)),
    ],
)
def test_which_layers_have_which_experts(tmp_path, config, experts):
    assert load_config(tmp_path, config).experts == experts


def test_a_mixture_of_experts_by_hand(tmp_path):
    model = load_config(tmp_path, {**QWEN_MOE, "mlp_only_layers": [0]})
    assert shapes_of(model, 2) == {
        "qkv": (6, 64, 16),
        "o": (6, 32, 12),
        "mlp": (1, 3 * 8 * 6, 2 * 8 + 3 * 6),
        "router": (5, 8 * (4 + 1), 8 + 5),  # whole on every GPU, with the gate of the shared experts
        "experts": (5, 3 * 8 * 3, 2 * 8 + 3 * 3),
        "shared experts": (5, 3 * 8 * 5, 2 * 8 + 3 * 5),
        "lm_head": (1, 40, 13),
    }
    assert {product.name: product.num_copies for product in model.products() if product.rows == Rows.ROUTED} == {
        "experts": 4
    }
    attention, mlp, experts = 6 * (128 + 64), 288, 5 * (40 + 4 * 144 + 240)
    vectors = 6 * (2 * 8 + 16) + 8
    assert model.num_parameters == attention + mlp + experts + 2 * 80 + vectors


def test_latent_attention_by_hand(tmp_path):
    model = load_config(tmp_path, DEEPSEEK)
    assert model.latent == LatentAttention(16, qk_rope_head_dim=3, qk_nope_head_dim=5, v_head_dim=7, q_lora_rank=20)
    attention = ("qkv", "o", "KV expansion", "absorbed KV expansion")
    shapes = shapes_of(model, 2)
    assert {name: shapes[name] for name in attention} == {
        # both compressions whole on every GPU, what follows for 2 of 4 heads
        "qkv": (3, 8 * 20 + 20 * 2 * (5 + 3) + 8 * (16 + 3), 8 + 2 * 20 + 2 * 8 + 19),
        "o": (3, 2 * 7 * 8, 2 * 7 + 8),
        "KV expansion": (3, 16 * 2 * (5 + 7), 19 + 2 * (8 + 7)),
        "absorbed KV expansion": (3, 16 * 2 * (5 + 7), 2 * (5 + 16) + 2 * (16 + 7)),
    }
    assert [model.kv_bytes_per_token(2, tp) for tp in (1, 2, 4)] == [3 * 19 * 2] * 3
    parameters = 3 * (8 * 20 + 20 * 32 + 8 * 19 + 4 * 7 * 8 + 16 * 4 * 12)  # the expansion once
    parameters += 288 + 2 * (32 + 4 * 144 + 288)
    vectors = 3 * (2 * 8 + 20 + 16) + 2 * 4 + 8
    assert model.num_parameters == parameters + 2 * 80 + vectors
    assert model.weight_bytes() == 2 * model.num_parameters
    plain = load_config(tmp_path, {**DEEPSEEK, "q_lora_rank": None})
    assert shapes_of(plain)["qkv"] == (3, 8 * 4 * 8 + 8 * 19, 8 + 32 + 19)


def test_deepseek_v3_counts_what_its_notes_state():
    """671B, or 685B with the module that predicts a second token, which serving does not load by default."""
    assert load_model("deepseek-v3").num_parameters == 671_026_419_200


@pytest.mark.parametrize(
    ("config", "quantization"),
    [
        (FP8, Quantization("fp8", 8 + 32 / 16, 4, has_fp8_activations=True)),
        ({"quant_method": "fp8"}, Quantization("fp8", 8.0, has_fp8_activations=True)),
        (AWQ, Quantization("awq", 4 + 20 / 4, 4)),
        ({"quant_method": "gptq", "bits": 8, "group_size": 4}, Quantization("gptq", 8 + 24 / 4, 4)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, Quantization("gptq", 4.0)),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
                    }
                },
                "ignore": ["lm_head", "re:.*mlp.gate$"],
            },
            Quantization("compressed-tensors", 8.0, has_fp8_activations=True),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 4, "type": "int", "group_size": 4, "symmetric": True},
                        "input_activations": None,
                    }
                },
            },
            Quantization("compressed-tensors", 4 + 16 / 4, 4),
        ),
    ],
)
def test_quantized_weights(tmp_path, config, quantization):
    model = load_config(tmp_path, {**TINY, "quantization_config": config})
    assert model.quantization == quantization
    # matrices of the layers; both vocabulary matrices and five norms stay in 16 bit
    assert model.weight_bytes() == 960 * quantization.weight_bits / 8 + 2 * (160 + 40)
    assert model.num_parameters == 1160


def test_what_a_quantized_checkpoint_keeps_in_16_bit(tmp_path):
    model = load_config(tmp_path, {**DEEPSEEK, "quantization_config": {"quant_method": "fp8"}})
    sixteen_bit = 2 * 32 + 2 * 80 + (3 * (2 * 8 + 20 + 16) + 2 * 4 + 8)  # routers, vocabulary, vectors
    absorbed = 3 * 16 * 4 * 12
    assert model.weight_bytes() == model.num_parameters + sixteen_bit + 2 * absorbed


def test_awq_weights_are_as_large_as_the_checkpoint():
    """Qwen2.5-32B-Instruct-AWQ has 19.3 GB of weights."""
    assert load_model("qwen2.5-32b-awq").weight_bytes() == pytest.approx(19.3e9, rel=0.005)


def test_gpus_may_not_split_quantization_groups(tmp_path):
    model = load_config(tmp_path, {**TINY, "quantization_config": {**AWQ, "group_size": 4}})
    model.check_tensor_parallel(1)
    with pytest.raises(ScenarioError) as error:
        model.check_tensor_parallel(2)
    assert str(error.value) == (
        "hardware.tensor_parallel: 2 GPUs split 12 inputs of a matrix of tiny within its quantization groups; "
        "possible: 1."
    )


def test_latents_are_replicated_however_many_gpus_share_the_heads():
    model = load_model("deepseek-v3")
    for tensor_parallel in (1, 2, 4, 8, 16):
        model.check_tensor_parallel(tensor_parallel)


QWEN = {**TINY, "model_type": "qwen2"}


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({**TINY, "sliding_window": 32}, (32, 2)),
        ({**TINY, "sliding_window": 32, "use_sliding_window": False}, (None, 0)),
        ({**TINY, "sliding_window": 64}, (None, 0)),  # as long as the model's context
        ({**TINY, "layer_types": ["full_attention"] * 2}, (None, 0)),
        ({**TINY, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}, (32, 1)),
        ({**QWEN, "sliding_window": 32}, (None, 0)),
        ({**QWEN, "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, (32, 1)),
        ({**QWEN, "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2}, (None, 0)),
        (LLAMA_4, (16, 3)),
        ({**LLAMA_4, "no_rope_layers": [1, 0, 0, 0]}, (16, 1)),
        ({**LLAMA_4, "attention_chunk_size": None}, (None, 0)),
    ],
)
def test_windows(tmp_path, config, window):
    model = load_config(tmp_path, config)
    assert (model.sliding_window, model.num_sliding_layers) == window


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"num_local_experts": 8}, "mixture of experts (num_local_experts) is not modelled for model_type 'llama'"),
        ({"num_experts": 128}, "mixture of experts (num_experts) is not modelled for model_type 'llama'"),
        ({"n_routed_experts": 64}, "mixture of experts (n_routed_experts) is not modelled for model_type 'llama'"),
        ({"kv_lora_rank": 512}, "multi-head latent attention (kv_lora_rank) is not modelled for model_type 'llama'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layers with a window of unknown size (layer_types)",
        ),
        ({"layer_types": ["linear_attention"] * 2}, "layers of 'linear_attention' (layer_types) is not modelled"),
        ({"attention_chunk_size": 32}, "chunked local attention (attention_chunk_size) is not modelled"),
        ({"index_topk": 2048}, "sparse attention (index_topk) is not modelled"),
        ({"text_config": {**TINY, "num_experts": 4}}, "mixture of experts (num_experts) is not modelled"),
        ({**DEEPSEEK, "attention_bias": True}, "latent attention other than DeepSeek's (attention_bias)"),
        ({**DEEPSEEK, "sliding_window": 32}, "latent attention other than DeepSeek's (sliding_window)"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantized weights (quantization_config) of quant_method 'mxfp4' are not modelled yet; "
            "modelled: fp8, awq, gptq, compressed-tensors.",
        ),
        (
            {"text_config": TINY, "quantization_config": {"quant_method": "bitsandbytes"}},
            "quantized weights (quantization_config) of quant_method 'bitsandbytes'",
        ),
        ({"quantization_config": {**AWQ, "bits": 3}}, "quantization_config.bits is 3; modelled for awq: bits 4 or 8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config.group_size is missing"),
        ({"quantization_config": {**FP8, "weight_block_size": [0, 4]}}, "quantization_config.weight_block_size.0 is 0"),
        (
            {"quantization_config": {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn"]}},
            "quantization_config leaves out 'model.layers.0.self_attn', and weights of two kinds are not modelled yet",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {
                        "group_0": {
                            "weights": {"num_bits": 8, "type": "int"},
                            "input_activations": {"num_bits": 8, "type": "int"},
                        }
                    },
                }
            },
            "quantization_config.config_groups.group_0.input_activations.type is 'int'; modelled for",
        ),
        ({**MIXTRAL, "num_experts_per_tok": 5}, "num_experts_per_tok is 5; at most 4"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts is None; expected a whole number above zero"),
        ({**DEEPSEEK, "v_head_dim": "7"}, "v_head_dim is '7'; expected a whole number above zero"),
        ({**QWEN_MOE, "mlp_only_layers": 3}, "mlp_only_layers is 3; expected a list"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(tmp_path, change, found):
    assert error_of(tmp_path, {**TINY, **change}).startswith(f"model: DIR/tiny/config.json: {found}")


def test_quantization_in_a_file_of_its_own_is_seen(tmp_path):
    load_config(tmp_path, TINY)
    (tmp_path / "tiny" / "hf_quant_config.json").write_text("{}")
    assert "quant_method 'modelopt (hf_quant_config.json)' are not modelled yet" in error_of(tmp_path, TINY)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {key: value for key, value in TINY.items() if key != "hidden_size"},
            "model: DIR/tiny/config.json: hidden_size is missing; expected a whole number above zero. "
            "Take the model's own config.json.",
        ),
        (
            {**TINY, "num_hidden_layers": -3},
            "model: DIR/tiny/config.json: num_hidden_layers is -3; expected a whole number above zero. "
            "Take the model's own config.json.",
        ),
        (
            {**TINY, "model_type": "gpt_neox"},
            "model: DIR/tiny/config.json: model_type 'gpt_neox' is not modelled yet; "
            "modelled: llama, mistral, qwen2, qwen3, granite, phi3, opt, mixtral, qwen2_moe, qwen3_moe, llama4_text, "
            "deepseek_v2, deepseek_v3, kimi_k2.",
        ),
        (
            {**TINY, "torch_dtype": "float8_e4m3fn"},
            "model: DIR/tiny/config.json: weights of type 'float8_e4m3fn'; modelled: bfloat16, float16, float32.",
        ),
        ([1], "model: DIR/tiny/config.json: not a JSON object; expected a HF config.json."),
        (
            "{",
            "model: DIR/tiny/config.json: not JSON (Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)); expected a HF config.json.",
        ),
    ],
)
def test_a_broken_config_says_what_is_wrong(tmp_path, config, message):
    assert error_of(tmp_path, config) == message


def test_a_missing_file():
    with pytest.raises(ArtifactError) as error:
        load_model("no/such/config.json")
    assert str(error.value) == (
        "model: cannot read 'no/such/config.json' (No such file or directory); expected the path of a HF config.json "
        "or a bundled name. See `servesim models` for the bundled ones."
    )


def test_an_unknown_name_is_an_error_with_the_closest_one():
    with pytest.raises(ScenarioError) as error:
        load_model("llama-3.1-8")
    known = ", ".join(model.name for model in models())
    assert str(error.value) == (
        f"model: unknown model 'llama-3.1-8'; known: {known}, or the path of a HF config.json. "
        "Did you mean 'llama-3.1-8b'?"
    )


def test_every_bundled_model_has_a_source():
    assert len(models()) == 29
    assert all(model.source.startswith("config.json of ") for model in models())


def test_heads_must_divide():
    model = load_model("llama-3.1-8b")
    for tensor_parallel in (1, 2, 4, 8, 16, 32):
        model.check_tensor_parallel(tensor_parallel)
    with pytest.raises(ScenarioError) as error:
        model.check_tensor_parallel(3)
    assert str(error.value) == (
        "hardware.tensor_parallel: 3 does not divide the 32 attention heads of llama-3.1-8b; "
        "possible: 1, 2, 4, 8, 16, 32."
    )
    with pytest.raises(ScenarioError) as error:
        load_model("qwen2.5-7b").check_tensor_parallel(7)
    assert str(error.value) == (
        "hardware.tensor_parallel: the 4 KV heads of qwen2.5-7b cannot be split or replicated evenly over 7; "
        "possible: 1, 2, 4, 28."
    )
