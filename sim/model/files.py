"""Where models come from: those that are bundled, and a user's own config.json."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from sim.errors import ArtifactError, ScenarioError, did_you_mean
from sim.model.config import parse_config
from sim.model.decoder import Model


def models() -> list[Model]:
    """All bundled models, by name."""
    return [load_model(name) for name in _bundled()]


def load_model(name_or_path: str, place: str = "model") -> Model:
    """A bundled model by its name, or the one that a HF `config.json` (or the folder with it) describes.

    Weights of a vision tower beside a nested `text_config` are not counted. Raises ScenarioError for an
    unknown name, ArtifactError (both at `place`) for a file that is missing, broken or not modelled.
    """
    name, config = read_config(name_or_path, place)
    return parse_config(name, config, place if name_or_path in _bundled() else f"{place}: {_file(name_or_path)}")


def read_config(name_or_path: str, place: str = "model") -> tuple[str, dict[str, Any]]:
    """The name of a model and its `config.json` as it stands there. Raises as `load_model` does for a wrong name."""
    if name_or_path in _bundled():
        return name_or_path, _bundled()[name_or_path]
    if "/" not in name_or_path and not name_or_path.endswith(".json"):
        raise ScenarioError(
            place,
            f"unknown model {name_or_path!r}",
            valid=f"known: {', '.join(_bundled())}, or the path of a HF config.json",
            remedy=did_you_mean(name_or_path.lower(), _bundled()),
        )
    path = _file(name_or_path)
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    config = _read(path, place)
    if (separate := path.parent / "hf_quant_config.json").exists():
        config = {"quantization_config": {"quant_method": f"modelopt ({separate.name})"}, **config}
    return name, config


def _file(path_or_folder: str) -> Path:
    path = Path(path_or_folder)
    return path / "config.json" if path.is_dir() else path


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
