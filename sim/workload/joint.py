"""Prompt and output lengths that belong together: rows of a file, or a fitted table that ships with servesim."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from sim.errors import did_you_mean
from sim.options import Options
from sim.workload.base import Ints
from sim.workload.fields import refusal
from sim.workload.files import no_requests, read_table
from sim.workload.lengths import from_quantiles


class JointLengthOptions(Options):
    """Where pairs of prompt and output lengths come from: a bundled table, or a file's columns."""

    table: str | None = Field(default=None, description="name of a bundled table, say azure-conversation")
    path: str | None = Field(default=None, description="CSV file with a header; its rows are equally likely")
    prompt_column: str | None = Field(default=None, description="column of prompt lengths, tokens")
    output_column: str | None = Field(default=None, description="column of output lengths, tokens")

    @field_validator("table")
    @classmethod
    def _check_table(cls, name: str | None) -> str | None:
        known = length_tables()
        if name is None or name in known:
            return name
        raise PydanticCustomError(
            "unknown_name",
            "{found}; {valid}. {remedy}",
            {
                "found": f"unknown length table {name!r}",
                "valid": f"known: {', '.join(known)}",
                "remedy": did_you_mean(name, known),
            },
        )

    @model_validator(mode="after")
    def _check(self) -> JointLengthOptions:
        columns = (self.prompt_column, self.output_column)
        if (self.table is None) == (self.path is None):
            raise refusal("both table and path are given" if self.table else "nothing is given", "give table or path")
        if self.table is not None and columns != (None, None):
            raise refusal("a bundled table has no columns to choose", "prompt_column and output_column go with path")
        if self.path is not None and None in columns:
            raise refusal("the file's columns are not named", "give prompt_column and output_column")
        return self


class JointLengths(ABC):
    """Draws prompt and output lengths together."""

    @abstractmethod
    def draw(self, num: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """`num` prompt lengths and their output lengths, tokens, each >= 1."""


class LengthRows(JointLengths):
    """Rows of a CSV file, drawn with replacement."""

    def __init__(self, path: Path, prompt_column: str, output_column: str) -> None:
        """Reads the file; raises TraceError."""
        table = read_table(path)
        if not table.rows:
            raise no_requests(path)
        self._prompts, self._outputs = table.counts(prompt_column), table.counts(output_column)

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """See the base."""
        rows = rng.integers(len(self._prompts), size=num)
        return self._prompts[rows], self._outputs[rows]


class BandedQuantiles(JointLengths):
    """Prompts from one table of quantiles, outputs from the table of the prompt's band.

    The bands are equal shares of the prompts, shortest first. What a fitted table keeps of its trace: both
    distributions between the quantiles' steps, and how outputs depend on the band of the prompt. What is
    lost: dependence inside a band, and any change over time.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        """`table` is one of `sim/data/lengths/*.json`."""
        self._prompt_quantiles = [(p, v) for p, v in table["prompt_quantiles"]]
        self._bands = [list(zip(table["output_shares"], band, strict=True)) for band in table["output_bands"]]

    def draw(self, num: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """See the base."""
        prompt_share, output_share = rng.random((num, 2)).T
        outputs = np.empty(num, dtype=np.int64)
        band_of = (prompt_share * len(self._bands)).astype(np.int64)
        for index, quantiles in enumerate(self._bands):
            rows = band_of == index
            outputs[rows] = from_quantiles(quantiles, output_share[rows])
        return from_quantiles(self._prompt_quantiles, prompt_share), outputs


def build_joint(options: JointLengthOptions) -> JointLengths:
    """What the options describe. Reads the file, if any; raises TraceError."""
    if options.table is not None:
        return BandedQuantiles(length_table(options.table))
    return LengthRows(Path(str(options.path)), str(options.prompt_column), str(options.output_column))


@lru_cache(maxsize=1)
def length_tables() -> tuple[str, ...]:
    """Names of the bundled tables, sorted."""
    folder = resources.files("sim") / "data" / "lengths"
    return tuple(sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json")))


def length_table(name: str) -> dict[str, Any]:
    """A bundled table with its source, licence and figures."""
    text = (resources.files("sim") / "data" / "lengths" / f"{name}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
