"""What arrives by itself, and the requests that come of it: one, or all turns of a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sim.request import NEVER
from sim.workload.base import Ints
from sim.workload.times import check_number


class Rows(NamedTuple):
    """Columns with one entry per request; what a start brings lies together."""

    class_index: Ints
    arrival_ns: Ints
    """NEVER: when something else has happened."""
    think_ns: Ints
    """Of closed-loop clients before a start."""
    turn: Ints
    """Counts from 0 in every conversation; 0 for a single request."""


@dataclass(frozen=True)
class Starts:
    """Single requests and beginnings of conversations, as columns with one entry each."""

    class_index: Ints
    arrival_ns: Ints
    think_ns: Ints
    num_turns: Ints
    """Requests that come of it, at least 1."""

    def __len__(self) -> int:
        return len(self.class_index)

    def by_arrival(self) -> Starts:
        """The same ones sorted by time, equal times in the order given."""
        return self._select(np.argsort(self.arrival_ns, kind="stable"))

    def up_to(self, num_requests: int | None) -> Starts:
        """The first ones, with so many requests in all; the last conversation is cut to what is left of them."""
        if num_requests is None:
            return self
        num_before = np.cumsum(self.num_turns) - self.num_turns
        taken = self._select(np.flatnonzero(num_before < num_requests))
        num_turns = np.minimum(taken.num_turns, num_requests - num_before[: len(taken)])
        return Starts(taken.class_index, taken.arrival_ns, taken.think_ns, num_turns)

    def rows(self) -> Rows:
        """The requests, start by start. Raises ScenarioError when they are more than a run can hold."""
        num_rows = check_number(int(self.num_turns.sum()))
        start = np.repeat(np.arange(len(self)), self.num_turns)
        turn = np.arange(num_rows) - (np.cumsum(self.num_turns) - self.num_turns)[start]
        is_first = turn == 0
        return Rows(
            class_index=self.class_index[start],
            arrival_ns=np.where(is_first, self.arrival_ns[start], NEVER),
            think_ns=np.where(is_first, self.think_ns[start], 0),
            turn=turn,
        )

    def _select(self, chosen: Ints) -> Starts:
        return Starts(*(column[chosen] for column in self._columns()))

    def _columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        return self.class_index, self.arrival_ns, self.think_ns, self.num_turns


def joined(parts: Iterable[Starts]) -> Starts:
    """One after the other; there is at least one part."""
    return Starts(*(np.concatenate(columns) for columns in zip(*(part._columns() for part in parts), strict=True)))
