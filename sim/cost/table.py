"""Iteration time from measured kernels: an artifact's tables, composed term by term.

An iteration is what its rows cost in the products and norms (`tokens`; `experts`, at the number of them that
so many rows are expected to touch), what its sampled rows cost (`sequences`), and its attention: one call over
decodes and prompts together where that was measured (`mixed_attention`), else the sum of both. What the rows of
prompts cost apart from those of decodes (`prefill_tokens`) is known where whole iterations were measured. Where
the measurement is of one prompt and an iteration has several, they count as one with as many (query, key) pairs
at their mean context. Decodes count as so many of their mean context; what their spread adds is a term of its
own (`skew`): the batch is taken as two groups with its mean, variance and longest context. Where the artifact
lists captured sizes, iterations of so many rows are padded to the next one, as vLLM's CUDA graphs are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sim.cost.artifact import Artifact, check_target, read_artifact
from sim.cost.base import CostModel, CostOptions, Resource, Target, decode_contexts
from sim.cost.grids import Floats, Line, bilinear, multilinear_all, trilinear
from sim.cost.measured import ExpertsLine, Tables, levels
from sim.cost.standins import Chunks, one_chunk, one_chunks, padded_sizes, two_groups, two_groups_of
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
        default=512,
        description="largest number of rows that runs as a CUDA graph, padded to the next size that the artifact lists "
        "as captured; 0: none does",
    )


class _Decodes(NamedTuple):
    """What the tables say of one number of decoding requests."""

    rows_ns: float
    """All that depends on numbers of rows, when each of them is sampled."""
    line: Line
    """Their attention by mean context, ns."""
    attention: tuple[list[float], list[float], list[float]]
    """The same, as the parts of the line."""
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
        self._max_cudagraph_capture_size = max_cudagraph_capture_size
        self._tables = tables = Tables(artifact)
        self._step_ns = artifact.step_us * 1e3
        self._host_ns = artifact.host_us * 1e3
        self._host_request_ns = artifact.host_us_per_request * 1e3
        padded = padded_sizes(artifact.cuda_graph_sizes, max_cudagraph_capture_size)
        lines = [(line, term.is_communication) for term, line in tables.lines("tokens")]
        self._tokens = _Listed([*(line for line, _ in lines), *tables.experts], padded, self._step_ns)
        self._communication = _Listed([line for line, between_gpus in lines if between_gpus], padded)
        sampled = [(line, term.is_communication) for term, line in tables.lines("sequences")]
        self._sequences = _Listed([line for line, _ in sampled])
        self._gathers = _Listed([line for line, between_gpus in sampled if between_gpus])
        self._prefill_tokens = _Listed([line for _, line in tables.lines("prefill_tokens")])
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
        num_decode, context_sum, context_sum_sq, context_max, prefills, num_sampled, _, _, _ = shape
        if prefills:
            return int(self._mixed_ns(shape) + 0.5) or 1
        if not num_decode:
            return int(self._row_ns(0, num_sampled) + 0.5) or 1
        decodes = self._memo.get(num_decode) or self._decodes(num_decode)
        ns = decodes.rows_ns if num_sampled == num_decode else self._row_ns(num_decode, num_sampled)
        breaks, base, slope = decodes.attention
        mean = context_sum / num_decode + 1.0
        i = bisect_right(breaks, mean)  # `Line.at`, written out: every decode step of every run passes here
        ns += base[i] + slope[i] * mean
        if decodes.skew is not None:
            ratio, spread = two_groups(num_decode, context_sum, context_sum_sq, context_max)
            if spread:
                ns += bilinear(self._tables.skew_axes, decodes.skew, ratio, spread)
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
        chunks = one_chunks(steps)
        num_tokens, num_sampled = steps.num_decode + chunks.num_tokens, steps.num_sampled
        communication = self._communication_ns_all(num_tokens, num_sampled)
        products = self._row_ns_all(num_tokens, num_sampled) - communication
        one = np.minimum(num_tokens, 1), np.minimum(num_sampled, 1)
        one_row = self._row_ns_all(*one) - self._communication_ns_all(*one)
        bandwidth = np.minimum(one_row, products)
        decode_ns, prompt_ns, skew_ns = self._attention_ns_all(steps, chunks)
        return {
            Resource.COMPUTE: products - bandwidth + prompt_ns,
            Resource.BANDWIDTH: bandwidth + decode_ns,
            Resource.COMMUNICATION: communication,
            Resource.OVERHEAD: self._step_ns + skew_ns,
        }

    def coverage(self, steps: StepArrays) -> NDArray[np.int8]:
        """That of the coordinate that lies worst: rows, decodes, their mean context, chunk and its context."""
        chunks = one_chunks(steps)
        rows = self._tokens.looked_up(steps.num_decode + chunks.num_tokens)
        return levels(self._tables, steps, chunks, rows)

    def perturbed(self, rng: np.random.Generator) -> Table | None:
        """By the artifact's own errors."""
        artifact = self.artifact.perturbed(rng)
        return None if artifact is None else Table(artifact, self._max_cudagraph_capture_size)

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
        num_tokens, chunk, context = one_chunk(shape.prefills)
        prompts = self._prefill_tokens
        ns = prompts.ns[num_tokens] if num_tokens < prompts.size else prompts.beyond(num_tokens)
        ns += self._row_ns(num_tokens + num_decode, shape.num_sampled)
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
        """What unequal contexts add."""
        ratio, spread = two_groups(
            shape.num_decode, shape.decode_context_sum, shape.decode_context_sum_sq, shape.decode_context_max
        )
        return bilinear(axes, rows, ratio, spread) if spread else 0.0

    def _row_ns_all(self, num_tokens: NDArray[np.int64], num_sampled: NDArray[np.int64]) -> Floats:
        """`_row_ns` of many iterations, without what each of them costs."""
        sampled = np.where(num_sampled > 0, self._sequences.at_all(num_sampled), 0.0)
        total: Floats = self._tokens.at_all(num_tokens) - self._step_ns + sampled
        return total

    def _communication_ns_all(self, num_tokens: NDArray[np.int64], num_sampled: NDArray[np.int64]) -> Floats:
        """What of `_row_ns_all` is spent between GPUs."""
        total: Floats = np.where(num_sampled > 0, self._gathers.at_all(num_sampled), 0.0)
        return total + self._communication.at_all(num_tokens)

    def _attention_ns_all(self, steps: StepArrays, chunks: Chunks) -> tuple[Floats, Floats, Floats]:
        """Attention of decodes and of prompts, and what unequal contexts add, of many iterations."""
        tables, num_decode = self._tables, steps.num_decode
        has_chunk, (ratio, spread) = chunks.num_tokens > 0, two_groups_of(steps)
        decode_ns, prompt_ns, skew_ns = (np.zeros(len(num_decode)) for _ in range(3))
        prompt_ns[has_chunk] = tables.prefill_ns_all(chunks.chunk[has_chunk], chunks.context[has_chunk])
        rows_ns = np.where(has_chunk, self._prefill_tokens.at_all(chunks.num_tokens), 0.0)
        mean = steps.decode_context_sum / np.maximum(num_decode, 1) + 1.0
        for batch, own in _groups(num_decode):
            decodes = self._memo.get(batch) or self._decodes(batch)
            decode_ns[own] = decodes.line.at_all(mean[own])
            together = own[has_chunk[own]]
            if decodes.mixed is not None and len(together):
                places = (chunks.chunk[together], chunks.context[together], mean[together])
                both = multilinear_all(tables.mixed_axes, np.array(decodes.mixed), places)
                decode_ns[together] = np.minimum(decode_ns[together], both)
                prompt_ns[together] = both - decode_ns[together]
            for rows, axes, which in (
                (decodes.skew, tables.skew_axes, own[~has_chunk[own]]),
                (decodes.mixed_skew, tables.mixed_skew_axes, together),
            ):
                if rows is not None:
                    added = multilinear_all(axes, np.array(rows), (ratio[which], spread[which]))
                    skew_ns[which] = np.where(spread[which] > 0, added, 0.0)
        return decode_ns, prompt_ns + rows_ns, skew_ns

    def _decodes(self, num_decode: int) -> _Decodes:
        tables = self._tables
        line = tables.decode_line(num_decode)
        found = _Decodes(
            rows_ns=self._row_ns(num_decode, num_decode),
            line=line,
            attention=(line.breaks, line.base, line.slope),
            skew=tables.at_batch("decode_skew", num_decode),
            mixed_skew=tables.at_batch("mixed_skew", num_decode),
            mixed=tables.at_batch("mixed_attention", num_decode),
        )
        self._memo[num_decode] = found
        return found


