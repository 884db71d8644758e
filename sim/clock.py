"""Integer nanoseconds on SimPy, and who goes first when several things happen in the same one.

SimPy orders events by (time, priority, creation). The priorities below make the order at one nanosecond
a rule instead of an accident of creation:

    CANCEL    clients leave
    COMPLETE  a step's results exist
    ARRIVE    requests arrive, whoever waited for a result reacts to it
    PLAN      engines decide their next step, knowing all of the above
    END       a run is cut after all of the above
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from heapq import heappush
from typing import NoReturn, Self

import simpy
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
    END = 4


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
        now_ns: int = self.env._now  # type: ignore[assignment]  # SimPy allows floats; only integers are scheduled
        return now_ns

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
        return Timer(self.env, priority).set(time_ns)

    def timer(self, priority: Priority) -> Timer:
        """An event for one time after another, each in the given place of its nanosecond."""
        return Timer(self.env, priority)

    def is_anybody_due(self) -> bool:
        """Whether something else is scheduled for this very nanosecond."""
        queue = self.env._queue
        return queue[0][0] <= self.env._now if queue else False

    def advance_to(self, time_ns: int) -> bool:
        """Move on to a time (>= now) up to which nothing is scheduled. False, and nothing changed: something is."""
        queue = self.env._queue
        if not queue or queue[0][0] <= time_ns:
            return False
        self.env._now = time_ns
        return True

    def call_at(self, time_ns: int, priority: Priority, action: Callable[[], None]) -> None:
        """Call `action` at `time_ns` (>= now) in the given place of that nanosecond."""
        self.at(time_ns, priority).callbacks.append(lambda _: action())

    def run(self, until_ns: int | None = None) -> None:
        """Run until nothing is scheduled, or through everything that is due at `until_ns` or before.

        In the second case the time is `until_ns` afterwards.
        """
        end = None if until_ns is None else self.at(until_ns, Priority.END)
        with _collecting_rarely():
            self.env.run(end)


class Timer(Event):
    """What simpy.Timeout is, at a time and with a priority: an event that has its value when it is scheduled.

    When it has fired it may be set again. There is a time for every iteration and every arrival, so what
    `Environment.schedule` does is done here.
    """

    def __init__(self, env: simpy.Environment, priority: Priority) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self._priority = priority

    def set(self, time_ns: int) -> Self:
        """Fire at `time_ns` (>= now). Raises ScenarioError for a time that no run can reach."""
        env = self.env
        if not env._now <= time_ns <= MAX_TIME_NS:
            _refuse(time_ns, env)
        self.callbacks = []
        heappush(env._queue, (time_ns, self._priority, next(env._eid), self))  # type: ignore[misc]  # SimPy's own two priorities
        return self


def _refuse(time_ns: int, env: simpy.Environment) -> NoReturn:
    if time_ns < env.now:
        raise InvariantError(f"event at {time_ns} ns scheduled in the past (now {env.now} ns)")
    raise ScenarioError(
        "run",
        f"simulated time would pass {MAX_TIME_NS / NS_PER_S:.0e} s",
        remedy="Lower the times in cost, arrivals or engine, or the number of requests.",
    )


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Let the garbage collector look less often: a run makes millions of objects and hardly a cycle."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
