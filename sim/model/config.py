"""From the fields of a HF `config.json` to a model, or to an error that names the field that is in the way."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from sim.errors import ArtifactError
from sim.model.decoder import Model
from sim.model.experts import Experts
from sim.model.latent import LatentAttention
from sim.model.quantization import parse_quantization

_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "llama4_text", *_LATENT)
_OTHERS = ("llama", "mistral", "qwen2", "qwen3", "granite", "phi3", "opt")
FAMILIES = (*_OTHERS, *_WITH_EXPERTS)

_Size = Annotated[int, Field(ge=1, le=10**8, strict=True)]
_Count = Annotated[int, Field(ge=0, le=10**8, strict=True)]


class _Config(BaseModel):
    """The fields of a config.json that shapes follow from; the rest is ignored."""

    model_config = ConfigDict(extra="ignore")

    num_hidden_layers: _Size
    hidden_size: _Size
    intermediate_size: _Size = Field(validation_alias=AliasChoices("intermediate_size", "ffn_dim"))
    intermediate_size_mlp: _Size | None = None
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    vocab_size: _Size
    max_position_embeddings: _Size
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    word_embed_proj_dim: _Size | None = None
    source: str = ""


class _ExpertsConfig(BaseModel):
    """The fields that say what the experts are and which layers have them."""

    model_config = ConfigDict(extra="ignore")

    num_experts: _Size = Field(validation_alias=AliasChoices("num_local_experts", "num_experts", "n_routed_experts"))
    num_experts_per_tok: _Size
    moe_intermediate_size: _Size | None = None
    shared_expert_intermediate_size: _Count = 0
    n_shared_experts: _Count | None = None
    first_k_dense_replace: _Count = 0
    moe_layer_freq: _Size = 1
    mlp_only_layers: list[_Count] = []
    decoder_sparse_step: _Size = 1
    interleave_moe_layer_step: _Size = 1
    topk_method: str | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether a layer (counted from 0) has experts rather than an MLP; each family uses fields of its own."""
        return (
            layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
            and (layer + 1) % self.interleave_moe_layer_step == 0
        )


class _LatentConfig(BaseModel):
    """The fields of multi-head latent attention."""

    model_config = ConfigDict(extra="ignore")

    kv_lora_rank: _Size
    qk_rope_head_dim: _Size
    qk_nope_head_dim: _Size
    v_head_dim: _Size
    q_lora_rank: _Size | None = None


class _LocalConfig(BaseModel):
    """The fields that say which layers attend to a part of the context, and to how much of it."""

    model_config = ConfigDict(extra="ignore")

    sliding_window: _Size | None = None
    use_sliding_window: bool | None = None
    max_window_layers: _Count | None = None
    attention_chunk_size: _Size | None = None
    no_rope_layers: list[int] | None = None
    layer_types: list[str] | None = None


def parse_config(name: str, raw: dict[str, Any], place: str) -> Model:
    """The model that a config.json describes.

    Raises ArtifactError at `place` for a field that is missing or broken, and for what is not modelled.
    """
    nested = raw.get("text_config")
    config = {**nested, "source": raw.get("source", "")} if isinstance(nested, dict) else raw
    config = {"quantization_config": raw.get("quantization_config"), **config}
    family = str(config.get("model_type", "llama"))
    _refuse_unmodelled({**raw, **config}, family, place)
    fields = _validated(_Config, config, place)
    is_opt = family == "opt"
    if is_opt and fields.word_embed_proj_dim not in (None, fields.hidden_size):
        raise _not_modelled("projected embeddings", "word_embed_proj_dim", family, place)
    experts = _experts(config, fields, family, place) if family in _WITH_EXPERTS else None
    window, num_sliding_layers = _local_attention(config, fields, family, place)
    tied = fields.tie_word_embeddings
    return Model(
        name=name,
        num_hidden_layers=fields.num_hidden_layers,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size_mlp or fields.intermediate_size,
        num_attention_heads=fields.num_attention_heads,
        num_key_value_heads=fields.num_key_value_heads or fields.num_attention_heads,
        head_dim=fields.head_dim or fields.hidden_size // fields.num_attention_heads,
        vocab_size=fields.vocab_size,
        # transformers ties OPT's by default, those of the others not; config.json leaves defaults out
        tie_word_embeddings=is_opt if tied is None else tied,
        # vLLM runs float32 checkpoints in float16
        dtype_bytes=2,
        max_position_embeddings=fields.max_position_embeddings,
        source=fields.source or "config.json given by the user",
        gated_mlp=not is_opt,
        qkv_bias=fields.attention_bias or family in ("qwen2", "qwen2_moe", "opt"),
        o_bias=fields.attention_bias or is_opt,
        mlp_bias=fields.mlp_bias or is_opt,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        norm_bias=is_opt,
        # OPT offsets its positions by two
        num_learned_positions=fields.max_position_embeddings + 2 if is_opt else 0,
        experts=experts,
        latent=_latent(config, place) if family in _LATENT else None,
        quantization=parse_quantization(config["quantization_config"], place),
        sliding_window=window,
        num_sliding_layers=num_sliding_layers,
    )