class _Listed:
    """The sum of some functions at every whole number up to `MAX_LISTED`, and beyond."""

    def __init__(
        self, lines: Sequence[Line | ExpertsLine], padded: list[int] | None = None, constant_ns: float = 0.0
    ) -> None:
        """`padded`: the number that is looked up in place of each of the first ones."""
        self._lines = lines
        self._constant_ns = constant_ns
        self._places = places = np.arange(MAX_LISTED)
        places[: len(padded or ())] = padded or []
        total = np.full(MAX_LISTED, constant_ns)
        for line in lines:
            total = total + line.at_all(places.astype(np.float64))
        self.ns: list[float] = total.tolist()
        self.size = MAX_LISTED

    def beyond(self, x: int) -> float:
        """The value at a number that is not listed."""
        return self._constant_ns + sum(line.at(x) for line in self._lines)

    def at_all(self, x: NDArray[np.int64]) -> Floats:
        """The values at many numbers."""
        values: Floats = np.array(self.ns)[np.minimum(x, self.size - 1)]
        for i in np.flatnonzero(x >= self.size):
            values[i] = self.beyond(int(x[i]))
        return values

    def looked_up(self, x: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers that are looked up in place of these."""
        return np.where(x < self.size, self._places[np.minimum(x, self.size - 1)], x)


def _groups(batches: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Every batch size above zero that occurs, and where; of no iterations `split` still makes one piece."""
    order = np.argsort(batches, kind="stable")
    sizes, starts = np.unique(batches[order], return_index=True)
    for size, own in zip(sizes.tolist(), np.split(order, starts[1:]), strict=False):
        if size:
            yield size, own
