"""Quantized weights: what `quantization_config` of a HF `config.json` says, as bits per parameter.

Modelled as vLLM runs them. fp8 weights with fp8 activations multiply on fp8 tensor cores where the GPU has
them; all else (AWQ, GPTQ, weight-only formats, fp8 on older GPUs) is unpacked inside 16-bit products
(Marlin, arXiv:2408.11743), so it saves bytes and no FLOPs. Embeddings, LM head, routers, norms and biases
stay in 16 bit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sim.errors import ArtifactError

METHODS = ("fp8", "awq", "gptq", "compressed-tensors")


@dataclass(frozen=True)
class Quantization:
    """How the weights of a model's matrices are stored, and what they are multiplied in."""

    method: str
    weight_bits: float
    """Per parameter, scales and zero points included."""
    group_size: int | None = None
    """Consecutive inputs of a matrix that share a scale; a GPU's share must be a multiple of it."""
    has_fp8_activations: bool = False
    """Whether activations are quantized to fp8 too, so that fp8 tensor cores can multiply them."""


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore")


_GroupSize = Annotated[int, Field(ge=-1, le=10**6, strict=True)]
_Side = Annotated[int, Field(ge=1, le=10**6, strict=True)]
_Block = tuple[_Side, _Side]


class _Fp8(_Fields):
    quant_method: Literal["fp8"]
    weight_block_size: _Block | None = None
    modules_to_not_convert: list[str] | None = None

    def quantization(self) -> Quantization:
        return replace(_fp8("fp8", self.weight_block_size), has_fp8_activations=True)


class _Packed(_Fields):
    """AWQ and GPTQ: a 16-bit scale and a zero point per group; -1 is one group per column."""

    quant_method: Literal["awq", "gptq"]
    bits: Literal[4, 8]
    group_size: _GroupSize
    lm_head: Literal[False] = False
    modules_to_not_convert: list[str] | None = None

    def quantization(self) -> Quantization:
        return _grouped(self.quant_method, self.bits, self.group_size, 16 + self.bits)


class _IntWeights(_Fields):
    type: Literal["int"]
    num_bits: Literal[4, 8]
    group_size: _GroupSize | None = None
    symmetric: bool = True

    def quantization(self) -> Quantization:
        return _grouped(
            "compressed-tensors", self.num_bits, self.group_size or -1, 16 if self.symmetric else 16 + self.num_bits
        )


class _FloatWeights(_Fields):
    type: Literal["float"]
    num_bits: Literal[8]
    block_structure: _Block | None = None

    def quantization(self) -> Quantization:
        return _fp8("compressed-tensors", self.block_structure)


class _Activations(_Fields):
    num_bits: Literal[8]
    type: Literal["float"]


class _Group(_Fields):
    weights: Annotated[_IntWeights | _FloatWeights, Field(discriminator="type")]
    input_activations: _Activations | None = None


class _CompressedTensors(_Fields):
    quant_method: Literal["compressed-tensors"]
    config_groups: Annotated[dict[str, _Group], Field(min_length=1, max_length=1)]
    ignore: list[str] | None = None

    def quantization(self) -> Quantization:
        (group,) = self.config_groups.values()
        stored = group.weights.quantization()
        return replace(stored, has_fp8_activations=group.input_activations is not None)


_FORMATS: dict[str, type[_Fp8 | _Packed | _CompressedTensors]] = {
    "fp8": _Fp8,
    "awq": _Packed,
    "gptq": _Packed,
    "compressed-tensors": _CompressedTensors,
}


def parse_quantization(raw: Any, place: str) -> Quantization | None:
    """The `quantization_config` of a config.json, or None where it has none.

    Raises ArtifactError at `place` for a method, a format or an exception from it that is not modelled.
    """
    if not raw:
        return None
    method = raw.get("quant_method") if isinstance(raw, dict) else None
    if method not in _FORMATS:
        raise ArtifactError(
            place,
            f"quantized weights (quantization_config) of quant_method {method!r} are not modelled yet",
            valid=f"modelled: {', '.join(METHODS)}",
        )
    try:
        fields = _FORMATS[method].model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        found = "is missing" if first["type"] == "missing" else f"is {first['input']!r}"
        raise ArtifactError(
            place, f"quantization_config.{key} {found}", valid=f"modelled for {method}: {_MODELLED[method]}"
        ) from error
    exceptions = fields.ignore if isinstance(fields, _CompressedTensors) else fields.modules_to_not_convert
    for module in exceptions or ():
        if not _STAYS_ANYWAY.search(module):
            raise ArtifactError(
                place,
                f"quantization_config leaves out {module!r}, and weights of two kinds are not modelled yet",
                valid="left out: embeddings, lm_head, routers, norms, vision towers",
            )
    return fields.quantization()


_MODELLED = {
    "fp8": "8 bit, per tensor or with a weight_block_size of two whole numbers",
    "awq": "bits 4 or 8, a group_size, a 16-bit lm_head",
    "gptq": "bits 4 or 8, a group_size, a 16-bit lm_head",
    "compressed-tensors": "one group of weights of 4 or 8 bits (int or float), activations of 16 bit or fp8",
}

_STAYS_ANYWAY = re.compile(
    r"(lm_head|gate|router|norm|embed_tokens|e_score_correction_bias)\.?\$?$|(visual|vision|multi_modal_projector)"
)


def _fp8(method: str, block: tuple[int, int] | None) -> Quantization:
    """With one float32 scale per block; scales of tensors or columns are lost among their bytes."""
    if block is None:
        return Quantization(method, 8.0)
    rows, columns = block
    return Quantization(method, 8 + 32 / (rows * columns), max(block))


def _grouped(method: str, bits: int, group_size: int, bits_per_group: int) -> Quantization:
    """With one scale per column its bytes are lost among those of the column."""
    if group_size < 1:
        return Quantization(method, float(bits))
    return Quantization(method, bits + bits_per_group / group_size, group_size)
