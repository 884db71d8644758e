"""Who has the same tokens: all that prefix caching needs to know about a text.

Two requests share cache exactly as far as their tokens are equal from position 0. A text is therefore
written as runs of token streams: the run `(stream, length)` stands for the first `length` tokens of
`stream`. Tokens outside every run belong to one request alone.
"""

from __future__ import annotations

from collections.abc import Hashable
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


_SPARE_KEYS = 32

ENDLESS = 10**12
"""Blocks of a text that never ends."""


class BlockKeys:
    """Names the full blocks of every request by small integers.

    Equal integers mean: equal tokens from position 0 to the end of the block. One instance serves one
    prefix cache; it grows with the distinct blocks asked for.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._num_keys = 0
        self._runs: dict[tuple[int, Hashable, int], list[int]] = {}
        self._mixed: dict[tuple[int, tuple[tuple[Hashable, int, int], ...]], int] = {}

    def of(self, tokens: TokenRuns, prompt_tokens: int) -> RequestKeys:
        """The keys of one request's blocks, made when asked for. Call it once per request and keep it."""
        return RequestKeys(self, tokens, prompt_tokens)

    def fresh(self, num: int) -> range:
        """Keys that nothing else will ever get: of blocks that hold tokens of one request alone."""
        first = self._num_keys + 1
        self._num_keys += num
        return range(first, first + num)

    def run(self, parent: int, stream: Hashable, start: int, num: int) -> list[int]:
        """Keys of the blocks that follow block `parent` with the stream's tokens from `start` on: at least `num`.

        The list is shared and only ever grows.
        """
        keys = self._runs.setdefault((parent, stream, start), [])
        if len(keys) < num:
            keys.extend(self.fresh(num - len(keys)))
        return keys

    def mixed(self, parent: int, slices: tuple[tuple[Hashable, int, int], ...]) -> int:
        """Key of the block that follows block `parent` with slices `(stream, start, stop)` of several streams."""
        key = self._mixed.get((parent, slices))
        if key is None:
            key = self._mixed[parent, slices] = self.fresh(1)[0]
        return key


class RequestKeys:
    """The keys of one request's full blocks, in order and without end."""

    __slots__ = ("_base", "_keys", "_run", "_runs", "_space", "_start", "num_shared")

    def __init__(self, space: BlockKeys, tokens: TokenRuns, prompt_tokens: int) -> None:
        self._space = space
        self._runs: list[tuple[Hashable, int | None]] = list(tokens.prefix)
        if tokens.output_stream is not None and tokens.shared_tokens == prompt_tokens:
            self._runs.append((tokens.output_stream, None))
            self.num_shared = ENDLESS
        else:
            self.num_shared = tokens.shared_tokens // space.block_size
        """First blocks that other requests may have too."""
        self._keys: list[int] = []
        self._run = 0
        self._start = 0
        """Where the next block begins in the current run."""
        self._base: tuple[int, int] | None = None
        """Parent and start of the first whole block in the current run."""

    def first(self, num: int) -> list[int]:
        """The first `num` keys or more. Do not change the list."""
        keys = self._keys
        while len(keys) < num:
            if self._run == len(self._runs):
                # From the first token that is the request's own, no other request has the same block; keys cost
                # nothing, so a few for the blocks to come are taken with them.
                keys.extend(self._space.fresh(num - len(keys) + _SPARE_KEYS))
                return keys
            stream, length = self._runs[self._run]
            num_whole = num if length is None else (length - self._start) // self._space.block_size
            if num_whole > 0:
                self._take_whole(stream, min(num_whole, num - len(keys)))
            else:
                self._take_mixed()
        return keys

    def _take_whole(self, stream: Hashable, num: int) -> None:
        """Blocks that lie in one run. Named from the first of them on, however many are asked for at a time."""
        keys, block_size = self._keys, self._space.block_size
        if self._base is None:
            self._base = keys[-1] if keys else 0, self._start
        parent, start = self._base
        done = (self._start - start) // block_size
        keys.extend(self._space.run(parent, stream, start, done + num)[done : done + num])
        self._start += num * block_size

    def _take_mixed(self) -> None:
        """A block that reaches over the end of a run; none if it reaches over the end of the last one."""
        slices: list[tuple[Hashable, int, int]] = []
        room = self._space.block_size
        while room and self._run < len(self._runs):
            stream, length = self._runs[self._run]
            stop = self._start + room if length is None else min(length, self._start + room)
            if stop > self._start:
                slices.append((stream, self._start, stop))
            room -= stop - self._start
            self._start = stop
            if stop == length:
                self._run += 1
                self._start = 0
        self._base = None
        if not room:
            parent = self._keys[-1] if self._keys else 0
            self._keys.append(self._space.mixed(parent, tuple(slices)))
