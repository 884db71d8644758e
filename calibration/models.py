"""Which model and GPU a measurement was of: from their names elsewhere to what `servesim` calls them."""

from __future__ import annotations

from sim.errors import ArtifactError
from sim.gpu import gpus
from sim.model import Model, load_model, models

TUNED = ("-instruct", "-chat", "-hf", "-it", "-base", "-v0.1")
"""Endings of ids whose models have the shapes of the model without them."""


def bundled_name(hugging_face_id: str) -> str:
    """The bundled name of a model; its id's last part in small letters where none fits.

    What is returned need not exist: reading it as a model says so.
    """
    name = hugging_face_id.rpartition("/")[2].lower()
    known = {model.name for model in models()}
    plain = name
    while plain not in known:
        shorter = next((plain.removesuffix(ending) for ending in TUNED if plain.endswith(ending)), None)
        if shorter is None:
            return name
        plain = shorter
    return plain


def load_plain_model(name_or_path: str, *, may_have_experts: bool = False, may_be_fp8: bool = False) -> Model:
    """A model whose kernels are those that tables of dense models hold, in 16 bit with full attention.

    `may_be_fp8`: or with weights and activations of its matrices in fp8.

    Raises ScenarioError or ArtifactError for another kind, which such tables would misprice.
    """
    model = load_model(name_or_path, place="--model")
    is_fp8 = may_be_fp8 and model.quantization is not None and model.quantization.has_fp8_activations
    kinds = {
        "a mixture of experts": model.experts and not may_have_experts,
        "a model with latent attention": model.latent,
        "a model with quantized weights": model.quantization and not is_fp8,
        "a model with sliding windows": model.num_sliding_layers,
        "a model in 32 bit": model.dtype_bytes != 2,
    }
    for kind, is_one in kinds.items():
        if is_one:
            raise ArtifactError(
                "--model",
                f"{name_or_path} is {kind}",
                valid="these tables price dense models in 16 bit with full attention",
            )
    return model


def plain_name(name: str) -> str:
    """Letters and digits of a name, to compare spellings by."""
    return "".join(character for character in name.lower() if character.isalnum())


def known_gpu(hardware: str) -> str | None:
    """The bundled GPU of this name, spelled in whatever way."""
    return next((gpu.name for gpu in gpus() if plain_name(gpu.name) == plain_name(hardware)), None)


def gpu_of_driver(name: str) -> str | None:
    """The bundled GPU that a driver names so: `NVIDIA H100 80GB HBM3` is h100-sxm. None: not listed."""
    words = name.lower().replace("-", " ").split()
    found = []
    for gpu in gpus():
        parts = set(gpu.name.split("-")) - {"sxm"}
        if parts <= set(words) and ("pcie" in parts) == ("pcie" in words):
            found.append((len(parts), gpu.name))
    return max(found)[1] if found else None
