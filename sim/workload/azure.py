"""Azure LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens`.

Published at github.com/Azure/AzurePublicDataset under CC-BY-4.0; described in Patel et al., "Splitwise",
ISCA 2024. Time stamps have seven fractional digits in 2023; those of the 2024 week also carry a zone.
"""

from __future__ import annotations

import re
from datetime import date
from functools import lru_cache
from pathlib import Path

import numpy as np

from sim.clock import NS_PER_S
from sim.errors import TraceError
from sim.workload.base import Trace, TraceOptions, TraceRows
from sim.workload.files import bad_cell, no_requests, read_table
from sim.workload.replay import in_arrival_order

HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]

_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):(\d\d))?", re.ASCII
)


class AzureOptions(TraceOptions):
    """A trace of the Azure public dataset."""


class AzureTrace(Trace):
    """Reads the Azure CSV format. Requests share no tokens: the trace has no prompt identity."""

    Options = AzureOptions

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def build(cls, options: TraceOptions) -> AzureTrace:
        """A reader of `options.path`."""
        return cls(Path(options.path))

    def read(self) -> TraceRows:
        """All rows; see the base."""
        table = read_table(self._path)
        if table.header != HEADER:
            raise TraceError(
                f"{self._path}:1",
                f"the header is {','.join(table.header)!r}",
                valid=f"an Azure trace begins with {','.join(HEADER)!r}",
                remedy="Other columns are read by kind: csv.",
            )
        if not table.rows:
            raise no_requests(self._path)
        stamps = [self._stamp_ns(line, cell) for line, cell in table.column("TIMESTAMP")]
        return in_arrival_order(
            np.array(stamps, dtype=np.int64), table.counts("ContextTokens"), table.counts("GeneratedTokens")
        )

    def _stamp_ns(self, line: int, cell: str) -> int:
        match = _STAMP.fullmatch(cell.strip())
        day = _day(match.group(1)) if match else None
        if match is None or day is None:
            valid = "expected a time like 2023-11-16 18:15:46.6805900"
            raise bad_cell(self._path, line, "TIMESTAMP", cell, valid=valid)
        _, hour, minute, second, fraction, sign, zone_hour, zone_minute = match.groups()
        seconds = ((day * 24 + int(hour)) * 60 + int(minute)) * 60 + int(second)
        if sign:
            seconds -= int(f"{sign}1") * (int(zone_hour) * 60 + int(zone_minute)) * 60
        return seconds * NS_PER_S + int((fraction or "0").ljust(9, "0"))


@lru_cache(maxsize=64)
def _day(text: str) -> int | None:
    """Days since 1970, or None for a date that does not exist or lies outside what nanoseconds can count."""
    try:
        day = date.fromisoformat(text).toordinal() - date(1970, 1, 1).toordinal()
    except ValueError:
        return None
    return day if abs(day) < 100_000 else None
