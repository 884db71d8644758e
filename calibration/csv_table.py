"""Published CSV tables of times, read strictly: what is missing or cannot be a time is an error that names it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sim.errors import ArtifactError

if TYPE_CHECKING:
    import pandas as pd


def find(candidates: Sequence[Path], place: str) -> Path:
    """The first of these files, or the same with `.gz`, that exists. Raises ArtifactError."""
    for path in candidates:
        for name in (path, path.with_name(path.name + ".gz")):
            if name.is_file():
                return name
    named = " or ".join(str(path) for path in candidates)
    raise ArtifactError(place, f"there is no {named}", remedy="Name the folder of the profile and its --tp.")


def read(path: Path, columns: Sequence[str], times: Sequence[str]) -> pd.DataFrame:
    """A table with at least these columns. Raises ArtifactError, with the line, for times that are none.

    `times` are those of `columns` that must be above zero; the others are zero or more.
    """
    import numpy as np
    import pandas as pd

    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(str(path), f"cannot be read as CSV ({error})") from error
    require(table, columns, path)
    if table.empty:
        raise ArtifactError(str(path), "has no rows")
    for column in columns:
        if not pd.api.types.is_numeric_dtype(table[column]):
            continue
        values = table[column].to_numpy(dtype=float)
        bad = np.flatnonzero(~np.isfinite(values) | (values < 0) | ((values == 0) & (column in times)))
        if len(bad):
            valid = "expected a time above zero" if column in times else "expected a number, zero or more"
            raise ArtifactError(f"{path}:{bad[0] + 2}", f"{column} is {values[bad[0]]}", valid=valid)
    wrong = [column for column in times if not pd.api.types.is_numeric_dtype(table[column])]
    if wrong:
        raise ArtifactError(str(path), f"{wrong[0]} holds text", valid="expected numbers")
    return table


def require(table: pd.DataFrame, columns: Sequence[str], path: Path) -> None:
    """Raise ArtifactError for columns that the table of a file lacks."""
    absent = [column for column in columns if column not in table.columns]
    if absent:
        raise ArtifactError(
            str(path),
            f"no column {', '.join(absent)}",
            valid=f"it has {', '.join(table.columns)}",
            remedy="A time in another unit has another name; convert it.",
        )
