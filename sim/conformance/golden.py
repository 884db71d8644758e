"""Golden files: a scripted input, and what a real engine's scheduler decided on it, step by step."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import GoldenError

Line = dict[str, Any]
"""One step of a log, in the log's own words."""

INPUT_SUFFIX = ".json"
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


def find_goldens(paths: Sequence[Path]) -> list[Path]:
    """The inputs meant by `paths`, each once: files (of an input or of its log) and all logs below folders.

    Raises GoldenError for a path that names nothing.
    """
    return list(dict.fromkeys(found for path in paths for found in _find(path)))


def _find(path: Path) -> list[Path]:
    if path.is_dir():
        found = [input_of(log) for log in sorted(path.rglob(f"*{LOG_SUFFIX}"))]
        if not found:
            raise GoldenError(str(path), f"holds no log (<name>{LOG_SUFFIX} beside <name>{INPUT_SUFFIX})")
        return found
    if not path.exists():
        raise GoldenError(str(path), "no such file or folder", remedy="Name an input, its log, or a folder of them.")
    return [input_of(path) if path.name.endswith(LOG_SUFFIX) else path]


def input_of(log: Path) -> Path:
    """The input that belongs to a log."""
    return log.with_name(log.name.removesuffix(LOG_SUFFIX) + INPUT_SUFFIX)


def log_of(path: Path) -> Path:
    """The log that belongs to an input."""
    return path.with_name(path.name.removesuffix(INPUT_SUFFIX) + LOG_SUFFIX)


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
        raise GoldenError(place, f"is not JSON ({error.msg}, line {error.lineno} column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise GoldenError(place, f"is not JSON that can be read ({error})") from error
    if not isinstance(value, dict):
        raise GoldenError(place, f"holds a {type(value).__name__}", valid="a JSON object is expected")
    return value
