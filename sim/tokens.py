"""Who has the same tokens: all that prefix caching needs to know about a text.

Two requests share cache exactly as far as their tokens are equal from position 0. A text is therefore
written as runs of token streams: the run `(stream, length)` stands for the first `length` tokens of
`stream`. Tokens outside every run belong to one request alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import count
from typing import NamedTuple


class Run(NamedTuple):
    """The first `length` tokens of a stream that several requests may begin with."""

    stream: Hashable
    length: int


class TokenRuns:
    """The token identity of one request: shared runs first, then tokens of its own.

    `prefix` covers the beginning of the prompt; what follows it is unique to the request. `output_stream`
    names the stream that the answer's tokens form, when later prompts quote it (chat turns); otherwise
    the answer is unique too. Immutable.
    """

    __slots__ = ("output_stream", "prefix")

    def __init__(self, prefix: tuple[Run, ...] = (), output_stream: Hashable | None = None) -> None:
        self.prefix = tuple(run for run in prefix if run.length > 0)
        self.output_stream = output_stream

    @property
    def shared_tokens(self) -> int:
        """Leading prompt tokens that lie in a shared stream."""
        return sum(run.length for run in self.prefix)


UNIQUE = TokenRuns()
"""The identity of a request that shares nothing with any other."""


class BlockKeys:
    """Interns the identity of every full block of every request as a small integer.

    Equal integers mean: equal tokens from position 0 to the end of the block. One instance serves one
    prefix cache; it grows with the distinct blocks asked for.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._next = count(1)
        self._ids: dict[tuple[int, tuple[tuple[Hashable, int, int], ...]], int] = {}

    def keys(self, tokens: TokenRuns, prompt_tokens: int) -> Iterator[int]:
        """Keys of the request's full blocks in order, without end.

        Stops being shareable at the first token that is unique to the request: from there on every key
        is new, so call this once per request and keep what it yields.
        """
        parent = 0
        for content in self._shared_contents(tokens, prompt_tokens):
            name = (parent, content)
            key = self._ids.get(name)
            if key is None:
                key = self._ids[name] = next(self._next)
            parent = key
            yield key
        yield from self._next

    def _shared_contents(
        self, tokens: TokenRuns, prompt_tokens: int
    ) -> Iterator[tuple[tuple[Hashable, int, int], ...]]:
        """Each full block of the shared beginning as slices `(stream, start, stop)`."""
        pieces: list[tuple[Hashable, int, int]] = []
        room = self._block_size
        for stream, length in self._runs(tokens, prompt_tokens):
            start = 0
            while length is None or start < length:
                stop = start + room if length is None else min(length, start + room)
                pieces.append((stream, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield tuple(pieces)
                    pieces, room = [], self._block_size

    @staticmethod
    def _runs(tokens: TokenRuns, prompt_tokens: int) -> Iterator[tuple[Hashable, int | None]]:
        yield from tokens.prefix
        if tokens.output_stream is not None and tokens.shared_tokens == prompt_tokens:
            yield tokens.output_stream, None
