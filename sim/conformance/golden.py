"""Golden files: a scripted input, and what a real engine's scheduler decided on it, step by step."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import GoldenError

Line = dict[str, Any]
"""One step of a log, in the log's own words."""

LOG_SUFFIX = ".log.jsonl.gz"


@dataclass(frozen=True)
class Golden:
    """An input and its log."""

    path: Path
    """The input, `<name>.json`; the log `<name>.log.jsonl.gz` lies beside it."""
    scenario: Line
    header: Line
    lines: list[Line]

    def field(self, name: str, kind: type) -> Any:
        """A field of the input that must be there and of the given JSON type. Raises GoldenError."""
        value = self.scenario.get(name)
        if not isinstance(value, kind):
            found = f"{name!r} is missing" if value is None else f"{name!r} is {value!r}"
            raise GoldenError(str(self.path), found, valid=f"expected a {kind.__name__}")
        return value


def find_goldens(path: Path) -> list[Path]:
    """Inputs that have a log beside them: the one named (by either file), or all below a folder. Raises GoldenError."""
    if path.is_file():
        name = path.name
        return [path.with_name(name.removesuffix(LOG_SUFFIX) + ".json") if name.endswith(LOG_SUFFIX) else path]
    if not path.is_dir():
        raise GoldenError(str(path), "no such file or folder", remedy="Name a golden's .json, its log, or a folder.")
    found = [p for p in sorted(path.rglob("*.json")) if log_of(p).exists()]
    if not found:
        raise GoldenError(str(path), f"holds no <name>.json with a <name>{LOG_SUFFIX} beside it")
    return found


def log_of(path: Path) -> Path:
    """The log that belongs to an input."""
    return path.with_name(path.name.removesuffix(".json") + LOG_SUFFIX)


def read_golden(path: Path) -> Golden:
    """Read an input and its log. Raises GoldenError for anything that is not one."""
    scenario = _parse(_read_text(path), str(path))
    log = log_of(path)
    try:
        with gzip.open(log, "rt", encoding="utf-8") as file:
            lines = [_parse(text, f"{log}:{number}") for number, text in enumerate(file, 1)]
    except FileNotFoundError as error:
        raise GoldenError(str(path), f"has no log {log.name} beside it") from error
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as error:
        raise GoldenError(str(log), f"is not a complete gzip file ({error})", remedy="Make it again.") from error
    if not lines:
        raise GoldenError(str(log), "is empty")
    return Golden(path, scenario, lines[0], lines[1:])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise GoldenError(str(path), "no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise GoldenError(str(path), f"cannot be read ({error})") from error


def _parse(text: str, place: str) -> Line:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise GoldenError(place, f"is not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(value, dict):
        raise GoldenError(place, f"holds a {type(value).__name__}", valid="a JSON object is expected")
    return value
