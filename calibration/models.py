"""Which model a measurement was of: from an id on Hugging Face to what `servesim models` lists."""

from __future__ import annotations

from sim.model import models

TUNED = ("-instruct", "-chat", "-hf", "-it", "-base")
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
