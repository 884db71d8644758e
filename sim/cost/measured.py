"""An artifact's tables, ready to price with, and how far an iteration lies from what they measured."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.artifact import AXES, Artifact, Term
from sim.cost.base import Coverage
from sim.cost.grids import Floats, Line, along_first_axis, bilinear, multilinear_all
from sim.cost.standins import Chunks
from sim.errors import ArtifactError
from sim.step import StepArrays

_ONCE = tuple(kind for kind in AXES if kind not in ("tokens", "sequences"))
_NEEDED = ("tokens", "decode_attention", "prefill_attention")


class Tables:
    """The terms of an artifact by kind. Times are those of a whole iteration, ns."""

    def __init__(self, artifact: Artifact) -> None:
        """Raises ArtifactError when a term that every iteration needs is missing, or one is there twice."""
        for kind in AXES:
            num_terms = len(artifact.of_kind(kind))
            if (kind in _NEEDED and not num_terms) or (kind in _ONCE and num_terms > 1):
                raise ArtifactError("cost.artifact", f"{num_terms} terms of {kind}", valid="expected one")
        self._artifact = artifact
        self._terms = {kind: terms[0] for kind in _ONCE if (terms := artifact.of_kind(kind))}
        self._values = {kind: term.table_ns() for kind, term in self._terms.items()}
        self._prefill_rows: list[list[float]] = self._values["prefill_attention"].tolist()
        self.mixed_axes = self.points("mixed_attention")[1:]
        """Points of the chunk, of its context and of the decodes' mean context; empty if not measured."""
        self.skew_axes = self.points("decode_skew")[1:]
        """Points of ratio and spread; empty if not measured. Also of the next."""
        self.mixed_skew_axes = self.points("mixed_skew")[1:]

    def points(self, kind: str) -> list[list[float]]:
        """The measured points of a kind that occurs once, axis by axis; empty if it does not occur."""
        return self._terms[kind].points if kind in self._terms else []

    def lines(self, kind: str) -> list[tuple[Term, Line]]:
        """The terms of one variable (`tokens` or `sequences`) as functions."""
        return [
            (term, Line.through(np.array(term.axes[0].points), term.table_ns()))
            for term in self._artifact.of_kind(kind)
        ]

    def decode_line(self, num_decode: int) -> Line:
        """Attention of so many decodes, by their mean context (themselves included)."""
        batch, context = self.points("decode_attention")
        return Line.through(np.array(context), along_first_axis(batch, self._values["decode_attention"], num_decode))

    def prefill_ns(self, num_tokens: float, context: float) -> float:
        """Attention of one prompt chunk."""
        return bilinear(self.points("prefill_attention"), self._prefill_rows, num_tokens, context)

    def prefill_ns_all(self, num_tokens: Floats, context: Floats) -> Floats:
        """`prefill_ns` of many."""
        return multilinear_all(
            self.points("prefill_attention"), self._values["prefill_attention"], (num_tokens, context)
        )

    def at_batch(self, kind: str, num_decode: int) -> Any:
        """A table whose first axis is the batch, at one batch size, as nested lists; None if it was not measured."""
        if kind not in self._terms:
            return None
        return along_first_axis(self.points(kind)[0], self._values[kind], num_decode).tolist()


class _Worst:
    """The worst level of several coordinates, iteration by iteration."""

    def __init__(self, num_iterations: int) -> None:
        self.levels = np.full(num_iterations, Coverage.MEASURED, dtype=np.int8)

    def take(self, points: list[float], values: NDArray[Any], of: NDArray[np.bool_]) -> None:
        """Put the iterations `of` against the measured points of one coordinate."""
        grid = np.array(points)
        level = np.where(np.isin(values, grid), Coverage.MEASURED, Coverage.INTERPOLATED)
        level[(values < grid[0]) | (values > grid[-1])] = Coverage.EXTRAPOLATED
        self.levels = np.where(of, np.maximum(self.levels, level), self.levels).astype(np.int8)


def levels(tables: Tables, steps: StepArrays, chunks: Chunks, rows: NDArray[np.int64]) -> NDArray[np.int8]:
    """The `Coverage` of each iteration: that of its coordinate which lies worst. Shape: one int8 per iteration.

    `rows` are the iterations' rows after padding.
    """
    worst = _Worst(len(rows))
    decodes, prefills = steps.num_decode > 0, chunks.num_tokens > 0
    mean = steps.decode_context_sum / np.maximum(steps.num_decode, 1) + 1.0
    for term, _ in tables.lines("tokens"):
        worst.take(term.points[0], rows, rows > 0)
    for term, _ in tables.lines("sequences"):
        worst.take(term.points[0], steps.num_sampled, steps.num_sampled > 0)
    mixed = decodes & prefills if tables.mixed_axes else np.zeros(len(rows), dtype=np.bool_)
    coordinates = {
        "decode_attention": (decodes & ~mixed, (steps.num_decode, mean)),
        "prefill_attention": (prefills & ~mixed, (chunks.chunk, chunks.context)),
        "mixed_attention": (mixed, (steps.num_decode, chunks.chunk, chunks.context, mean)),
    }
    for kind, (of, values) in coordinates.items():
        for points, value in zip(tables.points(kind), values, strict=False):
            worst.take(points, value, of)
    return worst.levels
