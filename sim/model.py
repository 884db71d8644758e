"""Models as HF `config.json` describes them, and the arithmetic that follows: parameters, bytes, KV.

Dense decoders of the Llama family (Llama, Mistral, Qwen2, Qwen3, Granite, Phi-3) and OPT. What is not
modelled (mixture of experts, multi-head latent attention, local attention, quantized weights) is refused
by the name of the field that asks for it, never approximated in silence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from sim.errors import ArtifactError, ScenarioError, did_you_mean


class MatmulParameters(NamedTuple):
    """Parameters that take part in matrix products, per GPU: per layer, and of the LM head once."""

    qkv: int
    o: int
    mlp: int
    lm_head: int


@dataclass(frozen=True)
class Model:
    """A dense or GQA decoder. Field names are those of HF `config.json`."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    dtype_bytes: int
    max_position_embeddings: int
    source: str
    gated_mlp: bool = True
    """Three matrices (gate, up, down) rather than two."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of the queries and of the keys (Qwen3)."""
    norm_bias: bool = False
    """LayerNorm (scale and shift) rather than RMS norm."""
    num_learned_positions: int = 0

    @property
    def num_mlp_inputs(self) -> int:
        """Matrices that read the hidden state: gate and up, or up alone."""
        return 2 if self.gated_mlp else 1

    @property
    def num_parameters(self) -> int:
        """All parameters, as the checkpoint has them."""
        lm_head = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size
        qkv, o, mlp, _ = self.matmul_parameters()
        return self.num_hidden_layers * (qkv + o + mlp) + lm_head + embeddings + self._vector_parameters()

    def check_tensor_parallel(self, tensor_parallel: int, place: str = "hardware.tensor_parallel") -> None:
        """Raise ScenarioError unless the heads can be split over `tensor_parallel` GPUs as vLLM does it.

        Attention heads must divide evenly; KV heads divide evenly or are replicated evenly.
        """
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % tensor_parallel:
            raise ScenarioError(
                place,
                f"{tensor_parallel} does not divide the {heads} attention heads of {self.name}",
                valid=f"possible: {_splits(heads, kv_heads)}",
            )
        if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
            raise ScenarioError(
                place,
                f"the {kv_heads} KV heads of {self.name} cannot be split or replicated evenly over {tensor_parallel}",
                valid=f"possible: {_splits(heads, kv_heads)}",
            )

    def kv_heads_per_gpu(self, tensor_parallel: int = 1) -> int:
        """KV heads that each GPU holds; at least one, so that few heads are replicated."""
        return -(-self.num_key_value_heads // tensor_parallel)

    def matmul_parameters(self, tensor_parallel: int = 1) -> MatmulParameters:
        """Matrix parameters per GPU, biases not counted (rounded up where they do not divide)."""
        hidden, tp = self.hidden_size, tensor_parallel
        heads = -(-self.num_attention_heads // tp)
        return MatmulParameters(
            qkv=hidden * (heads + 2 * self.kv_heads_per_gpu(tp)) * self.head_dim,
            o=heads * self.head_dim * hidden,
            mlp=(self.num_mlp_inputs + 1) * hidden * -(-self.intermediate_size // tp),
            lm_head=hidden * -(-self.vocab_size // tp),
        )

    def weight_bytes(self, tensor_parallel: int = 1) -> int:
        """Weights per GPU: matrices and embeddings split, vectors and learned positions replicated."""
        qkv, o, mlp, lm_head = self.matmul_parameters(tensor_parallel)
        vocabulary = lm_head if self.tie_word_embeddings else 2 * lm_head
        split = self.num_hidden_layers * (qkv + o + mlp) + vocabulary
        return (split + self._vector_parameters()) * self.dtype_bytes

    def kv_bytes_per_token(self, kv_dtype_bytes: float, tensor_parallel: int = 1) -> int:
        """KV per token and GPU: keys and values, all layers, this GPU's heads."""
        elements = 2 * self.num_hidden_layers * self.kv_heads_per_gpu(tensor_parallel) * self.head_dim
        return round(elements * kv_dtype_bytes)

    def _vector_parameters(self) -> int:
        """Norms, biases and learned positions: a few in ten thousand, but counts are exact."""
        hidden, head_dim = self.hidden_size, self.head_dim
        norm = 2 * hidden if self.norm_bias else hidden
        layer = 2 * norm
        layer += (self.num_attention_heads + 2 * self.num_key_value_heads) * head_dim if self.qkv_bias else 0
        layer += hidden if self.o_bias else 0
        layer += self.num_mlp_inputs * self.intermediate_size + hidden if self.mlp_bias else 0
        layer += 2 * head_dim if self.qk_norm else 0
        return self.num_hidden_layers * layer + norm + self.num_learned_positions * hidden


def models() -> list[Model]:
    """All bundled models, by name."""
    return [load_model(name) for name in _bundled()]


def load_model(name_or_path: str, place: str = "model") -> Model:
    """A bundled model by its name, or the one that a HF `config.json` (or the folder with it) describes.

    Weights of a vision tower beside a nested `text_config` are not counted. Raises ScenarioError for an
    unknown name, ArtifactError (both at `place`) for a file that is missing, broken or not modelled.
    """
    if name_or_path in _bundled():
        return _parse(name_or_path, _bundled()[name_or_path], place)
    if "/" not in name_or_path and not name_or_path.endswith(".json"):
        raise ScenarioError(
            place,
            f"unknown model {name_or_path!r}",
            valid=f"known: {', '.join(_bundled())}, or the path of a HF config.json",
            remedy=did_you_mean(name_or_path.lower(), _bundled()),
        )
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    return _parse(name, _read(path, place), f"{place}: {path}")


@cache
def _bundled() -> dict[str, dict[str, Any]]:
    folder = resources.files("sim").joinpath("data/models")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return {file.name.removesuffix(".json"): json.loads(file.read_text(encoding="utf-8")) for file in files}


def _read(path: Path, place: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(
            place,
            f"cannot read {str(path)!r} ({error.strerror})",
            valid="expected the path of a HF config.json or a bundled name",
            remedy="See `servesim models` for the bundled ones.",
        ) from error
    except ValueError as error:
        raise ArtifactError(f"{place}: {path}", f"not JSON ({error})", valid="expected a HF config.json") from error
    if not isinstance(config, dict):
        raise ArtifactError(f"{place}: {path}", "not a JSON object", valid="expected a HF config.json")
    return config


_Size = Annotated[int, Field(ge=1, le=10**8, strict=True)]


class _Config(BaseModel):
    """The fields of a config.json that shapes follow from; the rest is ignored."""

    model_config = ConfigDict(extra="ignore")

    num_hidden_layers: _Size
    hidden_size: _Size
    intermediate_size: _Size = Field(validation_alias=AliasChoices("intermediate_size", "ffn_dim"))
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


_GATED = ("llama", "mistral", "qwen2", "qwen3", "granite", "phi3")
_FEATURES = {
    "mixture of experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "multi-head latent attention": ("kv_lora_rank",),
    "chunked local attention": ("attention_chunk_size",),
    "quantized weights": ("quantization_config",),
}


def _parse(name: str, raw: dict[str, Any], place: str) -> Model:
    nested = raw.get("text_config")
    config = {**nested, "source": raw.get("source", "")} if isinstance(nested, dict) else raw
    family = config.get("model_type", "llama")
    _refuse_unmodelled({**raw, **config}, family, place)
    try:
        fields = _Config.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        found = "is missing" if first["type"] == "missing" else f"is {first['input']!r}"
        raise ArtifactError(
            place, f"{first['loc'][0]} {found}", valid=_expected(first), remedy="Take the model's own config.json."
        ) from error
    is_opt = family == "opt"
    if is_opt and fields.word_embed_proj_dim not in (None, fields.hidden_size):
        raise _not_modelled("projected embeddings", "word_embed_proj_dim", place)
    return _build(name, fields, family)


def _build(name: str, fields: _Config, family: str) -> Model:
    is_opt = family == "opt"
    tied = fields.tie_word_embeddings
    return Model(
        name=name,
        num_hidden_layers=fields.num_hidden_layers,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
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
        qkv_bias=fields.attention_bias or family in ("qwen2", "opt"),
        o_bias=fields.attention_bias or is_opt,
        mlp_bias=fields.mlp_bias or is_opt,
        qk_norm=family == "qwen3",
        norm_bias=is_opt,
        # OPT offsets its positions by two
        num_learned_positions=fields.max_position_embeddings + 2 if is_opt else 0,
    )


def _refuse_unmodelled(config: dict[str, Any], family: str, place: str) -> None:
    for feature, keys in _FEATURES.items():
        for key in keys:
            if config.get(key):
                raise _not_modelled(feature, key, place)
    # Qwen names a window that it does not use unless told to
    uses_window = config.get("use_sliding_window", not family.startswith("qwen"))
    if config.get("sliding_window") and uses_window:
        raise _not_modelled("sliding-window attention", "sliding_window", place)
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise _not_modelled("a mix of attention layers", "layer_types", place)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ArtifactError(place, f"weights of type {dtype!r}", valid="modelled: bfloat16, float16, float32")
    if family not in (*_GATED, "opt"):
        raise ArtifactError(
            place, f"model_type {family!r} is not modelled yet", valid=f"modelled: {', '.join(_GATED)}, opt"
        )


def _not_modelled(feature: str, key: str, place: str) -> ArtifactError:
    return ArtifactError(
        place, f"{feature} ({key}) is not modelled yet", valid="modelled: dense decoders with full attention in 16 bit"
    )


def _expected(error: Any) -> str:
    return "expected true or false" if error["type"].startswith("bool") else "expected a whole number above zero"


def _splits(heads: int, kv_heads: int) -> str:
    return ", ".join(
        str(tp) for tp in range(1, heads + 1) if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    )
