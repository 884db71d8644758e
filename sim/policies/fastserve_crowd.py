"""FastServe's MLFQ while everybody fits: a pass costs what it changes.

As long as seats, tokens and blocks suffice for all, the queues only say in which order requests stand in a pass
and when each of them sinks. The order is turned round by every pass, which is one sign for all; those who sink go
behind those who are there, and new ones behind all. The time that a request used is added up when it may have
sunk: pass by pass, in the order in which it would have been, because sums of binary fractions depend on that.
"""

from __future__ import annotations

from functools import reduce
from heapq import heappop, heappush
from itertools import groupby
from operator import add, attrgetter
from typing import Any

from sim.batch import RunningBatch
from sim.kv.base import blocks_for
from sim.kv.swapped import SwappedCache
from sim.policies.fastserve_schedulers import Job, granted_s
from sim.request import Request, Status
from sim.step import StepShape

MAX_PASSES = 4096
"""Passes after which everybody's time is added up."""
TOLERANCE = 1e-9
"""Relative error, above that of any sum of so many passes, by which a request is looked at too early."""


class Cohort:
    """Requests that came to a level together: they use its time together."""

    __slots__ = ("level", "members", "num_counted", "used_s")

    def __init__(self, level: int, used_s: float, num_counted: int, members: list[Request]) -> None:
        self.level = level
        self.used_s = used_s
        """Time of the passes that are counted, since they came to the level."""
        self.num_counted = num_counted
        """How many of the crowd's passes are counted or were before they came."""
        self.members = members
        """Those who are over stay in it."""


