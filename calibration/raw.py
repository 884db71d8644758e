"""The raw file: every timed point of a profile, with what it was measured on. Points are added, never lost."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import ValidationError

from sim.errors import ArtifactError
from sim.options import Count, CountOrZero, Options

if TYPE_CHECKING:
    import pandas as pd

OPERATORS = (
    "qkv_proj",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "moe",
    "norm",
    "rotary",
    "lm_head",
    "sampling",
    "prefill_attention",
    "decode_attention",
    "mixed_attention",
    "all_reduce",
    "step",
)
"""What can be timed. `step` is a whole iteration of the layers timed; the others are one call of one operator."""

MODES = ("eager", "graph")
"""How the kernels were launched: one by one, or as a captured CUDA graph."""

KEY = {
    "operator": "string",
    "mode": "string",
    "num_tokens": "int64",
    "num_seqs": "int64",
    "chunk_tokens": "int64",
    "chunk_context_tokens": "int64",
    "num_decodes": "int64",
    "decode_context_tokens": "int64",
    "decode_context_max": "int64",
    "decode_context_sq": "float64",
}
"""What identifies a point; 0 where a column does not apply to the operator.

`num_tokens`: rows through the dense operators. `num_seqs`: rows whose logits are needed. `chunk_tokens` and
`chunk_context_tokens`: queries of one prompt, and the keys cached before them. `num_decodes` and the sum, maximum
and sum of squares of their contexts: tokens cached before the one that each decode computes.
"""

TIMES = {
    "median_ns": "float64",
    "ci_low_ns": "float64",
    "ci_high_ns": "float64",
    "repeats": "int64",
    "outliers": "int64",
    "clock_mhz": "Float64",
    "throttled": "boolean",
}
"""What was found there: the median and its 95 % interval, how many repeats and how many of them were set aside.

The clock of the GPU and whether it was throttled are null where nothing tells.
"""

COLUMNS = KEY | TIMES
_METADATA_KEY = b"servesim"


class Hardware(Options):
    """What the kernels ran on."""

    name: str
    memory_bytes: Count


class Metadata(Options):
    """What all points of a raw file have in common."""

    format_version: Literal[1] = 1
    hardware: Hardware
    device: Literal["cuda", "cpu"]
    driver: str | None
    versions: dict[str, str]
    """Of torch, cuda (where there is one), python and servesim."""
    backends: dict[str, str]
    """Operator -> the library whose kernel was timed."""
    dtype: str
    model: str
    config: dict[str, Any]
    """The model's HF config.json."""
    tensor_parallel: Count
    num_layers: Count
    """Layers that `step` points ran."""
    date: str
    seed: CountOrZero


class RawFile(NamedTuple):
    """A raw file: one row per point, columns as in `COLUMNS`, and what they have in common."""

    points: pd.DataFrame
    metadata: Metadata


def read(path: Path, place: str = "RAW") -> RawFile:
    """The points of a file, in the order in which they were timed.

    Raises ArtifactError for a file that is missing, damaged, or has no such columns. What the times are is not
    judged here.
    """
    table, metadata = _read_table(path, place)
    return RawFile(table.to_pandas().astype(COLUMNS), metadata)


def append(path: Path, rows: Sequence[Mapping[str, Any]], metadata: Metadata) -> None:
    """Add points to a file, which is made if need be. An interruption leaves the file as it was or as it becomes.

    A row has values for `COLUMNS`; those of `KEY` may be left out where they do not apply. Raises ArtifactError
    where the file is of something else than `metadata` says; only the date may differ.
    """
    import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types

    blank: dict[str, Any] = dict.fromkeys(KEY, 0) | {"clock_mhz": None, "throttled": None}
    types = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64()}
    types |= {"Float64": pa.float64(), "boolean": pa.bool_()}
    schema = pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    points = pa.Table.from_pylist([blank | dict(row) for row in rows], schema)
    if path.exists():
        old, old_metadata = _read_table(path, "--out")
        check_same(old_metadata, metadata, path)
        points, metadata = pa.concat_tables([old.cast(schema), points]), old_metadata
    table = points.replace_schema_metadata({_METADATA_KEY: metadata.model_dump_json().encode()})
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, unfinished, compression="zstd")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_same(old: Metadata, new: Metadata, path: Path) -> None:
    """Raise ArtifactError unless points of `new` belong into a file of `old`."""
    for name in Metadata.model_fields:
        found, wanted = getattr(old, name), getattr(new, name)
        if name != "date" and found != wanted:
            raise ArtifactError(
                f"--out: {path}",
                f"holds points of {name} {_short(found)}, and these are of {_short(wanted)}",
                remedy="Name another file, or remove this one.",
            )


def _short(value: Any) -> str:
    text = json.dumps(value.model_dump() if isinstance(value, Options) else value, sort_keys=True)
    return text if len(text) <= 200 else text[:200] + " ..."


def _read_table(path: Path, place: str) -> tuple[Any, Metadata]:
    """A file as pyarrow's table of `COLUMNS`, and its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        metadata = Metadata.model_validate_json((table.schema.metadata or {})[_METADATA_KEY])
    except OSError as error:
        raise ArtifactError(
            place,
            f"cannot read {str(path)!r} ({error.strerror or ('no file' if not path.exists() else error)})",
            remedy="`servesim calibrate profile` makes a raw file.",
        ) from error
    except (pa.ArrowInvalid, KeyError) as error:
        raise ArtifactError(
            f"{place}: {path}",
            f"no raw file of a profile ({type(error).__name__})",
            valid="expected what `servesim calibrate profile` wrote",
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ArtifactError(f"{place}: {path}", f"metadata {key}: {first['msg']}", remedy="Profile again.") from error
    absent = [column for column in COLUMNS if column not in table.column_names]
    if absent:
        raise ArtifactError(f"{place}: {path}", f"no column {', '.join(absent)}", remedy="Profile again.")
    return table.select(list(COLUMNS)), metadata
