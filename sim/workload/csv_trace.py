"""Traces in any CSV file: the scenario says which columns hold arrivals and lengths."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from sim.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from sim.workload.base import Ints, Trace, TraceOptions, TraceRows
from sim.workload.files import Table, bad_cell, no_requests, read_table
from sim.workload.replay import in_arrival_order

_UNIT_NS = {"s": NS_PER_S, "ms": NS_PER_MS, "us": NS_PER_US, "ns": 1}
_MAX_NS = 2**62


class CsvOptions(TraceOptions):
    """A CSV file with a header."""

    prompt_column: str = Field(description="column of prompt lengths, tokens")
    output_column: str = Field(description="column of output lengths, tokens")
    arrival_column: str | None = Field(
        default=None, description="column of arrival times, from any origin; omitted: every request arrives at 0"
    )
    arrival_unit: Literal["s", "ms", "us", "ns"] = Field(default="s", description="unit of the arrival column")


class CsvTrace(Trace):
    """Reads a CSV file with a header; columns that are not named are ignored."""

    Options = CsvOptions

    def __init__(self, options: CsvOptions) -> None:
        self._options = options
        self._path = Path(options.path)

    @classmethod
    def build(cls, options: TraceOptions) -> CsvTrace:
        """A reader of `options.path`."""
        return cls(CsvOptions.model_validate(options))

    def read(self) -> TraceRows:
        """All rows; see the base. Arrivals are numbers >= 0 and rounded to the nanosecond."""
        table = read_table(self._path)
        prompt_tokens = table.counts(self._options.prompt_column)
        output_tokens = table.counts(self._options.output_column)
        if not table.rows:
            raise no_requests(self._path)
        return in_arrival_order(self._arrival_ns(table), prompt_tokens, output_tokens)

    def _arrival_ns(self, table: Table) -> Ints:
        name = self._options.arrival_column
        if name is None:
            return np.zeros(len(table.rows), dtype=np.int64)
        return np.array([self._time_ns(name, line, cell) for line, cell in table.column(name)], dtype=np.int64)

    def _time_ns(self, name: str, line: int, cell: str) -> int:
        """Decimal, because a float of seconds since 1970 is off by more than 100 ns."""
        unit = self._options.arrival_unit
        try:
            value = Decimal(cell.strip() if "_" not in cell else "")
            if value.is_finite() and 0 <= value < _MAX_NS:
                time_ns = round(value * _UNIT_NS[unit])
                if time_ns < _MAX_NS:
                    return time_ns
        except InvalidOperation:
            pass
        raise bad_cell(self._path, line, name, cell, valid=f"expected a time in {unit}, zero or more")
