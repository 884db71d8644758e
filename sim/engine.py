"""The SimPy driver of an engine: one process that prices the steps its core decides."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Literal

from simpy.core import Infinity
from simpy.events import Event

from sim.clock import Clock, Priority
from sim.core import EngineCore
from sim.cost.base import CostModel
from sim.device import Device
from sim.errors import InvariantError
from sim.reception import NEVER_FITS, Reception
from sim.record import Recorder
from sim.request import NEVER, Outcome, Request, Status
from sim.step import NOTHING_ENDED, Finished, SteadyRun, SteadyTimes, Step

MAX_EMPTY_REPLANS = 1000
"""Empty plans in a row at one instant after which an engine counts as livelocked."""


MIN_STEADY_STEPS = 3
"""Steps that must be certain to change nothing before they are advanced at once: to foresee them has its price."""

MAX_STEADY_STEPS = 4096


@dataclass(slots=True)
class Foreseen:
    """Steps that were priced together because they change nothing. They have not happened yet."""

    run: SteadyRun
    times: SteadyTimes
    num_steps: int
    """How many of them are planned until something must be decided."""
    planned_ns: list[int]
    """When the first steps are planned; each further one when the step `len(planned_ns)` before it ends."""
    wakeup: Event
    """When something must be decided."""

    def planned_at_ns(self, index: int) -> int:
        """When the step with this index is planned."""
        depth = len(self.planned_ns)
        return self.planned_ns[index] if index < depth else int(self.times.end_ns[index - depth])

    def num_ended(self, now_ns: int, side: Literal["left", "right"]) -> int:
        """Steps, with the one in flight before the run, that end before now (left) or not after it (right)."""
        bisect = bisect_left if side == "left" else bisect_right
        num_steps = self.num_steps - len(self.planned_ns)
        return bisect(self.planned_ns, now_ns, 1) - 1 + bisect(self.times.end_ns, now_ns, 0, num_steps)


class Engine:
    """One serving engine in simulated time."""

    def __init__(
        self,
        clock: Clock,
        core: EngineCore,
        cost: CostModel,
        recorder: Recorder,
        *,
        aborts: bool = True,
        macro_steps: bool = True,
        shares_clock: bool = False,
        reception: Reception | None = None,
        device: Device | None = None,
    ) -> None:
        """`reception`: turns requests away; None: everybody who could run is let in.

        `aborts`: a request whose client leaves is dropped; otherwise it is computed to its end.

        `macro_steps`: steps that are certain to change nothing are advanced at once. The tables are the same.
        `shares_clock`: there are other engines, so the next event of the clock need not disturb this one.
        `device`: what executes the steps; by default one on which each takes the price that `cost` says.
        """
        self._clock = clock
        self._core = core
        self._deadlines = core.policy.deadlines
        self._device = device or Device(cost, core.policy.num_stages)
        self._recorder = recorder
        self._aborts = aborts
        self._reception = reception or Reception()
        self._arrivals: list[Request] = []
        self._cancels: list[Request] = []
        self._wakeup: Event | None = None
        self._num_empty_replans = 0
        self._macro_steps = macro_steps
        self._shares_clock = shares_clock
        self._foreseen: Foreseen | None = None
        self._num_last_foreseen = MAX_STEADY_STEPS
        """Steps of the last run that was foreseen that came about."""
        self.on_release: Callable[[Request], None] = _ignore
        """Called once for every request that is over in the engine, however it ended."""
        self.on_answer: Callable[[Request], None] = _ignore
        """Called when the whole answer of a request has reached its client, which is still there."""
        self.on_depart: Callable[[Request], None] = _ignore
        """Called when a request's client has received the tokens after which it leaves."""
        self.on_expire: Callable[[Request], None] = _ignore
        """Called when a request has waited too long: whoever sent it is to cancel it."""
        clock.env.process(self._run())

    def submit(self, request: Request) -> None:
        """A request reaches the engine now. What could never run is refused at once."""
        if self._foreseen is not None:
            self._cut_short(self._foreseen)
        request.queued_ns = now_ns = self._clock.now_ns
        reception = self._reception
        reason: int | None = None
        if self._core.policy.never_fits(request) is not None:
            reason = NEVER_FITS
        elif not reception.is_open:
            reason = reception.reason_to_refuse(request, now_ns)
        if reason is not None:
            request.refuse(reason)
            self._end(request, NEVER)
            return
        self._arrivals.append(request)
        if self._wakeup is not None:
            self._wake()
        if self._deadlines is not None or reception.timeout_ns is not None:
            due_ns = reception.wait_ends_ns(request, now_ns, self._deadlines)
            self._clock.call_at(due_ns, Priority.CANCEL, lambda: self._expire(request))

    def cancel(self, request: Request, outcome: Outcome) -> None:
        """The client of a submitted request leaves now (`outcome`: CANCELLED or TIMED_OUT).

        The engine notices at its next boundary between steps. No-op when the request is over.
        """
        if request.status is Status.OVER:
            return
        self.sync()
        streams = self._core.policy.streams_answers
        request.num_delivered_tokens = self._recorder.num_tokens(request) if streams else 0
        request.cancelled_ns = self._clock.now_ns
        request.outcome = outcome
        if self._aborts or request.turned_away_by != NEVER:
            self._cancels.append(request)
            self._wake()

    def look_again(self) -> None:
        """There may be something to plan now, for its queue is filled from outside. Ends its sleep, if it sleeps."""
        self._wake()

    @property
    def num_waiting(self) -> int:
        """Requests in its waiting queue, those that it has not looked at included."""
        return self._core.policy.num_waiting + len(self._arrivals)

    @property
    def num_running(self) -> int:
        """Requests that it has admitted and not released."""
        return self._core.policy.num_unfinished - self._core.policy.num_waiting

    @property
    def kv_usage(self) -> float:
        """The part of its KV blocks that is in use by the steps planned so far. Steps that are foreseen stay so."""
        policy, foreseen = self._core.policy, self._foreseen
        used_blocks = policy.usable_blocks - policy.free_blocks
        if foreseen is not None:
            num_planned = foreseen.num_ended(self._clock.now_ns, "left") + 1
            used_blocks += sum(foreseen.run.num_new_blocks[:num_planned])
        return used_blocks / policy.usable_blocks

    def _expire(self, request: Request) -> None:
        """Its time in the queue is up. Nothing happens to one that was admitted, or whose client has left."""
        self.sync()
        if self._reception.is_due(request) and request.cancelled_ns == NEVER:
            request.turned_away_by = self._reception.timeout_reason
            self.on_expire(request)

    def sync(self) -> None:
        """Let steps that were only foreseen happen up to now: for whoever acts on the engine.

        A step that ends at this very nanosecond counts as running still, as it does for a cancellation.
        """
        foreseen = self._foreseen
        if foreseen is not None:
            self._cut_short(foreseen)
            num_ended = foreseen.num_ended(self._clock.now_ns, "left")
            self._settle(foreseen, num_ended, num_ended + 1)

    def stop(self) -> None:
        """The clock will not go on: let all that was foreseen up to and including now happen."""
        foreseen = self._foreseen
        if foreseen is not None:
            num_ended = foreseen.num_ended(self._clock.now_ns, "right")
            self._settle(foreseen, num_ended, num_ended + 1)

    def _run(self) -> Generator[Event, None, None]:
        clock, core, device = self._clock, self._core, self._device
        step_end, next_plan = clock.timer(Priority.COMPLETE), clock.timer(Priority.PLAN)
        now_ns = clock.now_ns
        while True:
            if self._arrivals or self._cancels:
                self._admit()
            num_to_plan = core.num_to_plan()
            wakeup = self._foresee(now_ns) if num_to_plan == 1 and self._macro_steps else None
            if wakeup is not None:  # 1. decide many steps at once where nothing can change
                yield wakeup
                now_ns, has_ended = clock.now_ns, self._settle_to_wakeup()
            else:
                for _ in range(num_to_plan):  # ... or decide one; with depth > 1, ahead of the results
                    device.launch(core.plan(now_ns), now_ns)
                end_ns = device.next_end_ns(now_ns)
                if end_ns is None:  # 2. nothing to compute: wait for work
                    yield from self._rest()
                    now_ns = clock.now_ns
                    continue
                if not clock.advance_to(end_ns):
                    yield step_end.set(end_ns)  # 3. the device works; the world queues up
                now_ns, has_ended = end_ns, False
            if self._cancels:
                self._admit_cancels()
            if not has_ended:
                self._complete_oldest()  # 4. tokens exist: stream, finish, free KV; 5. one row per step
            if clock.is_anybody_due():  # somebody else is due at this very nanosecond
                yield next_plan.set(now_ns)

    def _foresee(self, now_ns: int) -> Event | None:
        """Price the steps that are certain to change nothing; an event at the end of the last one, or None."""
        core, clock, device = self._core, self._clock, self._device
        if device.last_shape.prefills:
            return None  # whoever completes its prefill decodes from the next step on
        max_steps = self._max_steps_undisturbed(now_ns)
        run = core.policy.steady_run(MIN_STEADY_STEPS, max_steps) if max_steps >= MIN_STEADY_STEPS else None
        times = None if run is None else device.foresee(run, now_ns)
        if run is None or times is None:
            return None
        planned_ns = [now_ns]
        if core.num_in_flight:
            planned_ns.append(device.oldest_end_ns)
        num_steps = len(run.num_new_blocks)
        wakeup = clock.at(int(times.end_ns[num_steps - len(planned_ns)]), Priority.COMPLETE)
        self._foreseen = Foreseen(run, times, num_steps, planned_ns, wakeup)
        return wakeup

    def _max_steps_undisturbed(self, now_ns: int) -> int:
        """About how many steps end before something truncates a run: the next event, or else as long as last time."""
        if self._shares_clock:
            return min(MAX_STEADY_STEPS, 2 * self._num_last_foreseen + MIN_STEADY_STEPS)
        next_ns, price_ns = self._clock.env.peek(), self._device.last_price_ns
        if not price_ns or next_ns == Infinity:
            return MAX_STEADY_STEPS
        return min(MAX_STEADY_STEPS, int(next_ns - now_ns) // price_ns + 2)

    def _cut_short(self, foreseen: Foreseen) -> None:
        """Something came up: wake at the end of the step that runs now, and foresee no step that is planned then.

        A step that ends at this very nanosecond counts as running. Nothing happens to those that have ended, which
        doors may not know yet: they look at who waits and at steps with prompts, and there is none among them.
        """
        num_steps = foreseen.num_ended(self._clock.now_ns, "left") + 1
        if num_steps < foreseen.num_steps:
            earlier = self._clock.at(foreseen.planned_at_ns(num_steps), Priority.COMPLETE)
            earlier.callbacks, foreseen.wakeup.callbacks = foreseen.wakeup.callbacks, []
            self._foreseen = replace(foreseen, num_steps=num_steps, wakeup=earlier)

    def _settle_to_wakeup(self) -> bool:
        """Let foreseen steps happen up to now, the time of their wakeup. Returns whether the one that ends now has.

        Without a step planned ahead of it, it may end requests, and is left in flight.
        """
        foreseen = self._foreseen
        if foreseen is None:
            return False
        is_planned_ahead = self._core.depth > 1
        self._settle(foreseen, foreseen.num_steps - (not is_planned_ahead), foreseen.num_steps)
        return is_planned_ahead

    def _settle(self, foreseen: Foreseen, num_ended: int, num_planned: int) -> None:
        """Let the first `num_ended` of the foreseen steps (see `Foreseen.num_ended`) happen.

        Afterwards those are in flight that are among the first `num_planned` of the run and have not ended.
        """
        self._foreseen = None
        self._num_last_foreseen = num_ended
        num_before = len(foreseen.planned_ns) - 1
        first = max(0, num_ended - num_before)
        if first:
            if num_before:
                self._complete_oldest()
            self._recorder.record_steady(foreseen.run, foreseen.times, first)
            if not self._reception.is_open:
                self._reception.observe_steady(foreseen.times.start_ns[:first], foreseen.times.end_ns[:first])
            self._core.policy.advance_steady(first)
            self._device.skip_to(int(foreseen.times.end_ns[first - 1]))
        for index in range(first, num_planned):
            now_ns = foreseen.planned_at_ns(index)
            self._device.launch(self._core.plan(now_ns), now_ns)
            if num_before and num_ended and index == 0:
                self._complete_oldest()

    def _complete_oldest(self) -> bool:
        """Take in the oldest step's results; returns whether it changed anything."""
        step, finished = self._core.complete()
        _, start_ns, end_ns, host_ns = self._device.pop_oldest()
        if start_ns == end_ns:
            self._recorder.record_preemptions(step)
            self._end_dropped(step, end_ns)
            return bool(step.preempted or step.dropped)
        self._recorder.record(step, start_ns, end_ns, host_ns, finished)
        if not self._reception.is_open:
            self._reception.observe(step, start_ns, end_ns)
        if step.dropped:
            self._end_dropped(step, end_ns)
        if finished is not NOTHING_ENDED:
            self._tell_clients(finished)
        return True

    def _end_dropped(self, step: Step, end_ns: int) -> None:
        """Those whom the engine gave up learn of it with the step's results."""
        for request in step.dropped:
            if request.cancelled_ns == NEVER:
                request.outcome = Outcome.REJECTED
                request.turned_away_by = NEVER_FITS
            self._end(request, end_ns)

    def _tell_clients(self, finished: Finished) -> None:
        for request in finished.departed:
            self.on_depart(request)
        released, on_answer, on_release = finished.released, self.on_answer, self.on_release
        if on_answer is not _ignore:
            for request in finished.finished if self._core.policy.streams_answers else released:
                if request.cancelled_ns == NEVER:
                    on_answer(request)
        for request in released:
            on_release(request)

    def _rest(self) -> Generator[Event, None, None]:
        """Only empty steps are in flight. Plan again if one of them preempted, else sleep until something happens."""
        core, clock = self._core, self._clock
        changes = [self._complete_oldest() for _ in range(core.num_in_flight)]
        if any(changes):
            self._num_empty_replans += 1
            if self._num_empty_replans > MAX_EMPTY_REPLANS:
                raise InvariantError(f"livelock: {MAX_EMPTY_REPLANS} plans at {clock.now_ns} ns computed nothing")
            return
        self._num_empty_replans = 0
        self._wakeup = wakeup = clock.event()
        wake_ns = core.policy.wake_ns()
        if wake_ns is not None:
            clock.call_at(max(wake_ns, clock.now_ns), Priority.PLAN, lambda: self._wake(wakeup))
        yield wakeup

    def _wake(self, wakeup: Event | None = None) -> None:
        """End the sleep in progress, if any (and if it is the one that `wakeup` ends)."""
        if self._wakeup is not None and wakeup in (None, self._wakeup):
            self._clock.trigger(self._wakeup, Priority.PLAN)
            self._wakeup = None

    def _admit(self) -> None:
        if self._cancels:
            self._admit_cancels()
        if self._arrivals:
            arrivals, self._arrivals = self._arrivals, []
            self._core.admit((), arrivals)

    def _admit_cancels(self) -> None:
        cancels, self._cancels = self._cancels, []
        never_admitted = [r for r in cancels if r in self._arrivals]
        for request in never_admitted:
            self._arrivals.remove(request)
            request.status = Status.OVER
        for request in never_admitted + self._core.admit(cancels, ()):
            self._end(request, self._clock.now_ns)

    def _end(self, request: Request, released_ns: int) -> None:
        self._reception.admitted(request)
        self._recorder.end(request, released_ns)
        self.on_release(request)


def _ignore(_: Request) -> None:
    """Nobody listens."""
