"""Tables of times (CSV, JSON lines, Parquet), read strictly: what is missing or no time is an error that names it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sim.errors import ArtifactError

if TYPE_CHECKING:
    import pandas as pd

SMALLEST, LARGEST = 1e-12, 1e12
"""No time, size or count above zero in such a table is as small or as large, in any unit that is used for them."""


def find(candidates: Sequence[Path], place: str) -> Path:
    """The first of these files, or the same with `.gz`, that exists. Raises ArtifactError."""
    for path in candidates:
        for name in (path, path.with_name(path.name + ".gz")):
            if name.is_file():
                return name
    named = " or ".join(str(path) for path in candidates)
    raise ArtifactError(place, f"there is no {named}", remedy="Name the folder of the profile and its --tp.")


def read(path: Path, columns: Sequence[str], positive: Sequence[str], text: Sequence[str] = ()) -> pd.DataFrame:
    """A table with at least these columns, as `load` and `check` give it."""
    table = load(path)
    check(table, path, columns, positive, text)
    return table


def load(path: Path) -> pd.DataFrame:
    """A table as it stands in the file. Raises ArtifactError for what cannot be read."""
    import pandas as pd

    kind = {".parquet": "Parquet", ".jsonl": "JSON lines"}.get(path.suffix, "CSV")
    try:
        if kind == "Parquet":
            table = pd.read_parquet(path)
        else:
            table = pd.read_json(path, lines=True) if kind == "JSON lines" else pd.read_csv(path, low_memory=False)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(str(path), f"cannot be read as {kind} ({reason})") from error
    if kind == "CSV" and not isinstance(table.index, pd.RangeIndex):
        raise ArtifactError(str(path), "has rows with more fields than its header names")
    return table.reset_index(drop=True)


def check(
    table: pd.DataFrame, path: Path, columns: Sequence[str], positive: Sequence[str], text: Sequence[str] = ()
) -> None:
    """Raise ArtifactError, with the line, unless the rows of a file have these columns, holding what they should.

    Those in `positive` (times, and sizes of what is never empty) hold numbers above zero, those in `text` anything
    but nothing, the others numbers, zero or more.
    """
    require(table, columns, path)
    if table.empty:
        raise ArtifactError(str(path), "has no rows")
    for column in columns:
        _check_column(table[column], path, is_text=column in text, may_be_zero=column not in positive)


def require(table: pd.DataFrame, columns: Sequence[str], path: Path) -> None:
    """Raise ArtifactError for columns that the table of a file lacks."""
    absent = [column for column in columns if column not in table.columns]
    if absent:
        raise ArtifactError(
            str(path),
            f"no column {', '.join(absent)}",
            valid=f"it has {', '.join(map(str, table.columns))}",
            remedy="A time in another unit has another name; convert it.",
        )


def _check_column(values: pd.Series, path: Path, *, is_text: bool, may_be_zero: bool) -> None:
    import pandas as pd

    if is_text:
        is_bad, valid = values.isna(), "expected a name"
    else:
        numbers = pd.to_numeric(values, errors="coerce").astype(float)
        is_size = (numbers > SMALLEST) & (numbers < LARGEST)
        is_bad = ~(is_size | (may_be_zero & (numbers == 0)))
        valid = f"expected a number{', zero or more,' if may_be_zero else ' above zero'} below {LARGEST:g}"
    if is_bad.any():
        i = int(is_bad.to_numpy().argmax())
        line = values.index[i] + (1 if path.suffix == ".jsonl" else 2)
        raise ArtifactError(f"{path}:{line}", f"{values.name} is {values.iloc[i]}", valid=valid)
