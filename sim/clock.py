"""Integer nanoseconds on SimPy, and who goes first when several things happen in the same one.

SimPy orders events by (time, priority, creation). The priorities below make the order at one nanosecond
a rule instead of an accident of creation:

    CANCEL    clients leave
    COMPLETE  a step's results exist
    ARRIVE    requests arrive, whoever waited for a result reacts to it
    PLAN      engines decide their next step, knowing all of the above
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from heapq import heappush
from typing import NoReturn

import simpy
from simpy.core import EmptySchedule
from simpy.events import Event

from sim.errors import InvariantError, ScenarioError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000
MAX_TIME_NS = 9 * 10**18
"""Later times do not fit in the 64 bits of the tables."""


class Priority(IntEnum):
    """Order of events that fall on the same nanosecond; smaller goes first."""

    CANCEL = 0
    COMPLETE = 1
    ARRIVE = 2
    PLAN = 3


def to_ns(seconds: float) -> int:
    """Seconds to the nearest integer nanosecond: the only way a float becomes a time."""
    return round(seconds * NS_PER_S)


class Clock:
    """A SimPy environment whose time is an integer number of nanoseconds."""

    def __init__(self) -> None:
        self.env = simpy.Environment(initial_time=0)

    @property
    def now_ns(self) -> int:
        """The current time."""
        return int(self.env.now)

    def event(self) -> Event:
        """An event that somebody will `trigger`."""
        return Event(self.env)

    def trigger(self, event: Event, priority: Priority) -> None:
        """Let an `event()` fire now, in the given place of this nanosecond."""
        # What simpy.Timeout does, with a priority: the event has its value when it is scheduled.
        event._ok = True
        event._value = None
        self.env.schedule(event, priority)  # type: ignore[arg-type]  # SimPy's type knows only its own two

    def at(self, time_ns: int, priority: Priority) -> Event:
        """An event that fires at `time_ns` (>= now) in the given place of that nanosecond.

        Raises ScenarioError for a time that no run can reach.
        """
        if not self.env._now <= time_ns <= MAX_TIME_NS:
            self._refuse(time_ns)
        return _Occurrence(self.env, time_ns, priority)

    def call_at(self, time_ns: int, priority: Priority, action: Callable[[], None]) -> None:
        """Call `action` at `time_ns` (>= now) in the given place of that nanosecond."""
        self.at(time_ns, priority).callbacks.append(lambda _: action())

    def _refuse(self, time_ns: int) -> NoReturn:
        if time_ns < self.env.now:
            raise InvariantError(f"event at {time_ns} ns scheduled in the past (now {self.now_ns} ns)")
        raise ScenarioError(
            "run",
            f"simulated time would pass {MAX_TIME_NS / NS_PER_S:.0e} s",
            remedy="Lower the times in cost, arrivals or engine, or the number of requests.",
        )

    def run(self, until_ns: int | None = None) -> None:
        """Run until nothing is scheduled, or through everything that is due at `until_ns` or before.

        In the second case the time is `until_ns` afterwards.
        """
        env = self.env
        if until_ns is None:
            with _collecting_rarely(), suppress(EmptySchedule):
                while True:
                    env.step()
            return
        self.at(until_ns, Priority.PLAN)
        with _collecting_rarely():
            while env.peek() <= until_ns:
                env.step()


class _Occurrence(Event):
    """What simpy.Timeout is, at a time and with a priority: an event that has its value when it is scheduled.

    There is one for every iteration and every arrival, so what `Environment.schedule` does is done here.
    """

    def __init__(self, env: simpy.Environment, time_ns: int, priority: Priority) -> None:
        self.env = env
        self.callbacks = []
        self._ok = True
        self._value = None
        heappush(env._queue, (time_ns, priority, next(env._eid), self))  # type: ignore[misc]  # SimPy's own two priorities


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Let the garbage collector look less often: a run makes millions of objects and hardly a cycle."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
