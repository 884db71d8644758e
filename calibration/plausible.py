"""Whether an artifact's times can be times of its model at all: what finds a table in another unit.

A column that holds ms where µs are expected is wrong by a factor of a thousand, which no kernel is. What the
hardware needs at least is known from the data sheet, so a time far from it is refused, not believed.
"""

from __future__ import annotations

from calibration.grids import NOT_TIMED
from sim.cost.artifact import Artifact, Term
from sim.errors import ArtifactError
from sim.gpu import Gpu, load_gpu
from sim.model import Model

LEAST, MOST = 1 / 30, 100.0
"""Bounds of a time over what the data sheet says of it: unfused kernels and caches are within, units are not."""
_CALL_US = 5.0
"""No call takes much less than its launch: what a small one is expected to take."""
_TYPICAL = "a100-sxm-80gb"
"""Stands for hardware that is not listed; listed bandwidths are within a factor of ten of it."""


def check_plausible(artifact: Artifact, model: Model, place: str) -> None:
    """Raise ArtifactError when a time is far from what the GPU's data sheet allows."""
    gpu = load_gpu(artifact.gpu or _TYPICAL)
    checks = {
        "one row of all layers": (_one_row_us(artifact), _weights_us(artifact, model, gpu)),
        "attention of the most and longest decodes": (
            _last_us(artifact, "decode_attention"),
            _decodes_us(artifact, model, gpu),
        ),
        "the longest prompt": (_prompt_us(artifact), _pairs_us(artifact, model, gpu)),
    }
    for what, (measured_us, expected_us) in checks.items():
        ratio = measured_us / expected_us
        if not LEAST <= ratio <= MOST:
            raise ArtifactError(
                place,
                f"{what} takes {measured_us:.4g} us by these times, where {gpu.name} needs some {expected_us:.4g} us",
                valid="expected times of the same order",
                remedy="Is a column in another unit (ms, us, ns)? Convert it.",
            )


def _timed(artifact: Artifact, *kinds: str) -> list[Term]:
    """Terms of these kinds that hold times of kernels of one GPU, not of the data sheet."""
    terms = [term for kind in kinds for term in artifact.of_kind(kind)]
    return [term for term in terms if not (term.is_communication or term.note.startswith(NOT_TIMED))]


def _calls_us(artifact: Artifact, *kinds: str) -> float:
    return _CALL_US * sum(term.calls for term in _timed(artifact, *kinds))


def _one_row_us(artifact: Artifact) -> float:
    """Of whole iterations, whose parts are not known: that of one decode."""
    kinds = ("tokens", "experts") if artifact.of_kind("tokens") else ("decode_attention",)
    return artifact.step_us + sum(term.us[0] * term.calls for term in _timed(artifact, *kinds))


def _last_us(artifact: Artifact, kind: str) -> float:
    return artifact.step_us + sum(term.us[-1] * term.calls for term in artifact.of_kind(kind))


def _prompt_us(artifact: Artifact) -> float:
    us = _last_us(artifact, "prefill_attention")
    return us + sum(term.us[-1] * term.calls for term in artifact.of_kind("prefill_tokens"))


def _weights_us(artifact: Artifact, model: Model, gpu: Gpu) -> float:
    """Reading what one row reads: of the experts, as many as the smallest number that was timed."""
    experts = artifact.of_kind("experts")
    num_bytes = 0.0
    for product in model.products(artifact.tensor_parallel)[:-1]:
        copies = experts[0].points[1][0] if product.num_copies > 1 and experts else product.num_copies
        num_bytes += product.num_layers * copies * product.parameters * model.parameter_bytes(product)
    return num_bytes / gpu.bandwidth_bytes_per_s * 1e6 + _calls_us(artifact, "tokens", "experts")


def _decodes_us(artifact: Artifact, model: Model, gpu: Gpu) -> float:
    """Reading the KV of the largest batch at the longest context; in whole iterations, the weights too."""
    batch, context = (axis[-1] for axis in artifact.of_kind("decode_attention")[0].points)
    num_bytes = batch * context * model.kv_bytes_per_token(artifact.kv_dtype_bytes, artifact.tensor_parallel)
    weights_us = 0.0 if artifact.of_kind("tokens") else _weights_us(artifact, model, gpu)
    return num_bytes / gpu.bandwidth_bytes_per_s * 1e6 + weights_us + _calls_us(artifact, "decode_attention")


def _pairs_us(artifact: Artifact, model: Model, gpu: Gpu) -> float:
    """Two products for each (query, key) pair of the longest prompt; in whole iterations, those of its rows too."""
    tokens, context = (axis[-1] for axis in artifact.of_kind("prefill_attention")[0].points)
    heads = -(-model.num_attention_heads // artifact.tensor_parallel)
    pairs = tokens * (context + (tokens + 1) / 2)
    flops = 4.0 * pairs * heads * model.head_dim * model.num_hidden_layers
    for whole in artifact.of_kind("prefill_tokens"):
        products = model.products(artifact.tensor_parallel)[:-1]
        weights = sum(product.num_layers * product.parameters for product in products)
        flops += 2.0 * weights * whole.points[0][-1]
    return flops / gpu.bf16_flops * 1e6 + _calls_us(artifact, "prefill_attention")
