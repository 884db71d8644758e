import json

import pytest

from sim.errors import ArtifactError, ScenarioError
from sim.model import MatmulParameters, load_model, models

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
    # qkv 8·(4+2·2)·2, o 4·2·8, mlp 3·8·12, lm_head 8·10
    assert model.matmul_parameters() == MatmulParameters(qkv=128, o=64, mlp=288, lm_head=80)
    assert model.matmul_parameters(2) == MatmulParameters(qkv=64, o=32, mlp=144, lm_head=40)
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


def test_an_unused_window_is_no_window(tmp_path):
    model = load_config(tmp_path, TINY)
    assert load_config(tmp_path, {**TINY, "sliding_window": 32, "use_sliding_window": False}) == model
    assert load_config(tmp_path, {**TINY, "layer_types": ["full_attention"] * 2}) == model


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"num_local_experts": 8}, "mixture of experts (num_local_experts)"),
        ({"num_experts": 128}, "mixture of experts (num_experts)"),
        ({"n_routed_experts": 64}, "mixture of experts (n_routed_experts)"),
        ({"kv_lora_rank": 512}, "multi-head latent attention (kv_lora_rank)"),
        ({"sliding_window": 4096}, "sliding-window attention (sliding_window)"),
        ({"sliding_window": 9, "model_type": "qwen2", "use_sliding_window": True}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "a mix of attention layers (layer_types)"),
        ({"attention_chunk_size": 8192}, "chunked local attention (attention_chunk_size)"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized weights (quantization_config)"),
        ({"text_config": {**TINY, "num_experts": 4}}, "mixture of experts (num_experts)"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(tmp_path, change, found):
    message = error_of(tmp_path, {**TINY, **change})
    assert message.startswith(f"model: DIR/tiny/config.json: {found}")
    assert message.endswith(" is not modelled yet; modelled: dense decoders with full attention in 16 bit.")


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
            "modelled: llama, mistral, qwen2, qwen3, granite, phi3, opt.",
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
    assert len(models()) == 17
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
