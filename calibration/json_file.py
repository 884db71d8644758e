"""JSON files of others, read or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sim.errors import ArtifactError


def read_json(path: Path, valid: str = "") -> Any:
    """The content of a file. Raises ArtifactError, with what is `valid`, for one that cannot be read as JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(str(path), f"cannot be read as JSON ({reason})", valid=valid) from error
