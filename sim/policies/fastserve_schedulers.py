"""FastServe's schedulers: who is in the next batch, who waits in which order, and who is swapped out for whom."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from sim.kv.base import blocks_for
from sim.kv.swapped import SwappedCache
from sim.queues.mlfq import first_level
from sim.request import Request
from sim.step import BlockedBy

QUANTUM_S = 0.01
"""Time that the highest queue grants; each further one grants twice as much."""
PROFILED_TOKENS = (32, 4096)
"""Shortest and longest profiled prompt; others count as one of them."""
NEVER_RAN_S = float("-inf")
"""Last turn of a request that never had one: it counts as starving at every look."""
MIN_FREE_CPU_SHARE = 0.1
"""Of the host's pool; below it nobody is started who never ran."""


class Job:
    """What a scheduler knows of a request."""

    __slots__ = ("last_pass_s", "level", "position", "position_before", "used_s")

    def __init__(self) -> None:
        self.level = 0
        """Number of its queue; 0 is the highest."""
        self.used_s = 0.0
        """Time of the passes that it was in since it came to its level."""
        self.last_pass_s = NEVER_RAN_S
        """When its last pass ended."""
        self.position = 0
        """In a crowd: where it stands in its level."""
        self.position_before = 0
        """In a crowd: where it stood before it sank."""


def granted_s(level: int) -> float:
    """Time that a queue grants."""
    return QUANTUM_S * (1 << level)


class Engine(Protocol):
    """What a scheduler needs of its engine."""

    options: Any
    kv: SwappedCache

    def swap_out(self, request: Request) -> int:
        """Move a request's KV to the host; how many blocks that frees."""

    def swap_in(self, request: Request) -> None:
        """Move a request's KV back to the GPU."""


class Scheduler(ABC):
    """Holds everybody who is not in the pass in flight, and decides who is in the next one."""

    num_kept_free = 0
    """GPU blocks that a batch may not take."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.blocked_by = BlockedBy.NOTHING
        """What the first one that is not in the last batch lacked."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """A request was cancelled; it may be in the pass in flight."""

    @abstractmethod
    def finish(self, request: Request) -> None:
        """A member of the pass that has just ended is over."""

    @abstractmethod
    def next_batch(self, now_s: float) -> list[Request]:
        """The members of the next pass, their KV on the GPU and room for their next token. Mutates the list later:
        the engine puts prompts first in it."""

    def after_pass(self, members: Sequence[Request], duration_s: float, now_s: float) -> None:  # noqa: B027  # FCFS
        """A pass has ended; `members` are those who were in it and are not over."""

    @abstractmethod
    def running(self) -> list[Request]:
        """Who stays in the batch from pass to pass, in its order."""

    @abstractmethod
    def waiting(self) -> list[Request]:
        """Everybody else but for the members of the pass in flight, in the order of the scheduler's lists."""

    def _blocks(self, request: Request) -> int:
        return blocks_for(request.num_tokens, self.engine.kv.block_size)

    def _reserve(
        self, batch: list[Request], victims: Iterable[Request], num_kept_free: int, drop: Callable[[Request], None]
    ) -> bool:
        """Make room on the GPU for the next pass of `batch` and so many free blocks; False if there was room.

        Swaps out `victims` until there is, then drops members from the end of the batch. Members come to the GPU.
        """
        kv = self.engine.kv
        needed = sum(kv.blocks_to_run(r, r.num_tokens) for r in batch)
        lacking = num_kept_free + needed - kv.free_blocks
        is_short = lacking > 0
        for victim in victims if is_short else ():
            if lacking <= 0:
                break
            if victim.num_blocks:
                lacking -= self.engine.swap_out(victim)
        dropped: list[Request] = []
        while lacking > 0 and batch:
            member = batch.pop()
            lacking -= self._blocks(member)
            if member.num_blocks:
                self.engine.swap_out(member)
            dropped.append(member)
            self.blocked_by = BlockedBy.KV
        for member in reversed(dropped):
            drop(member)
        for request in batch:
            if kv.is_on_cpu(request):
                self.engine.swap_in(request)
        return is_short


