"""A run on disk: one Parquet file per table, the run's facts in their metadata. No file is ever half written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sim.cost.base import Resource
from sim.errors import UserError
from sim.metrics.facts import ReplicaFacts, RunFacts
from sim.metrics.limits import Breakdown
from sim.metrics.shares import WorkShares
from sim.record import CHUNK_COLUMNS, ITERATION_COLUMNS, REQUEST_COLUMNS, SEGMENT_COLUMNS, Columns, Tables

_COLUMNS = {
    "iterations": ITERATION_COLUMNS,
    "chunks": CHUNK_COLUMNS,
    "requests": REQUEST_COLUMNS,
    "segments": SEGMENT_COLUMNS,
}
TABLE_NAMES = tuple(_COLUMNS)

_DECODE_SHARE, _CHUNK_SHARE = "decode_share", "prefill_share"
_FACTS_KEY = b"servesim"
_REMEDY = "Give a folder that `servesim run --out` wrote."


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it takes that name if and only if the block succeeds.

    An interruption (Ctrl-C included) leaves neither a temporary file nor a changed `path`.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def save_run(folder: Path, tables: Tables, facts: RunFacts, breakdown: Breakdown, shares: WorkShares) -> list[Path]:
    """Write every table of a run to `folder` (made if need be).

    The cost terms are further columns of `iterations`, the shares of `iterations` and `chunks`.
    """
    import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types

    folder.mkdir(parents=True, exist_ok=True)
    metadata = {_FACTS_KEY: json.dumps(asdict(facts), sort_keys=True).encode()}
    costs = {_cost_column(resource): breakdown[resource] for resource in Resource}
    priced = {"iterations": costs | {_DECODE_SHARE: shares.decode}, "chunks": {_CHUNK_SHARE: shares.chunk}}
    paths = []
    for name in TABLE_NAMES:
        columns = getattr(tables, name) | priced.get(name, {})
        paths.append(folder / f"{name}.parquet")
        with atomic_path(paths[-1]) as path:
            pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path, compression="zstd")
    return paths


def load_run(folder: Path) -> tuple[Tables, RunFacts, Breakdown, WorkShares]:
    """What `save_run` wrote. Raises UserError for a folder that holds no run, or files of several."""
    if not folder.is_dir():
        raise UserError(str(folder), "no such folder", remedy=_REMEDY)
    tables: dict[str, Columns] = {}
    facts: dict[str, Any] = {}
    for name in TABLE_NAMES:
        tables[name], own_facts = _read(folder / f"{name}.parquet")
        if facts not in ({}, own_facts):
            raise UserError(str(folder), f"{name}.parquet is of another run than the tables before it", remedy=_REMEDY)
        facts = own_facts
    try:
        for name, columns in _COLUMNS.items():
            if not tables[name].keys() >= set(columns):
                raise KeyError(next(column for column in columns if column not in tables[name]))
        costs = {resource: tables["iterations"].pop(_cost_column(resource)) for resource in Resource}
        breakdown = {resource: values.astype(np.float64) for resource, values in costs.items()}
        shares = WorkShares(tables["iterations"].pop(_DECODE_SHARE), tables["chunks"].pop(_CHUNK_SHARE))
        return Tables(**tables), _facts(facts), breakdown, shares
    except (KeyError, TypeError) as error:
        found = f"is not a run of this version of servesim (missing or unknown: {error})"
        raise UserError(str(folder), found, remedy=_REMEDY) from error


def _facts(data: dict[str, Any]) -> RunFacts:
    """The facts as JSON has them. Raises TypeError or KeyError for those of another version."""
    replicas = tuple(ReplicaFacts(**replica) for replica in data["replicas"])
    tuples = {name: tuple(data[name]) for name in ("class_names", "turn_away_reasons")}
    return RunFacts(**data | tuples | {"replicas": replicas})


def _read(path: Path) -> tuple[Columns, dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        facts: dict[str, Any] = json.loads((table.schema.metadata or {})[_FACTS_KEY])
    except FileNotFoundError as error:
        raise UserError(str(path), "no such file", remedy=_REMEDY) from error
    except (OSError, pa.ArrowInvalid, KeyError, ValueError) as error:
        raise UserError(str(path), f"is not a table of a run ({type(error).__name__})", remedy=_REMEDY) from error
    return {name: table[name].to_numpy() for name in table.column_names}, facts


def _cost_column(resource: Resource) -> str:
    return f"cost_{resource.value}_ns"
