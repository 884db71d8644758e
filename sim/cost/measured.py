"""An artifact's tables, ready to price with, and how far an iteration lies from what they measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.artifact import AXES, Artifact, Shape, Term
from sim.cost.base import Coverage
from sim.cost.grids import Floats, Line, along_first_axis, bilinear, multilinear_all
from sim.cost.standins import Chunks
from sim.errors import ArtifactError
from sim.step import StepArrays

_ONCE = tuple(kind for kind in AXES if kind not in ("tokens", "sequences", "prefill_tokens"))
_NEEDED = ("decode_attention", "prefill_attention")
_PER_TOKEN = ("tokens", "prefill_tokens")
"""Kinds of which there must be one: a measurement of kernels has the first, of whole iterations the second."""


class ExpertsLine:
    """Time of the experts by the rows that an iteration computes, with the methods of a `Line`.

    So many rows are expected to touch E - E(1 - k/E)^rows of E experts when each of them is sent to k, all
    being as likely. Routing that prefers some experts touches fewer, so that the time is an upper bound.
    """

    def __init__(self, term: Term, shape: Shape) -> None:
        """Raises ArtifactError for experts of a model that has none."""
        if not shape.num_experts_per_tok or shape.num_experts < shape.num_experts_per_tok:
            raise ArtifactError(
                "cost.artifact",
                f"{term.name} is of experts, of {shape.num_experts}, {shape.num_experts_per_tok} for each token",
                valid="expected the shape of a mixture of experts",
            )
        self._term, self._table = term, term.table_ns()
        self._num_experts = shape.num_experts
        self._missed = 1 - shape.num_experts_per_tok / shape.num_experts

    def at(self, x: float) -> float:
        """The value at one number of rows."""
        return float(self.at_all(np.array([x]))[0])

    def at_all(self, x: Floats) -> Floats:
        """The values at many."""
        return multilinear_all(self._term.points, self._table, (x, self.touched(x)))

    def touched(self, x: NDArray[Any]) -> Floats:
        """Experts that so many rows are expected to touch."""
        touched: Floats = self._num_experts * (1 - self._missed**x)
        return touched


class Tables:
    """The terms of an artifact by kind. Times are those of a whole iteration, ns."""

    def __init__(self, artifact: Artifact) -> None:
        """Raises ArtifactError when a term that every iteration needs is missing, or one is there twice."""
        for kind in AXES:
            num_terms = len(artifact.of_kind(kind))
            if (kind in _NEEDED and not num_terms) or (kind in _ONCE and num_terms > 1):
                raise ArtifactError("cost.artifact", f"{num_terms} terms of {kind}", valid="expected one")
        if not any(artifact.of_kind(kind) for kind in _PER_TOKEN):
            raise ArtifactError("cost.artifact", f"0 terms of {' or '.join(_PER_TOKEN)}", valid="expected one")
        self._artifact = artifact
        self._terms = {kind: terms[0] for kind in _ONCE if (terms := artifact.of_kind(kind))}
        self._values = {kind: term.table_ns() for kind, term in self._terms.items()}
        self._prefill_rows: list[list[float]] = self._values["prefill_attention"].tolist()
        self.mixed_axes = self.points("mixed_attention")[1:]
        """Points of the chunk, of its context and of the decodes' mean context; empty if not measured."""
        self.skew_axes = self.points("decode_skew")[1:]
        """Points of ratio and spread; empty if not measured. Also of the next."""
        self.mixed_skew_axes = self.points("mixed_skew")[1:]
        self.experts = [ExpertsLine(term, artifact.shape) for term in artifact.of_kind("experts")]
        """Time of the experts; empty for dense models."""

    def points(self, kind: str) -> list[list[float]]:
        """The measured points of a kind that occurs once, axis by axis; empty if it does not occur."""
        return self._terms[kind].points if kind in self._terms else []

    def corners(self, kind: str) -> list[list[float]]:
        """The largest points that were timed of such a kind, where its grid reaches beyond them."""
        return self._terms[kind].corners if kind in self._terms else []

    def lines(self, kind: str) -> list[tuple[Term, Line]]:
        """The terms of one variable (`tokens`, `sequences` or `prefill_tokens`) as functions."""
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

    def take_corners(self, corners: list[list[float]], values: Sequence[NDArray[Any]], of: NDArray[np.bool_]) -> None:
        """Put the iterations `of` beyond the measurements where no corner is as large along every coordinate."""
        within = np.zeros(len(self.levels), dtype=np.bool_)
        for corner in corners:
            within |= np.all([value <= most for value, most in zip(values, corner, strict=True)], axis=0)
        self.levels[of & ~within] = Coverage.EXTRAPOLATED


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
    for term, _ in tables.lines("prefill_tokens"):
        worst.take(term.points[0], chunks.num_tokens, prefills)
        worst.levels[prefills & decodes] = Coverage.EXTRAPOLATED  # whole iterations were of one or the other
    for experts in tables.experts:
        of_rows, of_experts = tables.points("experts")
        worst.take(of_rows, rows, rows > 0)
        worst.take(of_experts, experts.touched(rows), rows > 0)
    mixed = decodes & prefills if tables.mixed_axes else np.zeros(len(rows), dtype=np.bool_)
    coordinates = {
        "decode_attention": (decodes & ~mixed, (steps.num_decode, mean)),
        "prefill_attention": (prefills & ~mixed, (chunks.chunk, chunks.context)),
        "mixed_attention": (mixed, (steps.num_decode, chunks.chunk, chunks.context, mean)),
    }
    for kind, (of, values) in coordinates.items():
        for points, value in zip(tables.points(kind), values, strict=False):
            worst.take(points, value, of)
        if corners := tables.corners(kind):
            worst.take_corners(corners, values, of)
    return worst.levels
