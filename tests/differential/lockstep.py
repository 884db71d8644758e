"""Two V1 planners led through the same life, compared in everything that a log or a table could show."""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import zip_longest

from sim.core import EngineCore
from sim.policies.vllm_v1 import VllmV1
from sim.policies.vllm_v1_reference import VllmV1Reference
from sim.request import Request, Status
from sim.step import Finished, Step
from tests.differential.lives import Life

MAX_CALLS = 800
"""Where a life is cut: some requests fit never, and preempt themselves for ever."""

Sight = tuple[object, ...]
"""All that is visible of one engine call."""

INTERESTING = {
    "chunked",
    "hit",
    "evicted",
    "preempted",
    "preempted itself",
    "resumed",
    "starved",
    "finished",
    "finished while waiting",
    "departed",
    "cancelled",
    "cancelled in prefill",
    "cancelled in decode",
    "cancelled in queue",
    "cancelled after a preemption",
    "cancelled in flight",
}
"""What `Seen` counts, and what a set of lives must show to prove anything."""


class Lockstep:
    """Leads one planner through a life."""

    def __init__(self, life: Life, planner: VllmV1Reference) -> None:
        self.seen: Counter[str] = Counter()
        """How often each of INTERESTING happened."""
        self._life = life
        self._planner = planner
        self._core = EngineCore(planner)
        self._requests = life.requests()
        self._batches: deque[set[int]] = deque()
        """Who is in each batch in flight."""
        self._victims_to_cancel: list[Request] = []

    def sights(self) -> Iterator[Sight]:
        """What is seen in each call, until nobody is left or the life is cut."""
        life, core = self._life, self._core
        last_call = max((*life.arrivals, *life.cancels, *life.cancels_in_flight))
        leaving: list[Request] = []
        for call in range(MAX_CALLS):
            if call > last_call and not core.has_requests and not core.num_in_flight:
                break
            cancelled = self._cancel([*self._picked(life.cancels, call), *leaving])
            core.admit((), self._picked(life.arrivals, call))
            planned, takes_results = self._plan(call) if core.has_requests else (None, True)
            cancelled += self._cancel([*self._picked(life.cancels_in_flight, call), *self._victims_to_cancel])
            finished = self._complete() if takes_results and core.num_in_flight else None
            leaving = finished.departed if finished is not None and life.aborts else []
            yield call, cancelled, planned, _indices(finished), *self._state()
        self.seen["evicted"] += self._planner.kv.num_evicted

    def _picked(self, timetable: dict[int, list[int]], call: int) -> list[Request]:
        return [self._requests[index] for index in timetable.get(call, ())]

    def _cancel(self, requests: list[Request]) -> list[int]:
        known = [r for r in dict.fromkeys(requests) if r.policy_state is not None]
        for request in known:
            self._count_cancellation(request)
        return [r.index for r in self._core.admit(known, ())]

    def _count_cancellation(self, request: Request) -> None:
        if request.status is Status.OVER:
            return
        self.seen["cancelled"] += 1
        self.seen["cancelled in flight"] += any(request.index in batch for batch in self._batches)
        if request.status is Status.RUNNING:
            self.seen["cancelled in prefill" if request.policy_state.is_mid_prefill else "cancelled in decode"] += 1
        else:
            is_new = request.status is Status.WAITING
            self.seen["cancelled in queue" if is_new else "cancelled after a preemption"] += 1

    def _plan(self, call: int) -> tuple[Sight, bool]:
        """What is seen of a plan, and whether results are taken in the same call."""
        core, planner, seen = self._core, self._planner, self.seen
        step = core.plan(call)
        batch = [(request.index, num_tokens) for request, num_tokens in planner.batch(step)]
        self._batches.append({index for index, _ in batch})
        num_tokens = sum(num for _, num in batch)
        victims = enumerate((p.victim for p in step.preempted), seen["preempted"])
        self._victims_to_cancel = [victim for number, victim in victims if number in self._life.cancelled_victims]
        seen["chunked"] += sum(not chunk.is_last for chunk in step.chunks)
        seen["hit"] += sum(a.num_cached_tokens > 0 for a in step.admitted)
        seen["resumed"] += sum(a.is_resumed for a in step.admitted)
        seen["preempted"] += len(step.preempted)
        seen["preempted itself"] += sum(p.victim is p.beneficiary for p in step.preempted)
        seen["starved"] += num_tokens == planner.config.token_budget and len(batch) < len(planner.running())
        return _visible(step, batch), core.num_in_flight >= core.depth or (step.is_empty and not core.has_requests)

    def _complete(self) -> Finished:
        waiting = set(self._planner.waiting())
        _, finished = self._core.complete()
        self._batches.popleft()
        self.seen["finished"] += len(finished.finished)
        self.seen["finished while waiting"] += len(waiting.intersection(finished.finished))
        self.seen["departed"] += len(finished.departed)
        return finished

    def _state(self) -> Sight:
        planner = self._planner
        planner.check_integrity()
        return (
            [r.index for r in planner.running()],
            [r.index for r in planner.waiting()],
            (planner.free_blocks, planner.kv.num_evicted),
            [(r.index, r.num_output_tokens) for r in self._requests if r.status is Status.OVER],
        )


def _visible(step: Step, batch: list[tuple[int, int]]) -> Sight:
    return (
        batch,
        step.shape,
        [(c.request.index, c.num_tokens, c.context, c.is_last) for c in step.chunks],
        [(a.request.index, *a[1:]) for a in step.admitted],
        [(p.victim.index, p.beneficiary.index, p.num_lost_tokens) for p in step.preempted],
        (step.blocked_by, step.num_running, step.num_waiting, step.used_blocks, step.num_new_blocks, step.live_tokens),
        step.lane,
    )


def _indices(finished: Finished | None) -> object:
    return finished and [[r.index for r in part] for part in finished]


def compare_twins(life: Life, seen: Counter[str]) -> tuple[Sight | None, ...] | None:
    """The first call in which the fast planner differs from the plain one, or None; counts what happened."""
    plain = Lockstep(life, VllmV1Reference(life.config))
    fast = Lockstep(life, VllmV1(life.config))
    difference = next((p for p in zip_longest(plain.sights(), fast.sights()) if p[0] != p[1]), None)
    seen.update(plain.seen)
    return difference
