"""The running batch as aggregates: joining or leaving costs O(log n), an iteration costs O(1).

All who decode gain one token per tick, so a member's counters are what they were when it joined plus the
ticks since. Only the sums are kept; a member's own counters are made real when it leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from heapq import heappop, heappush

from sim.errors import InvariantError
from sim.request import NEVER, Request

_INDEX_BITS = 40
_INDEX_MASK = (1 << _INDEX_BITS) - 1


class TickCalendar(dict[int, dict[Request, None]]):
    """Tick -> the requests to which something happens then, in the order in which they were noted.

    `tick in calendar` may be true although everybody noted has been discarded; `pop_tick` tells.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ticks: list[int] = []

    def add(self, tick: int, request: Request) -> None:
        """Note a request for a tick; noting it twice is noting it once."""
        entries = self.get(tick)
        if entries is None:
            entries = self[tick] = {}
            heappush(self._ticks, tick)
        entries[request] = None

    def discard(self, tick: int, request: Request) -> None:
        """Forget a request's entry at a tick, if there is one."""
        entries = self.get(tick)
        if entries is not None:
            entries.pop(request, None)

    def pop_tick(self, tick: int) -> list[Request]:
        """Take out the requests of a tick. A second call finds none."""
        entries = self.pop(tick, None)
        return list(entries) if entries else []

    def next_tick(self) -> int | None:
        """The first tick with an entry. Forgets ticks without any."""
        while self._ticks:
            tick = self._ticks[0]
            if self.get(tick):
                return tick
            heappop(self._ticks)
            self.pop(tick, None)
        return None


class RunningBatch:
    """The requests that decode, in the order in which they joined.

    While a request is a member, its `num_computed_tokens` and `num_output_tokens` are those of the moment
    it joined; `context(request)` is the current value and `leave` writes both back.
    """

    def __init__(self, block_size: int) -> None:
        self.tick = 0
        """Ticks so far."""
        self.num_decode = 0
        """Number of members."""
        self._block_size = block_size
        self._members: dict[int, Request] = {}
        """By index."""
        self._offset_sum = 0
        self._offset_sum_sq = 0
        self.at_residue: list[dict[Request, None]] = [{} for _ in range(block_size)]
        """Members by what their context and the tick differ in, modulo the block size: in the tick that is about to
        come, those at residue `tick % block_size` need a block. To be read; `join` and `leave` change it."""
        self.due = TickCalendar()
        """Members by the tick after which their time is up."""
        self._max_offset: int | None = None
        """The largest offset of a member; None when it must be looked up again."""
        self._longest: list[int] = []
        """A heap of -offset and index in one integer, longest context first; entries of those who left stay a while."""
        self._newest: list[int] = []
        """Indices of those who are not in the heap yet: most leave before anybody asks for it."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.index) is request

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def join(self, request: Request, ticks: int) -> None:
        """Add a request whose prefill is complete; `due` names it `ticks` (>= 1) ticks from now. Mutates both."""
        index = request.index
        if index in self._members or ticks < 1:
            raise InvariantError(f"{request} joins twice or for {ticks} ticks")
        request.joined_tick = tick = self.tick
        request.due_tick = due_tick = tick + ticks
        self._members[index] = request
        self.num_decode += 1
        offset = request.num_computed_tokens - tick
        self._offset_sum += offset
        self._offset_sum_sq += offset * offset
        self.at_residue[-offset % self._block_size][request] = None
        self.due.add(due_tick, request)
        self._newest.append(index)
        if self._max_offset is not None and offset > self._max_offset:
            self._max_offset = offset

    def postpone(self, request: Request, ticks: int) -> None:
        """`due` names the member `ticks` (>= 1) ticks from now and not before; its place stays. Mutates both."""
        if request not in self or ticks < 1:
            raise InvariantError(f"{request} is no member or postponed by {ticks} ticks")
        self.due.discard(request.due_tick, request)
        request.due_tick = self.tick + ticks
        self.due.add(request.due_tick, request)

    def leave(self, request: Request) -> None:
        """Remove a member and bring its counters up to date. Mutates both."""
        del self._members[request.index]
        self.num_decode -= 1
        joined_tick, num_computed_tokens = request.joined_tick, request.num_computed_tokens
        offset = num_computed_tokens - joined_tick
        if offset == self._max_offset:
            self._max_offset = None
        self._offset_sum -= offset
        self._offset_sum_sq -= offset * offset
        del self.at_residue[-offset % self._block_size][request]
        if request.due_tick in self.due:
            self.due.discard(request.due_tick, request)
        num_ticks = self.tick - joined_tick
        request.num_computed_tokens = num_computed_tokens + num_ticks
        request.num_output_tokens += num_ticks
        request.joined_tick = request.due_tick = NEVER

    def advance(self, num_ticks: int = 1) -> None:
        """So many ticks: every member's context grows by as many tokens."""
        self.tick += num_ticks

    def context(self, request: Request) -> int:
        """Tokens that a member has computed by now."""
        return request.num_computed_tokens + self.tick - request.joined_tick

    @property
    def context_sum(self) -> int:
        """Sum of the members' contexts."""
        return self._offset_sum + self.num_decode * self.tick

    @property
    def context_sum_sq(self) -> int:
        """Sum of the squares of the members' contexts."""
        return self.context_sums()[1]

    def context_sums(self) -> tuple[int, int, int]:
        """Sum, sum of squares and maximum of the members' contexts."""
        tick, offset_sum, num_decode = self.tick, self._offset_sum, self.num_decode
        if not num_decode:
            return 0, 0, 0
        max_offset = self._max_offset
        if max_offset is None:
            max_offset = self._max_offset = self._longest_offset()
        gained = num_decode * tick
        return offset_sum + gained, self._offset_sum_sq + tick * (2 * offset_sum + gained), tick + max_offset

    def _longest_offset(self) -> int:
        """The largest offset of a member. Forgets entries of those who left."""
        longest, members = self._longest, self._members
        for index in self._newest:
            request = members.get(index)
            if request is not None:
                offset = request.num_computed_tokens - request.joined_tick
                heappush(longest, (-offset << _INDEX_BITS) | index)
        self._newest.clear()
        while True:
            entry = longest[0]
            request = members.get(entry & _INDEX_MASK)
            offset = -(entry >> _INDEX_BITS)
            if request is not None and request.num_computed_tokens - request.joined_tick == offset:
                return offset
            heappop(longest)

    @property
    def context_max(self) -> int:
        """The longest context; 0 when nobody decodes."""
        return self.context_sums()[2]

    def at_context(self, remainder: int) -> Collection[Request]:
        """Members whose context leaves `remainder` modulo the block size. A view: copy it before changing members.

        With remainder 0 their next token needs a block; with block size - 1 it completes one.
        """
        return self.at_residue[(self.tick - remainder) % self._block_size]

    def num_growing(self, num_ticks: int) -> list[int]:
        """How many members need a block in each of the next `num_ticks` ticks, if nobody joins or leaves."""
        at_residue, size, first = self.at_residue, self._block_size, self.tick % self._block_size
        counts = list(map(len, at_residue[first:] + at_residue[:first]))
        return (counts * -(-num_ticks // size))[:num_ticks] if num_ticks > size else counts[:num_ticks]
