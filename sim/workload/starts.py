"""What arrives by itself, and the requests that come of it: one, all turns of a conversation, or all of a call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    """Counts from 0 in every conversation; 0 for any other request."""
    call: Ints
    """The call that a request is a prompt of, counted from 0; NEVER: none."""


@dataclass(frozen=True)
class Starts:
    """Single requests, beginnings of conversations, and calls, as columns with one entry each."""

    class_index: Ints
    arrival_ns: Ints
    think_ns: Ints
    num_each: Ints
    """Requests that come of it, at least 1."""

    def __len__(self) -> int:
        return len(self.class_index)

    def by_arrival(self) -> Starts:
        """The same ones sorted by time, equal times in the order given."""
        return self._select(np.argsort(self.arrival_ns, kind="stable"))

    def up_to(self, num_requests: int | None) -> Starts:
        """The first ones, with so many requests in all; the last conversation or call is cut to what is left."""
        if num_requests is None:
            return self
        num_before = np.cumsum(self.num_each) - self.num_each
        taken = self._select(np.flatnonzero(num_before < num_requests))
        num_each = np.minimum(taken.num_each, num_requests - num_before[: len(taken)])
        return Starts(taken.class_index, taken.arrival_ns, taken.think_ns, num_each)

    def rows(self, are_calls: NDArray[np.bool_]) -> Rows:
        """The requests, start by start. Raises ScenarioError when they are more than a run can hold.

        Requests of a start that is one of `are_calls` come all at its time; of another, as turns, each after the last.
        """
        num_rows = check_number(int(self.num_each.sum()))
        start = np.repeat(np.arange(len(self)), self.num_each)
        place = np.arange(num_rows) - (np.cumsum(self.num_each) - self.num_each)[start]
        is_call = are_calls[start]
        comes_by_itself = is_call | (place == 0)
        return Rows(
            class_index=self.class_index[start],
            arrival_ns=np.where(comes_by_itself, self.arrival_ns[start], NEVER),
            think_ns=np.where(comes_by_itself, self.think_ns[start], 0),
            turn=np.where(is_call, 0, place),
            call=np.where(is_call, np.cumsum(are_calls)[start] - 1, NEVER),
        )

    def _select(self, chosen: Ints) -> Starts:
        return Starts(*(column[chosen] for column in self._columns()))

    def _columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        return self.class_index, self.arrival_ns, self.think_ns, self.num_each


def joined(parts: Iterable[Starts]) -> Starts:
    """One after the other; there is at least one part."""
    return Starts(*(np.concatenate(columns) for columns in zip(*(part._columns() for part in parts), strict=True)))
