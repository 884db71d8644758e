"""Iteration time from measured kernels: an artifact's tables, composed term by term.

An iteration is what its rows cost in the products and norms (`tokens`), what its sampled rows cost
(`sequences`), and its attention: one call over decodes and prompts together where that was measured
(`mixed_attention`), else the sum of both. Where the measurement is of one prompt and an iteration has
several, they count as one with as many (query, key) pairs at their mean context. Decodes count as so
many of their mean context; what their spread adds is a term of its own (`skew`): the batch is taken as two
groups with its mean, variance and longest context. Batches up to the largest CUDA graph are padded to the
next captured size, as vLLM does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sim.cost.artifact import Artifact, check_target, read_artifact
from sim.cost.base import CostModel, CostOptions, Resource, Target, decode_contexts
from sim.cost.grids import Line, bilinear, trilinear
from sim.cost.measured import Tables, levels
from sim.options import CountOrZero
from sim.step import StepArrays, StepShape

MAX_LISTED = 16384
"""Below this, what depends on a number of rows is looked up; from here on it is computed."""


class TableOptions(CostOptions):
    """Options of `kind: table`."""

    kind: Literal["table"] = "table"
    artifact: str = Field(description="a cost artifact (JSON), relative to the scenario's folder")
    out_of_range: Literal["warn", "error", "allow"] = Field(
        default="warn", description="iterations beyond what was measured: say so, refuse the run, or keep quiet"
    )
    max_cudagraph_capture_size: CountOrZero = Field(
        default=512, description="largest batch that runs as a CUDA graph, padded to a captured size; 0: none does"
    )


class _Decodes(NamedTuple):
    """What the tables say of one number of decoding requests."""

    line: Line
    """Their attention by mean context, ns."""
    skew: list[list[float]] | None
    """What unequal contexts add by (ratio, spread), ns."""
    mixed_skew: list[list[float]] | None
    mixed: list[list[list[float]]] | None
    """Attention of them and a chunk by (tokens, context of the chunk, mean context), ns."""


class Table(CostModel):
    """Prices from measured tables. Batch sizes are looked at once and remembered; nothing else is kept."""

    Options = TableOptions

    def __init__(self, artifact: Artifact, max_cudagraph_capture_size: int = 512) -> None:
        self.artifact = artifact
        self._tables = tables = Tables(artifact)
        self._step_ns = artifact.step_us * 1e3
        self._host_ns = artifact.host_us * 1e3
        self._host_request_ns = artifact.host_us_per_request * 1e3
        self._padded = _padded(artifact.cuda_graph_sizes, max_cudagraph_capture_size)
        lines = [(line, term.is_communication) for term, line in tables.lines("tokens")]
        self._tokens = _Listed([line for line, _ in lines], self._padded, self._step_ns)
        self._communication = _Listed([line for line, between_gpus in lines if between_gpus], self._padded)
        self._sequences = _Listed([line for _, line in tables.lines("sequences")])
        self._memo: dict[int, _Decodes] = {}

    @classmethod
    def build(cls, options: CostOptions, target: Target) -> Table:
        """Raises ArtifactError when the artifact cannot be read or is of something else than `target`."""
        own = cast(TableOptions, options)
        artifact = read_artifact(Path(own.artifact))
        check_target(artifact, target)
        return cls(artifact, own.max_cudagraph_capture_size)

    def price(self, shape: StepShape) -> int:
        """The sum of the terms, rounded to ns; at least 1."""
        num_decode = shape.num_decode
        if shape.prefills:
            return int(self._mixed_ns(shape) + 0.5) or 1
        ns = self._row_ns(num_decode, shape.num_sampled)
        if num_decode:
            decodes = self._memo.get(num_decode) or self._decodes(num_decode)
            ns += decodes.line.at(shape.decode_context_sum / num_decode + 1.0)
            if decodes.skew is not None:
                ns += self._skew_ns(decodes.skew, self._tables.skew_axes, shape)
        return int(ns + 0.5) or 1

    def price_decode_run(self, shape: StepShape, num_steps: int) -> NDArray[np.int64]:
        """As `price`: while a batch decodes on, its mean context grows and its spread stays."""
        num_decode = shape.num_decode
        decodes = self._memo.get(num_decode) or self._decodes(num_decode)
        run = self._row_ns(num_decode, shape.num_sampled)
        attention = decodes.line.at_all(decode_contexts(shape, num_steps) / num_decode + 1.0)
        total = run + attention
        if decodes.skew is not None:
            total = total + self._skew_ns(decodes.skew, self._tables.skew_axes, shape)
        return np.maximum((total + 0.5).astype(np.int64), 1)

    def host_ns(self, shape: StepShape) -> int:
        """Fixed part and a part per request."""
        num_requests = shape.num_decode + len(shape.prefills)
        return int(self._host_ns + num_requests * self._host_request_ns + 0.5)

    def breakdown(self, steps: StepArrays) -> dict[Resource, NDArray[np.float64]]:
        """Of each product, what one row costs is bandwidth (its weights are read) and the rest is compute.

        Attention of decodes is bandwidth, of prompts compute. What unequal contexts add, and what every
        iteration costs, is overhead.
        """
        parts = np.array([self._parts_ns(shape) for shape in _shapes(steps)]).reshape(-1, 4)
        return {resource: parts[:, i] for i, resource in enumerate(Resource)}

    def coverage(self, steps: StepArrays) -> NDArray[np.int8]:
        """That of the coordinate that lies worst: rows, decodes, their mean context, chunk and its context."""
        chunks = [_one_chunk(shape.prefills) for shape in _shapes(steps)]
        num_tokens, chunk, context = np.array(chunks, dtype=np.float64).reshape(-1, 3).T
        rows = steps.num_decode + num_tokens.astype(np.int64)
        if self._padded:
            rows = np.where(
                rows < len(self._padded), np.array(self._padded)[rows.clip(max=len(self._padded) - 1)], rows
            )
        return levels(self._tables, steps, chunk, context, rows)

    def facts(self) -> dict[str, Any]:
        """The artifact's identity and what it leaves out."""
        own = self.artifact
        return {
            "artifact": f"{own.model} on {own.tensor_parallel} × {own.hardware}",
            "sha256": own.sha256,
            "measured_on": own.measured_on,
            "source": own.source,
            "holdout_error": dict(own.holdout_error),
            "missing": list(own.missing),
        }

    def _row_ns(self, num_tokens: int, num_sampled: int) -> float:
        """All that depends on numbers of rows only."""
        tokens = self._tokens
        ns = tokens.ns[num_tokens] if num_tokens < tokens.size else tokens.beyond(num_tokens)
        if num_sampled:
            rows = self._sequences
            ns += rows.ns[num_sampled] if num_sampled < rows.size else rows.beyond(num_sampled)
        return ns

    def _mixed_ns(self, shape: StepShape) -> float:
        """An iteration with prompt chunks."""
        num_decode = shape.num_decode
        num_tokens, chunk, context = _one_chunk(shape.prefills)
        ns = self._row_ns(num_tokens + num_decode, shape.num_sampled)
        if not num_decode:
            return ns + self._tables.prefill_ns(chunk, context)
        decodes = self._memo.get(num_decode) or self._decodes(num_decode)
        mean = shape.decode_context_sum / num_decode + 1.0
        if decodes.mixed is None:
            ns += self._tables.prefill_ns(chunk, context) + decodes.line.at(mean)
        else:
            ns += trilinear(self._tables.mixed_axes, decodes.mixed, chunk, context, mean)
        if decodes.mixed_skew is not None:
            ns += self._skew_ns(decodes.mixed_skew, self._tables.mixed_skew_axes, shape)
        return ns

    def _skew_ns(self, rows: list[list[float]], axes: list[list[float]], shape: StepShape) -> float:
        """What unequal contexts add.

        Two groups with the batch's mean, variance and longest context: with d the distance from the mean to the
        longest, the longer group is a part v/(v + d²) of the batch. Both sides are kept as integers
        times the batch size, so that they stay the same to the last bit while the batch decodes on.
        """
        num_decode, context_sum = shape.num_decode, shape.decode_context_sum
        variance = num_decode * shape.decode_context_sum_sq - context_sum * context_sum
        distance = num_decode * shape.decode_context_max - context_sum
        if variance <= 0 or distance <= 0:
            return 0.0
        ratio = variance / (variance + distance * distance)
        spread = distance / num_decode / (1.0 - ratio)
        return bilinear(axes, rows, ratio, spread)

    def _decodes(self, num_decode: int) -> _Decodes:
        tables = self._tables
        found = _Decodes(
            line=tables.decode_line(num_decode),
            skew=tables.at_batch("decode_skew", num_decode),
            mixed_skew=tables.at_batch("mixed_skew", num_decode),
            mixed=tables.at_batch("mixed_attention", num_decode),
        )
        self._memo[num_decode] = found
        return found

    def _parts_ns(self, shape: StepShape) -> tuple[float, float, float, float]:
        """Compute, bandwidth, communication and overhead of one iteration."""
        num_decode, num_tokens = shape.num_decode, shape.num_scheduled_tokens
        rows_ns = self._row_ns(num_tokens, shape.num_sampled)
        communication, products = self._communication.at(num_tokens), rows_ns - self._step_ns
        products -= communication
        one_row = self._row_ns(min(1, num_tokens), min(1, shape.num_sampled)) - self._step_ns
        bandwidth = min(one_row - self._communication.at(min(1, num_tokens)), products)
        compute = products - bandwidth
        total = self._mixed_ns(shape) if shape.prefills else float(self.price(shape))
        skew = decode = 0.0
        if num_decode:
            decodes = self._memo.get(num_decode) or self._decodes(num_decode)
            rows = decodes.mixed_skew if shape.prefills else decodes.skew
            axes = self._tables.mixed_skew_axes if shape.prefills else self._tables.skew_axes
            skew = self._skew_ns(rows, axes, shape) if rows is not None else 0.0
            decode = decodes.line.at(shape.decode_context_sum / num_decode + 1.0)
        attention = max(total - rows_ns - skew, 0.0)
        decode = min(decode, attention)
        return compute + attention - decode, bandwidth + decode, communication, self._step_ns + skew


