"""Which requests say the same: token identity by row of a traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sim.tokens import UNIQUE, Run, TokenRuns
from sim.workload.base import Ints
from sim.workload.conversation import whole_prompts

TokensOf = Callable[[int], TokenRuns]


@dataclass(frozen=True)
class Texts:
    """What the requests of one class say, where they quote common prefixes or their own conversation.

    Columns have one entry per request of the class. The streams are tuples of three: `("prefix", class,
    group)`, and `("question", class, row)` and `("answer", class, row)` for the row that said it first.
    """

    class_name: str
    turn: Ints
    """Counts from 0 in every conversation."""
    new_tokens: Ints
    """Of the prompt, after the prefix and what it quotes."""
    answer_tokens: Ints
    is_conversation: bool
    group: Ints | None
    """Whose prefix the prompt begins with; the same in all turns of a conversation. None: there are none."""
    prefix_tokens: Ints
    """By group."""

    def prompt_tokens(self) -> Ints:
        """Lengths of the whole prompts."""
        prompts = whole_prompts(self.new_tokens, self.answer_tokens, self.turn)
        return prompts if self.group is None else prompts + self.prefix_tokens[self.group]

    def __call__(self, row: int) -> TokenRuns:
        """Token identity of a request; takes time in proportion to the turns before it."""
        runs: list[Run] = []
        if self.group is not None:
            group = int(self.group[row])
            runs.append(Run(("prefix", self.class_name, group), int(self.prefix_tokens[group])))
        if not self.is_conversation:
            return TokenRuns(tuple(runs))
        first = row - int(self.turn[row])
        for said in range(first, row):
            runs.append(Run(("question", self.class_name, said), int(self.new_tokens[said])))
            runs.append(Run(("answer", self.class_name, said), int(self.answer_tokens[said])))
        runs.append(Run(("question", self.class_name, row), int(self.new_tokens[row])))
        return TokenRuns(tuple(runs), ("answer", self.class_name, row))


class TrafficTexts:
    """Token identity by row of the traffic, for classes whose requests have something in common."""

    def __init__(self, class_index: Ints, sources: Mapping[int, TokensOf]) -> None:
        """`sources`: class -> token identity by row among the class's own rows."""
        self._class_index = class_index
        self._sources = sources
        self._own_row = np.zeros(len(class_index), dtype=np.int64)
        for index in sources:
            rows = np.flatnonzero(class_index == index)
            self._own_row[rows] = np.arange(len(rows))

    def __call__(self, row: int) -> TokenRuns:
        source = self._sources.get(int(self._class_index[row]))
        return UNIQUE if source is None else source(int(self._own_row[row]))