class Crowd:
    """Everybody in the engine, all of whom are in every pass but for those who came while one is in flight."""

    def __init__(self, block_size: int) -> None:
        self.running = RunningBatch(block_size)
        """Those who have output; the batch has ticked ahead of the results of a pass in flight."""
        self.prompting: list[Request] = []
        """Those whose prompt is in the pass in flight, in its order."""
        self.new: dict[Request, None] = {}
        """Those who came since the last pass was planned."""
        self.joined: dict[Request, None] = {}
        """Those of `running` who were in no pass that decodes."""
        self.num_passes = 0
        """Passes that were planned."""
        self._block_size = block_size
        self._sign = 1
        self._first = self._last = 0
        """The smallest and the largest position that was given out."""
        self._durations_s: list[float] = []
        self._elapsed_s = 0.0
        self._ended_s = 0.0
        """When the last pass ended."""
        self._to_sink: list[tuple[float, int, Cohort]] = []
        """A heap: about when, on the clock of `_elapsed_s`, each cohort has used up its level's time."""
        self._num_cohorts = 0
        self._sunk: dict[Request, None] = {}
        """Those who sank after the last pass."""

    def take_in(self, requests: list[Request]) -> None:
        """Requests with output, in order. Their blocks hold their tokens and no more. Once, before all others."""
        for request in requests:
            self._place(request)
            self._decode(request)
        self._form_cohorts(requests)

    def fits(self, kv: SwappedCache, options: Any, num_kept_free: int) -> bool:
        """Whether a pass of everybody has the seats, tokens and blocks that the engine's options grant. Pure."""
        num_prompt_tokens, num_blocks = 0, num_kept_free + len(self.running.at_context(0))
        for request in self.new:
            num_prompt_tokens += request.prompt_tokens
            num_blocks += blocks_for(request.prompt_tokens, self._block_size)
        if self.running.num_decode + len(self.new) > options.max_batch_size:
            return False
        return num_prompt_tokens < options.max_tokens_per_batch and num_blocks <= kv.free_blocks

    def plan(self, kv: SwappedCache) -> tuple[StepShape, list[Request], list[Request]]:
        """A pass of everybody, who fits: its shape, its prompts, and who decodes for the first time.

        Takes the blocks, makes the prompts' counters what they will be, and turns the order round for the next pass.
        """
        running, num_decode = self.running, self.running.num_decode
        kv.take(len(running.at_context(0)))
        prompts = self._start_prompts(kv) if self.new else []
        self._sign, self._sunk = -self._sign, {}
        self.num_passes += 1
        shape = StepShape(
            num_decode,
            *running.context_sums(),
            tuple([(r.prompt_tokens, 0) for r in prompts]),
            num_decode + len(prompts),
            num_new_requests=len(prompts),
        )
        joined: list[Request] = []
        if num_decode:
            running.advance()
        if num_decode and self.joined:
            joined, self.joined = self.in_pass_order(list(self.joined)), {}
        return shape, prompts, joined

    def _start_prompts(self, kv: SwappedCache) -> list[Request]:
        for request in self.new:
            self._place(request)
        self.prompting = prompts = sorted(self.new, key=_level)
        self.new = {}
        self._form_cohorts(prompts)
        for request in prompts:
            kv.allocate(request, blocks_for(request.prompt_tokens, self._block_size))
            request.status = Status.RUNNING
            request.num_computed_tokens = request.prompt_tokens
        return prompts

    def end_prompts(self) -> tuple[list[Request], list[Request]]:
        """The results of prompts: who has its whole answer, and whose client leaves. The others decode from now on."""
        finished: list[Request] = []
        departed: list[Request] = []
        for request in self.prompting:
            request.num_output_tokens = 1
            if request.num_target_tokens == 1:
                finished.append(request)
                continue
            if request.cancel_after_tokens == 1:
                departed.append(request)
            self._decode(request)
            self.joined[request] = None
        self.prompting = []
        return finished, departed

    def end_decodes(self, tick: int) -> tuple[list[Request], list[Request]]:
        """The results of decodes: who has its whole answer, and whose client leaves."""
        finished: list[Request] = []
        departed: list[Request] = []
        due = self.running.due.pop_tick(tick) if tick in self.running.due else []
        for request in self.in_pass_order(due):
            num_to_come = request.num_target_tokens - request.num_output_tokens - (tick - request.joined_tick)
            if num_to_come:
                departed.append(request)
                self.running.postpone(request, num_to_come)
            else:
                finished.append(request)
        return finished, departed

    def remove(self, request: Request, *, is_in_flight: bool = False) -> None:
        """Forget a request and bring its counters up to date, blocks among them. Mutates it."""
        if request in self.new:
            del self.new[request]
        elif request in self.prompting:
            self.prompting.remove(request)
        elif request in self.running:
            self.running.leave(request)
            request.num_blocks = blocks_for(request.num_computed_tokens, self._block_size)
            self.joined.pop(request, None)
            request.num_output_tokens -= is_in_flight

    def settle(self, duration_s: float, now_s: float) -> None:
        """The pass has ended: whoever has used up its level's time sinks."""
        self._durations_s.append(duration_s)
        self._elapsed_s += duration_s
        self._ended_s = now_s
        sinking: list[Request] = []
        too_early: list[Cohort] = []
        to_sink, until_s = self._to_sink, self._elapsed_s * (1 + TOLERANCE)
        while to_sink and to_sink[0][0] <= until_s:
            cohort = heappop(to_sink)[2]
            if self._count(cohort) > granted_s(cohort.level):
                sinking += [r for r in cohort.members if r.status is not Status.OVER]
            else:
                too_early.append(cohort)
        for cohort in too_early:
            self._await_sinking(cohort)
        if sinking:
            self._sink(self.in_pass_order(sinking))
        if len(self._durations_s) == MAX_PASSES:
            self._count_all()

    def _sink(self, requests: list[Request]) -> None:
        """These, in the order of the pass that has ended, go down a level."""
        self._sunk = dict.fromkeys(requests)
        for request in reversed(requests):
            job: Job = request.policy_state
            job.position_before = job.position
            job.level += 1
            job.used_s = 0.0
            self._place(request)
        self._form_cohorts(requests)

    def in_pass_order(self, requests: list[Request]) -> list[Request]:
        """Some of those who are in the pass in flight, or in one whose results are taken in, in its order."""
        if len(requests) <= 1:
            return requests
        return sorted(sorted(requests, key=_position, reverse=self._sign > 0), key=_level)

    def in_order(self) -> list[Request]:
        """Everybody who is in no pass: by level, and there in the order in which they would be chosen."""
        members = sorted(self.running, key=_position, reverse=self._sign < 0)
        return sorted([*members, *self.new], key=_level)

    def dissolve(self) -> tuple[list[Request], list[Request]]:
        """Make everybody's state real again, between two passes: all in order, and those of the last pass' decodes."""
        everybody = self.in_order()
        decoded = sorted([r for r in self.running if r not in self.joined], key=self._place_in_pass)
        for _, _, cohort in self._to_sink:
            used_s = self._count(cohort)
            for request in cohort.members:
                request.policy_state.used_s = used_s
        for request in list(self.running):
            if self.num_passes:
                request.policy_state.last_pass_s = self._ended_s
            self.remove(request)
        return everybody, decoded

    def _place_in_pass(self, request: Request) -> tuple[int, int]:
        """Of the last pass, which has been settled."""
        job: Job = request.policy_state
        if request in self._sunk:
            return job.level - 1, -self._sign * job.position_before
        return job.level, -self._sign * job.position

    def _place(self, request: Request) -> None:
        """Behind all others of its level."""
        job: Job = request.policy_state
        if self._sign > 0:
            self._last = job.position = self._last + 1
        else:
            self._first = job.position = self._first - 1

    def _form_cohorts(self, requests: list[Request]) -> None:
        """Neighbours among these who are at the same level with the same time used share the time to come."""
        for (level, used_s), members in groupby(requests, key=_standing):
            self._await_sinking(Cohort(level, used_s, len(self._durations_s), list(members)))

    def _decode(self, request: Request) -> None:
        num_received, until = request.num_output_tokens, request.num_target_tokens
        if num_received < request.cancel_after_tokens < until:
            until = request.cancel_after_tokens
        self.running.join(request, until - num_received)

    def _await_sinking(self, cohort: Cohort) -> None:
        granted = granted_s(cohort.level)
        early_s = TOLERANCE * (granted + self._elapsed_s)
        self._num_cohorts += 1
        heappush(self._to_sink, (self._elapsed_s + granted - cohort.used_s - early_s, self._num_cohorts, cohort))

    def _count(self, cohort: Cohort) -> float:
        """Add the passes since it was last done to a cohort's time."""
        durations_s = self._durations_s[cohort.num_counted :]
        cohort.used_s = reduce(add, durations_s, cohort.used_s)  # one by one: sum() may round otherwise
        cohort.num_counted += len(durations_s)
        return cohort.used_s

    def _count_all(self) -> None:
        cohorts = [cohort for _, _, cohort in self._to_sink]
        for cohort in cohorts:
            self._count(cohort)
            cohort.num_counted = 0
        self._durations_s, self._elapsed_s, self._to_sink = [], 0.0, []
        for cohort in cohorts:
            self._await_sinking(cohort)


_level = attrgetter("policy_state.level")
_standing = attrgetter("policy_state.level", "policy_state.used_s")
_position = attrgetter("policy_state.position")