class _Listed:
    """The sum of some functions at every whole number up to `MAX_LISTED`, and beyond."""

    def __init__(self, lines: list[Line], padded: list[int] | None = None, constant_ns: float = 0.0) -> None:
        """`padded`: the number that is looked up in place of each of the first ones."""
        self._lines = lines
        self._constant_ns = constant_ns
        places = np.arange(MAX_LISTED)
        places[: len(padded or ())] = padded or []
        total = np.full(MAX_LISTED, constant_ns)
        for line in lines:
            total = total + line.at_all(places.astype(np.float64))
        self.ns: list[float] = total.tolist()
        self.size = MAX_LISTED

    def beyond(self, x: int) -> float:
        """The value at a number that is not listed."""
        return self._constant_ns + sum(line.at(x) for line in self._lines)

    def at(self, x: int) -> float:
        """The value at any number."""
        return self.ns[x] if x < self.size else self.beyond(x)


def _padded(sizes: list[int], largest: int) -> list[int]:
    """For every number of rows up to the largest captured one, the captured size that it runs as."""
    captured = sorted(size for size in sizes if size <= largest)
    return [0, *(captured[bisect_left(captured, rows)] for rows in range(1, captured[-1] + 1))] if captured else []


def _one_chunk(prefills: tuple[tuple[int, int], ...]) -> tuple[int, float, float]:
    """The tokens of all chunks, and the one chunk and context that stand for them.

    A chunk of n on a context of c has n·c + n(n+1)/2 pairs. The one has the same number of pairs as all of
    them together, on their mean context, weighted by tokens; of a single chunk it is that chunk.
    """
    if len(prefills) == 1:
        num_tokens, own_context = prefills[0]
        return num_tokens, num_tokens, own_context
    num_tokens = weighted = pairs = 0
    for tokens, own_context in prefills:
        num_tokens += tokens
        weighted += tokens * own_context
        pairs += tokens * (2 * own_context + tokens + 1)
    if not num_tokens:
        return 0, 0.0, 0.0
    context = weighted / num_tokens
    half = context + 0.5
    return num_tokens, sqrt(half * half + pairs) - half, context


def _shapes(steps: StepArrays) -> Iterator[StepShape]:
    """The iterations as shapes, one at a time."""
    bounds = np.searchsorted(steps.prefill_iteration, np.arange(len(steps.num_decode) + 1))
    chunks = list(zip(steps.prefill_num_tokens.tolist(), steps.prefill_context.tolist(), strict=True))
    columns = zip(*(column.tolist() for column in steps[:4]), steps.num_sampled.tolist(), strict=True)
    for i, (num_decode, context_sum, context_sum_sq, context_max, num_sampled) in enumerate(columns):
        prefills = tuple(chunks[bounds[i] : bounds[i + 1]])
        yield StepShape(num_decode, context_sum, context_sum_sq, context_max, prefills, num_sampled)
