"""Reading of users' files: paths with variables, text, CSV tables of whole numbers.

Whatever is wrong in a file becomes a TraceError that names the file and the line.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sim.errors import ScenarioError, TraceError, did_you_mean
from sim.workload.base import Ints

MAX_TOKENS = 10**12
"""Longer texts in a file are taken for a mistake."""

SHARED_VARIABLE = "SERVESIM_SHARED"
_SHARED_DEFAULT = "../shared"
_VARIABLE = re.compile(r"\$\{([^}]*)\}")


def resolve_path(text: str, folder: Path, *, place: str = "") -> Path:
    """The file that a scenario in `folder` calls `text`.

    `${NAME}` is replaced from the environment. `SERVESIM_SHARED` is relative to the current directory
    and `../shared` when it is not set. Raises ScenarioError at `place` for any other variable that is
    not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == SHARED_VARIABLE:
            return os.path.abspath(os.environ.get(name) or _SHARED_DEFAULT)
        found = os.environ.get(name)
        if found is None:
            raise ScenarioError(
                place,
                f"the environment variable {name!r} in {text!r} is not set",
                remedy="Set it, or write the path out.",
            )
        return found

    return folder / _VARIABLE.sub(value, text)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file (a byte order mark is dropped). Raises TraceError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        hint = f" or set {SHARED_VARIABLE}" if SHARED_VARIABLE not in os.environ else ""
        raise TraceError(
            str(path),
            "no such file",
            remedy=f"Correct the path (a relative one starts at the scenario's folder){hint}.",
        ) from error
    except IsADirectoryError as error:
        raise TraceError(str(path), "this is a folder", valid="a file is needed") from error
    except (OSError, ValueError) as error:
        raise TraceError(str(path), f"cannot be read ({error})") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(
            f"{path}:{line}",
            f"the byte 0x{data[error.start]:02x} is not UTF-8",
            remedy="Is this a text file? If it is, save it as UTF-8.",
        ) from error


@dataclass(frozen=True)
class Table:
    """A CSV file as text: its header, its rows, and the line of the file that each row ends on."""

    path: Path
    header: list[str]
    rows: list[list[str]]
    lines: list[int]

    def column(self, name: str) -> Iterator[tuple[int, str]]:
        """Line and cell of every row in the column called `name`. Raises TraceError if there is none."""
        columns = f"columns: {', '.join(self.header)}"
        if name not in self.header:
            remedy = did_you_mean(name, self.header)
            raise TraceError(f"{self.path}:1", f"there is no column {name!r}", valid=columns, remedy=remedy)
        if self.header.count(name) > 1:
            raise TraceError(f"{self.path}:1", f"two columns are called {name!r}", valid=columns)
        index = self.header.index(name)
        return ((line, row[index]) for line, row in zip(self.lines, self.rows, strict=True))

    def counts(self, name: str) -> Ints:
        """The column called `name` as whole numbers of tokens, each >= 1. Raises TraceError."""
        values = [self._count(name, line, cell) for line, cell in self.column(name)]
        return np.array(values, dtype=np.int64)

    def _count(self, name: str, line: int, cell: str) -> int:
        text = cell.strip()
        # isascii: isdecimal also takes other scripts' digits. The length bounds what int() must parse.
        if text.isascii() and text.isdecimal() and len(text) <= 20 and 1 <= (value := int(text)) <= MAX_TOKENS:
            return value
        raise bad_cell(self.path, line, name, cell, valid=f"expected a whole number from 1 to {MAX_TOKENS}")


def bad_cell(path: Path, line: int, name: str, cell: object, *, valid: str) -> TraceError:
    """The error for a value that is not what its column holds."""
    shown = repr(cell) if len(repr(cell)) <= 60 else f"{repr(cell)[:57]}..."
    return TraceError(f"{path}:{line}", f"{name} is {shown}", valid=valid, remedy="Correct the row or delete it.")


def read_table(path: Path) -> Table:
    """A comma-separated file with a header. Blank lines are skipped. Raises TraceError."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        raise TraceError(f"{path}:{reader.line_num}", f"this is not CSV ({error})") from error
    if not rows:
        raise TraceError(str(path), "the file is empty", valid="a header line and one line per request are needed")
    header = [name.strip() for name in rows.pop(0)]
    del lines[0]
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(header):
            raise TraceError(
                f"{path}:{line}",
                f"the row has {_plural(len(row), 'column')}",
                valid=f"the header has {len(header)} ({', '.join(header)})",
                remedy="Correct the row or delete it.",
            )
    return Table(path, header, rows, lines)


def no_requests(path: Path) -> TraceError:
    """The error for a trace without a single request."""
    return TraceError(str(path), "the trace has no requests", valid="at least one is needed")


def _plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
