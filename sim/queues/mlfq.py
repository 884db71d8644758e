"""Multi-level feedback: levels of falling priority, which a request sinks through as it uses up their quanta.

A quantum is time, twice as much in each level as in the one above. A request's time runs from its admission to its
preemption, which are all that a queue sees of it. So quanta are in the unit in which prefills are profiled, and for
requests that are in every step it is the source's: the time of the steps that they were in. Tokens would need a price
to be compared with a prefill, and would have to be counted step by step. What goes beyond a quantum counts in the next
level, as in the source if steps are short beside quanta.

A queue takes nobody off the batch. Levels decide who is admitted next, and where a preempted request waits: in front
of the level that it has sunk to. With skip-join a long prompt starts in a lower level; without, whoever is new starts
in the highest one, so that nothing differs from first come, first served until somebody is preempted. The policy
`fastserve` is the engine that chooses its batch anew from such levels in every step.

Source: FastServe @187a274 (Wu et al. 2023), `scheduler.py`. There starving requests are looked for every so many
steps and put in front one by one, the last one found first; here each is in front of all levels as soon as it has
waited for the threshold, the one who has for longest first, and with a quantum that nothing is used of.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import Annotated, Literal, Self

from pydantic import Field

from sim.clock import NS_PER_MS, to_ns
from sim.options import NonNegative, Positive, PositiveSeconds
from sim.queues.base import QueueOrder, QueueOrderOptions, Setting
from sim.request import NEVER, Request


class MlfqOptions(QueueOrderOptions):
    """What the levels can be told."""

    kind: Literal["mlfq"] = Field(description="levels of falling priority, by the time that requests have run")
    skip_join: bool = Field(default=False, description="whether a long prompt joins a lower level")
    quantum_ms: Annotated[Positive, Field(ge=0.001, le=1e9)] = Field(
        default=10.0, description="time that the highest level grants; each further one grants twice as much"
    )
    profile_base_ms: NonNegative = Field(
        default=4.0, description="skip-join: time of a prefill beside what its tokens take"
    )
    profile_prefill_ms: NonNegative = Field(default=0.1, description="skip-join: time of a prefill per prompt token")
    starvation_threshold_s: PositiveSeconds | None = Field(
        default=3.0, description="wait in a lower level after which a request goes to the top; null: for ever"
    )


class Job:
    """What the queue knows of a request that waits or runs. Times in nanoseconds."""

    __slots__ = ("is_starving", "level", "taken_ns", "used_ns", "waits_since_ns")

    def __init__(self, level: int, now_ns: int) -> None:
        self.level = level
        """Number of its level; 0 is the highest."""
        self.used_ns = 0
        """Of its level's quantum."""
        self.waits_since_ns = now_ns
        self.taken_ns = NEVER
        """When it was last admitted."""
        self.is_starving = False
        """Whether it was brought to the top, and has not run since."""


class Mlfq(QueueOrder):
    """A queue per level, and one in front of them for those who starved. O(levels) to find the head."""

    Options = MlfqOptions
    reads_clock = True

    def __init__(self, options: MlfqOptions) -> None:
        self._options = options
        self._quantum_ns = round(options.quantum_ms * NS_PER_MS)
        threshold_s = options.starvation_threshold_s
        self._threshold_ns = None if threshold_s is None else to_ns(threshold_s)
        self._job_of: dict[Request, Job] = {}
        """Of everybody who waits or was admitted and is not over."""
        self._starving: OrderedDict[Request, None] = OrderedDict()
        self._levels: list[OrderedDict[Request, None]] = []
        self._size = 0
        self._starves_at: list[tuple[int, int, Request]] = []
        """A heap of when those below the highest level will starve, with entries that no longer count."""
        self._num_entered = 0

    @classmethod
    def build(cls, options: QueueOrderOptions, setting: Setting) -> Self:
        assert isinstance(options, MlfqOptions)
        return cls(options)

    def add(self, request: Request, now_ns: int) -> None:
        """At the end of its level."""
        options, level = self._options, 0
        if options.skip_join:
            prefill_ms = options.profile_base_ms + options.profile_prefill_ms * request.prompt_tokens
            level = first_level(prefill_ms, options.quantum_ms)
        self._job_of[request] = Job(level, now_ns)
        self._enter(request)

    def put_back(self, request: Request, now_ns: int) -> None:
        """At the front of the level that it has sunk to; one that did not run at all keeps the wait that it had."""
        job = self._job_of[request]
        if now_ns > job.taken_ns:
            self._charge(job, now_ns - job.taken_ns)
            job.waits_since_ns, job.is_starving = now_ns, False
        self._enter(request).move_to_end(request, last=False)

    def head(self, now_ns: int) -> Request | None:
        self._promote(now_ns)
        return next(iter(self), None)

    def take(self, request: Request, now_ns: int) -> None:
        self._leave(request)
        self._job_of[request].taken_ns = now_ns

    def remove(self, request: Request) -> None:
        self._leave(request)
        del self._job_of[request]

    def released(self, request: Request, num_outputs: int) -> None:
        del self._job_of[request]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return chain(self._starving, *self._levels)

    def next_change_ns(self, now_ns: int) -> int | None:
        """When the next one starves, unless that would only queue it behind others who do."""
        self._promote(now_ns)
        return None if self._starving or not self._starves_at else self._starves_at[0][0]

    def _charge(self, job: Job, time_ns: int) -> None:
        job.used_ns += time_ns
        while job.used_ns > self._quantum_ns << job.level:
            job.used_ns -= self._quantum_ns << job.level
            job.level += 1

    def _queue_of(self, job: Job) -> OrderedDict[Request, None]:
        if job.is_starving:
            return self._starving
        while len(self._levels) <= job.level:
            self._levels.append(OrderedDict())
        return self._levels[job.level]

    def _enter(self, request: Request) -> OrderedDict[Request, None]:
        """Put it at the end of its queue, which is returned."""
        job = self._job_of[request]
        queue = self._queue_of(job)
        queue[request] = None
        self._size += 1
        if job.level and self._threshold_ns is not None:
            heappush(self._starves_at, (job.waits_since_ns + self._threshold_ns, self._num_entered, request))
            self._num_entered += 1
        return queue

    def _leave(self, request: Request) -> None:
        del self._queue_of(self._job_of[request])[request]
        self._size -= 1

    def _promote(self, now_ns: int) -> None:
        """Bring those who starve by now to the top. The heap then begins with somebody who will, if it has any."""
        heap = self._starves_at
        while heap:
            starves_ns, _, request = heap[0]
            counts = self._waits_below(request) and starves_ns == self._starves_ns(request)
            if counts and starves_ns > now_ns:
                return
            heappop(heap)
            if counts:
                self._leave(request)
                job = self._job_of[request]
                job.level, job.used_ns, job.is_starving = 0, 0, True
                self._enter(request)

    def _waits_below(self, request: Request) -> bool:
        """Whether it waits in another level than the highest."""
        job = self._job_of.get(request)
        return job is not None and job.level > 0 and request in self._levels[job.level]

    def _starves_ns(self, request: Request) -> int:
        return self._job_of[request].waits_since_ns + (self._threshold_ns or 0)


def first_level(prefill: float, quantum: float) -> int:
    """The first level that grants as much time as a prefill takes, in the unit of `quantum`, the highest level's. Pure.

    Source: FastServe @187a274, `scheduler.py` (skip-join).
    """
    level = 0
    while quantum * 2**level < prefill:
        level += 1
    return level
