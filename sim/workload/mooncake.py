"""Mooncake traces: one JSON object a line, with the identity of the prompt's blocks.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`. Published at
github.com/kvcache-ai/Mooncake under Apache-2.0; described in Qin et al., "Mooncake", FAST 2025.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from sim.clock import NS_PER_MS
from sim.errors import TraceError
from sim.options import Count
from sim.tokens import UNIQUE, Run, TokenRuns
from sim.workload.base import Trace, TraceOptions, TraceRows
from sim.workload.files import MAX_TOKENS, bad_cell, no_requests, read_text
from sim.workload.replay import in_arrival_order

_MAX_MS = 10**12


class MooncakeOptions(TraceOptions):
    """A JSONL trace in Mooncake's format."""

    hash_block_tokens: Count = Field(default=512, description="tokens that one hash id stands for")


class MooncakeTrace(Trace):
    """Reads Mooncake's JSONL. Keys other than the four are ignored; `hash_ids` may be absent.

    Equal hash ids at the beginning of two prompts mean equal tokens, so each id names a stream of
    `hash_block_tokens` tokens and a prompt is a chain of them, the last one cut to the prompt's length.
    Ids mean the same in every class that replays the same file and nothing elsewhere.
    """

    Options = MooncakeOptions

    def __init__(self, options: MooncakeOptions) -> None:
        self._path = Path(options.path)
        self._block_tokens = options.hash_block_tokens

    @classmethod
    def build(cls, options: TraceOptions) -> MooncakeTrace:
        """A reader of `options.path`."""
        return cls(MooncakeOptions.model_validate(options))

    def read(self) -> TraceRows:
        """All rows; see the base."""
        arrivals_ns, prompts, outputs = array("q"), array("q"), array("q")
        hash_ids, counts = array("q"), array("q")
        for line, row in self._objects():
            prompt_tokens = self._length(line, row, "input_length")
            prompts.append(prompt_tokens)
            outputs.append(self._length(line, row, "output_length"))
            arrivals_ns.append(self._arrival_ns(line, row))
            counts.append(self._take_hash_ids(line, row, prompt_tokens, hash_ids))
        if not prompts:
            raise no_requests(self._path)
        runs = _HashRuns(
            str(self._path), self._block_tokens, prompts, hash_ids, array("q", accumulate(counts, initial=0))
        )
        return in_arrival_order(np.array(arrivals_ns), np.array(prompts), np.array(outputs), runs)

    def _objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line number and object of every line that is not blank."""
        for line, text in enumerate(read_text(self._path).split("\n"), start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{self._path}:{line}", f"this is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise bad_cell(self._path, line, "the line", row, valid="expected a JSON object")
            yield line, row

    def _length(self, line: int, row: dict[str, Any], key: str) -> int:
        value = row.get(key)
        if type(value) is int and 1 <= value <= MAX_TOKENS:
            return value
        raise bad_cell(self._path, line, key, value, valid=f"expected a whole number from 1 to {MAX_TOKENS}")

    def _arrival_ns(self, line: int, row: dict[str, Any]) -> int:
        value = row.get("timestamp")
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_MS:
            return round(value * NS_PER_MS)
        raise bad_cell(self._path, line, "timestamp", value, valid="expected milliseconds, zero or more")

    def _take_hash_ids(self, line: int, row: dict[str, Any], prompt_tokens: int, into: array[int]) -> int:
        """Appends the row's ids to `into`; returns how many there are, 0 when the row has none at all."""
        ids = row.get("hash_ids")
        if ids is None:
            return 0
        expected = -(-prompt_tokens // self._block_tokens)
        if not isinstance(ids, list) or len(ids) != expected:
            found = f"{len(ids)} hash_ids" if isinstance(ids, list) else f"hash_ids is {ids!r}"
            raise TraceError(
                f"{self._path}:{line}",
                f"{found} for an input_length of {prompt_tokens}",
                valid=f"expected {expected}, one for each {self._block_tokens} tokens begun",
                remedy="Correct the row, or set hash_block_tokens.",
            )
        try:
            into.extend(ids)
        except (TypeError, OverflowError) as error:
            valid = "expected 64-bit whole numbers"
            raise bad_cell(self._path, line, "hash_ids", ids, valid=valid) from error
        return expected


class _HashRuns:
    """Token identity by row, made when asked for from the ids of all rows in one flat array."""

    def __init__(
        self, namespace: str, block_tokens: int, prompts: array[int], hash_ids: array[int], starts: array[int]
    ) -> None:
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._prompts = prompts
        self._hash_ids = hash_ids
        self._starts = starts

    def __call__(self, row: int) -> TokenRuns:
        ids = self._hash_ids[self._starts[row] : self._starts[row + 1]]
        if not ids:
            return UNIQUE
        size = self._block_tokens
        runs = [Run((self._namespace, hash_id), size) for hash_id in ids]
        runs[-1] = Run(runs[-1].stream, self._prompts[row] - size * (len(ids) - 1))
        return TokenRuns(tuple(runs))