class Fcfs(Scheduler):
    """Those who run go on; the last of them make room; those who were swapped out come before anybody new."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._batch: list[Request] = []
        self._swapped: deque[Request] = deque()
        self._waiting: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        for place in (self._batch, self._swapped, self._waiting):
            if request in place:
                place.remove(request)

    def finish(self, request: Request) -> None:
        self._batch.remove(request)

    def next_batch(self, now_s: float) -> list[Request]:
        engine, batch = self.engine, self._batch
        num_blocks = sum(self._blocks(r) for r in batch)
        while num_blocks > engine.kv.usable_blocks:
            victim = batch.pop()
            num_blocks -= self._blocks(victim)
            engine.swap_out(victim)
            self._swapped.append(victim)
        num_tokens = sum(_pass_tokens(r) for r in batch)
        self.blocked_by = BlockedBy.NOTHING
        while queue := self._swapped or self._waiting:
            request = queue[0]
            num_tokens += _pass_tokens(request)
            num_blocks += self._blocks(request)
            self.blocked_by = self._lack(len(batch), num_tokens, num_blocks)
            if self.blocked_by is not BlockedBy.NOTHING:
                break
            queue.popleft()
            if engine.kv.is_on_cpu(request):
                engine.swap_in(request)
            batch.append(request)
        return batch

    def _lack(self, batch_size: int, num_tokens: int, num_blocks: int) -> BlockedBy:
        if batch_size == self.engine.options.max_batch_size:
            return BlockedBy.SLOTS
        if num_tokens > self.engine.options.max_tokens_per_batch:
            return BlockedBy.BUDGET
        return BlockedBy.KV if num_blocks > self.engine.kv.usable_blocks else BlockedBy.NOTHING

    def running(self) -> list[Request]:
        return list(self._batch)

    def waiting(self) -> list[Request]:
        return [*self._swapped, *self._waiting]


class Srpt(Scheduler):
    """Those with the fewest tokens to come by `max_tokens`, whoever ran before. Nobody is swapped while KV suffices."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._batch: list[Request] = []
        self._pool: list[Request] = []

    def add(self, request: Request) -> None:
        self._pool.append(request)

    def remove(self, request: Request) -> None:
        for place in (self._batch, self._pool):
            if request in place:
                place.remove(request)

    def finish(self, request: Request) -> None:
        self._batch.remove(request)

    def next_batch(self, now_s: float) -> list[Request]:
        pool, batch = self._pool + self._batch, self._batch
        batch.clear()
        num_tokens = 0
        self.blocked_by = BlockedBy.NOTHING
        left_out: Request | None = None
        for request in sorted(pool, key=_tokens_to_come):
            num_tokens += _pass_tokens(request)
            if num_tokens > self.engine.options.max_tokens_per_batch:
                self.blocked_by = BlockedBy.BUDGET
            elif len(batch) == self.engine.options.max_batch_size:
                self.blocked_by = BlockedBy.SLOTS
            else:
                batch.append(request)
                continue
            left_out = request
            break
        chosen = set(batch)
        self._pool = pool = [r for r in pool if r not in chosen and r is not left_out]
        if left_out:
            pool.append(left_out)
        victims = sorted(pool, key=_tokens_to_come, reverse=True)
        self._reserve(batch, victims, 0, pool.append)
        return batch

    def running(self) -> list[Request]:
        return list(self._batch)

    def waiting(self) -> list[Request]:
        return list(self._pool)