def _experts(config: dict[str, Any], fields: _Config, family: str, place: str) -> Experts:
    found = _validated(_ExpertsConfig, config, place)
    if found.num_experts_per_tok > found.num_experts:
        raise ArtifactError(
            place, f"num_experts_per_tok is {found.num_experts_per_tok}", valid=f"at most {found.num_experts}"
        )
    size = found.moe_intermediate_size or fields.intermediate_size
    shared = size if family == "llama4_text" else size * (found.n_shared_experts or 0)
    return Experts(
        num_layers=sum(found.has_experts(layer) for layer in range(fields.num_hidden_layers)),
        num_experts=found.num_experts,
        num_experts_per_tok=found.num_experts_per_tok,
        intermediate_size=size,
        shared_intermediate_size=shared or found.shared_expert_intermediate_size,
        has_shared_gate=family == "qwen2_moe",
        has_router_bias=found.topk_method == "noaux_tc",
    )


def _latent(config: dict[str, Any], place: str) -> LatentAttention:
    found = _validated(_LatentConfig, config, place)
    return LatentAttention(**found.model_dump())


def _local_attention(config: dict[str, Any], fields: _Config, family: str, place: str) -> tuple[int | None, int]:
    """The window and the number of layers that have it; none where it never cuts anything off.

    A chunk of Llama 4 counts as a window: its tokens attend to no more than that.
    """
    found = _validated(_LocalConfig, config, place)
    is_qwen, num_layers = family.startswith("qwen"), fields.num_hidden_layers
    # Qwen names a window that it does not use unless told to
    uses_window = not is_qwen if found.use_sliding_window is None else found.use_sliding_window
    window = found.attention_chunk_size or (found.sliding_window if uses_window else None)
    if found.layer_types is not None:
        num_local = sum(kind != "full_attention" for kind in found.layer_types)
        if num_local and window is None:
            raise _not_modelled("layers with a window of unknown size", "layer_types", family, place)
    elif family == "llama4_text":
        # layers without rotary positions, every fourth by default, attend to everything
        num_local = sum(found.no_rope_layers or [(layer + 1) % 4 != 0 for layer in range(num_layers)])
    else:
        num_local = max(0, num_layers - (found.max_window_layers or 0)) if is_qwen else num_layers
    if window is None or window >= fields.max_position_embeddings or not num_local:
        return None, 0
    return window, num_local


_FEATURES = {
    "mixture of experts": (("num_local_experts", "num_experts", "n_routed_experts"), _WITH_EXPERTS),
    "multi-head latent attention": (("kv_lora_rank",), _LATENT),
    "chunked local attention": (("attention_chunk_size",), ("llama4_text",)),
    "sparse attention": (("index_topk",), ()),
}


def _refuse_unmodelled(config: dict[str, Any], family: str, place: str) -> None:
    if family not in FAMILIES:
        raise ArtifactError(
            place, f"model_type {family!r} is not modelled yet", valid=f"modelled: {', '.join(FAMILIES)}"
        )
    for feature, (keys, families) in _FEATURES.items():
        for key in keys:
            if config.get(key) and family not in families:
                raise _not_modelled(feature, key, family, place)
    if family in _LATENT:
        for key in ("attention_bias", "sliding_window", "layer_types"):
            if config.get(key):
                raise _not_modelled("latent attention other than DeepSeek's", key, family, place)
    for kind in config.get("layer_types") or ():
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            raise _not_modelled(f"layers of {kind!r}", "layer_types", family, place)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ArtifactError(place, f"weights of type {dtype!r}", valid="modelled: bfloat16, float16, float32")


def _not_modelled(feature: str, key: str, family: str, place: str) -> ArtifactError:
    return ArtifactError(
        place,
        f"{feature} ({key}) is not modelled for model_type {family!r}",
        remedy="docs/architecture.md says what is.",
    )


_Fields = TypeVar("_Fields", bound=BaseModel)


def _validated(kind: type[_Fields], config: dict[str, Any], place: str) -> _Fields:
    try:
        return kind.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        found = "is missing" if first["type"] == "missing" else f"is {first['input']!r}"
        raise ArtifactError(
            place, f"{first['loc'][0]} {found}", valid=_expected(first), remedy="Take the model's own config.json."
        ) from error


def _expected(error: Any) -> str:
    kind = error["type"]
    if kind.startswith(("list", "string")):
        return "expected a list" if kind.startswith("list") else "expected a text"
    return "expected true or false" if kind.startswith("bool") else "expected a whole number above zero"
