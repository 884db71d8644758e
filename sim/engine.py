"""The SimPy driver of an engine: one process that prices the steps its core decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import NamedTuple

from simpy.events import Event

from sim.clock import Clock, Priority
from sim.core import EngineCore
from sim.cost.base import CostModel
from sim.errors import InvariantError
from sim.record import Recorder
from sim.request import NEVER, Outcome, Request, Status
from sim.step import Step

MAX_EMPTY_REPLANS = 1000
"""Empty plans in a row at one instant after which an engine counts as livelocked."""


class Launch(NamedTuple):
    """A step on its way through the device. An empty step takes no time."""

    step: Step
    start_ns: int
    end_ns: int
    host_ns: int


class Device:
    """Executes launched steps in order.

    A step starts when the host has planned it and the device is free; the host plans one step at a time,
    so with two batches in flight its time hides behind the device's.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._launches: deque[Launch] = deque()
        self._host_free_ns = 0
        self._free_ns = 0
        self._num_computing = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing that takes time is on its way."""
        return self._num_computing == 0

    @property
    def oldest_end_ns(self) -> int:
        """When the oldest launched step ends."""
        return self._launches[0].end_ns

    def launch(self, step: Step, now_ns: int) -> None:
        """Accept a step that was planned at `now_ns`."""
        if step.is_empty:
            end_ns = self._launches[-1].end_ns if self._launches else now_ns
            self._launches.append(Launch(step, end_ns, end_ns, 0))
            return
        host_ns = self._cost.host_ns(step.shape)
        self._host_free_ns = max(now_ns, self._host_free_ns) + host_ns
        start_ns = max(self._host_free_ns, self._free_ns)
        self._free_ns = start_ns + self._cost.price(step.shape)
        self._num_computing += 1
        self._launches.append(Launch(step, start_ns, self._free_ns, host_ns))

    def pop_oldest(self) -> Launch:
        """The step that ended."""
        launch = self._launches.popleft()
        if not launch.step.is_empty:
            self._num_computing -= 1
        return launch


class Engine:
    """One serving engine in simulated time."""

    def __init__(self, clock: Clock, core: EngineCore, cost: CostModel, recorder: Recorder, *, aborts: bool) -> None:
        """`aborts`: a request whose client leaves is dropped; otherwise it is computed to its end."""
        self._clock = clock
        self._core = core
        self._device = Device(cost)
        self._recorder = recorder
        self._aborts = aborts
        self._arrivals: list[Request] = []
        self._cancels: list[Request] = []
        self._wakeup: Event | None = None
        self._num_empty_replans = 0
        self.on_release: Callable[[Request], None] = _ignore
        """Called once for every request that is over in the engine, however it ended."""
        self.on_answer: Callable[[Request], None] = _ignore
        """Called when the whole answer of a request has reached its client, which is still there."""
        self.on_depart: Callable[[Request], None] = _ignore
        """Called when a request's client has received the tokens after which it leaves."""
        clock.env.process(self._run())

    def submit(self, request: Request) -> None:
        """A request reaches the engine now. What could never run is refused at once."""
        request.queued_ns = self._clock.now_ns
        if self._core.policy.never_fits(request) is not None:
            request.status = Status.OVER
            request.outcome = Outcome.REJECTED
            self._end(request, NEVER)
            return
        self._arrivals.append(request)
        self._wake()

    def cancel(self, request: Request, outcome: Outcome) -> None:
        """The client of a submitted request leaves now (`outcome`: CANCELLED or TIMED_OUT).

        The engine notices at its next boundary between steps. No-op when the request is over.
        """
        if request.status is Status.OVER:
            return
        streams = self._core.policy.streams_answers
        request.num_delivered_tokens = self._recorder.num_tokens(request) if streams else 0
        request.cancelled_ns = self._clock.now_ns
        request.outcome = outcome
        if self._aborts:
            self._cancels.append(request)
            self._wake()

    def _run(self) -> Generator[Event, None, None]:
        clock, core, device = self._clock, self._core, self._device
        while True:
            self._admit()
            while core.may_plan():  # 1. decide; with depth > 1, ahead of the results
                device.launch(core.plan(clock.now_ns), clock.now_ns)
            if device.is_idle:  # 2. nothing to compute: wait for work
                yield from self._rest()
                continue
            yield clock.at(device.oldest_end_ns, Priority.COMPLETE)  # 3. the device works; the world queues up
            self._admit_cancels()
            self._complete_oldest()  # 4. tokens exist: stream, finish, free KV; 5. one row per step
            if not clock.is_last_at_now():
                yield clock.at(clock.now_ns, Priority.PLAN)

    def _complete_oldest(self) -> bool:
        """Take in the oldest step's results; returns whether it changed anything."""
        step, finished = self._core.complete()
        _, start_ns, end_ns, host_ns = self._device.pop_oldest()
        if step.is_empty:
            return bool(step.preempted)
        self._recorder.record(step, start_ns, end_ns, host_ns, finished)
        for request in finished.departed:
            self.on_depart(request)
        for request in finished.finished if self._core.policy.streams_answers else finished.released:
            if request.cancelled_ns == NEVER:
                self.on_answer(request)
        for request in finished.released:
            self.on_release(request)
        return True

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
        self._admit_cancels()
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
        self._recorder.end(request, released_ns)
        self.on_release(request)


def _ignore(_: Request) -> None:
    """Nobody listens."""