class Mlfq(Scheduler):
    """Queues of falling priority. A request sinks to the next one when it has used up its time in one.

    Those who are not through come back to the front of their queue one by one, so the order of a batch
    turns round in every pass.
    """

    skips = False
    """Whether a request joins the first queue that grants as much time as its prefill takes."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        options = engine.options
        if options.proactive_offloading:
            self.num_kept_free = max(options.max_batch_size, options.num_min_free_blocks_threshold)
        self._levels: list[deque[Request]] = []
        self._chosen: list[Request] = []
        """The last batch in the order in which it was chosen."""
        self._num_iterations = 0

    def add(self, request: Request) -> None:
        self.choose_level(request)
        self._level(request.policy_state.level).append(request)

    def choose_level(self, request: Request) -> None:
        """The queue that a new request joins."""
        request.policy_state.level = self._first_level(request) if self.skips else 0

    def remove(self, request: Request) -> None:
        level = self._level(request.policy_state.level)
        if request in level:
            level.remove(request)

    def finish(self, request: Request) -> None:
        """It is in no queue."""

    def next_batch(self, now_s: float) -> list[Request]:
        batch = self._fill()
        self._reserve_and_swap_ahead(batch)
        self._num_iterations += 1
        if self._num_iterations % self.engine.options.starvation_period == 0:
            self._promote(now_s)
        self._chosen = list(batch)
        return batch

    def empty(self) -> list[Request]:
        """Take everybody out, in order."""
        everybody = self.waiting()
        self._levels.clear()
        return everybody

    def fill_again(self, everybody: Sequence[Request], num_passes: int) -> None:
        """Everybody is back, in order, after so many passes that were not chosen here."""
        for request in everybody:
            self._level(request.policy_state.level).append(request)
        self._num_iterations += num_passes

    def after_pass(self, members: Sequence[Request], duration_s: float, now_s: float) -> None:
        still_there = set(members)
        for request in [r for r in self._chosen if r in still_there]:
            job: Job = request.policy_state
            job.last_pass_s = now_s
            job.used_s += duration_s
            if job.used_s > granted_s(job.level):
                job.level += 1
                job.used_s = 0.0
            self._push_front(request)
        self.swap_ahead()

    def swap_ahead(self) -> None:
        """Between two passes, so that as many blocks as are to be kept free are."""
        self._reserve_and_swap_ahead([])

    def running(self) -> list[Request]:
        return []

    def waiting(self) -> list[Request]:
        return [request for level in self._levels for request in level]

    def _fill(self) -> list[Request]:
        options, kv = self.engine.options, self.engine.kv
        batch: list[Request] = []
        put_off: list[Request] = []
        num_prompt_tokens = 0
        self.blocked_by = BlockedBy.NOTHING
        for level in self._levels:
            while level and self.blocked_by is BlockedBy.NOTHING:
                request = level[0]
                is_new = not request.num_output_tokens
                if is_new and kv.free_cpu_share < MIN_FREE_CPU_SHARE:
                    put_off.append(level.popleft())
                elif num_prompt_tokens + _pass_tokens(request) > options.max_tokens_per_batch:
                    self.blocked_by = BlockedBy.BUDGET
                elif len(batch) == options.max_batch_size:
                    self.blocked_by = BlockedBy.SLOTS
                else:
                    batch.append(level.popleft())
                    num_prompt_tokens += request.prompt_tokens if is_new else 0
        for request in reversed(put_off):
            self._push_front(request)
            self.blocked_by = BlockedBy.KV
        return batch

    def _reserve_and_swap_ahead(self, batch: list[Request]) -> None:
        """Make room for the batch; where there is enough, proactive offloading brings back those whose turn is near."""
        kv, engine = self.engine.kv, self.engine
        needed = sum(kv.blocks_to_run(r, r.num_tokens) for r in batch)
        lowest_first = (r for level in reversed(self._levels) for r in reversed(list(level)))
        if self._reserve(batch, lowest_first, self.num_kept_free, self._push_front):
            return
        if not engine.options.proactive_offloading:
            return
        for request in self.waiting()[: engine.options.max_batch_size]:
            if kv.is_on_cpu(request) and kv.free_blocks >= self.num_kept_free + needed + self._blocks(request):
                engine.swap_in(request)

    def _promote(self, now_s: float) -> None:
        """Those who had no turn for long go to the top. Who never had one counts as waiting since the epoch."""
        for request in self.waiting():
            job: Job = request.policy_state
            if now_s - job.last_pass_s >= self.engine.options.starvation_threshold_s:
                self._levels[job.level].remove(request)
                job.level = 0
                self._push_front(request)

    def _first_level(self, request: Request) -> int:
        options = self.engine.options
        shortest, longest = PROFILED_TOKENS
        num_tokens = min(max(request.prompt_tokens, shortest), longest)
        prefill_s = (options.profile_base_ms + options.profile_prefill_ms * num_tokens) / 1e3
        return first_level(prefill_s, QUANTUM_S)

    def _level(self, number: int) -> deque[Request]:
        while len(self._levels) <= number:
            self._levels.append(deque())
        return self._levels[number]

    def _push_front(self, request: Request) -> None:
        self._level(request.policy_state.level).appendleft(request)


class SkipJoinMlfq(Mlfq):
    """A long prompt does not hold up short ones: it starts in a lower queue."""

    skips = True


SCHEDULERS: dict[str, type[Scheduler]] = {"fcfs": Fcfs, "srpt": Srpt, "mlfq": Mlfq, "sj-mlfq": SkipJoinMlfq}


def _pass_tokens(request: Request) -> int:
    """Tokens that a request brings to its next pass."""
    return 1 if request.num_output_tokens else request.prompt_tokens


def _tokens_to_come(request: Request) -> int:
    return request.max_tokens - request.num_output_tokens
