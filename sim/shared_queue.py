"""Several engines that take requests from one queue: servers in the words of queueing theory, Triton's instances.

To clients it looks like an engine. Where a router sends each request to one replica at once, here it waits in the one
queue until a replica admits it, so that no replica idles while a request waits that it could run. Every replica has
GPUs, weights and a KV pool of its own, plans when its own step has ended, or when it idles and somebody arrives, and
records tables as if it were alone. Doors and time-outs stand before the queue. Whoever leaves it without having been
admitted is in the tables of no replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sim.clock import Clock, Priority
from sim.engine import Engine
from sim.policies.base import Policy
from sim.reception import NEVER_FITS, Reception
from sim.record import Recorder, Tables
from sim.request import NEVER, Outcome, Request, Status


class Taker(NamedTuple):
    """A replica. Its policy shares its queue with those of the others, its engine does not look ahead."""

    engine: Engine
    policy: Policy
    recorder: Recorder


class SharedQueue:
    """Replicas behind one queue. Its interface towards clients is that of an `Engine` and of a `Recorder`.

    Of several that idle, the first takes what comes.
    """

    def __init__(self, clock: Clock, takers: Sequence[Taker], reception: Reception, *, aborts: bool = True) -> None:
        """`reception` is that of all engines, which must know each other's admissions; `aborts` as theirs."""
        self._clock = clock
        self._takers = tuple(takers)
        self._reception = reception
        self._aborts = aborts
        self._at_door = Recorder()
        """Of requests that no replica admitted."""
        self.on_expire: Callable[[Request], None] = _ignore
        """Called when a request has waited too long: whoever sent it is to cancel it."""

    @property
    def on_release(self) -> Callable[[Request], None]:
        """Called once for every request that is over, however it ended."""
        return self._takers[0].engine.on_release

    @on_release.setter
    def on_release(self, called: Callable[[Request], None]) -> None:
        for taker in self._takers:
            taker.engine.on_release = called

    @property
    def on_answer(self) -> Callable[[Request], None]:
        """Called when the whole answer of a request has reached its client, which is still there."""
        return self._takers[0].engine.on_answer

    @on_answer.setter
    def on_answer(self, called: Callable[[Request], None]) -> None:
        for taker in self._takers:
            taker.engine.on_answer = called

    @property
    def on_depart(self) -> Callable[[Request], None]:
        """Called when a request's client has received the tokens after which it leaves."""
        return self._takers[0].engine.on_depart

    @on_depart.setter
    def on_depart(self, called: Callable[[Request], None]) -> None:
        for taker in self._takers:
            taker.engine.on_depart = called

    def submit(self, request: Request) -> None:
        """A request reaches the queue now, unless it could never run or a door refuses it."""
        policy, now_ns = self._takers[0].policy, self._clock.now_ns
        request.queued_ns = now_ns
        reason: int | None = NEVER_FITS
        if policy.never_fits(request) is None:
            reason = self._reception.reason_to_refuse(request, now_ns)
        if reason is not None:
            request.refuse(reason)
            self._end(request, NEVER)
            return
        policy.add(request)
        for taker in self._takers:
            taker.engine.look_again()
        if policy.deadlines is not None or self._reception.timeout_ns is not None:
            due_ns = self._reception.wait_ends_ns(request, now_ns, policy.deadlines)
            self._clock.call_at(due_ns, Priority.CANCEL, lambda: self._expire(request))

    def cancel(self, request: Request, outcome: Outcome) -> None:
        """The client of a submitted request leaves now. Who waits is dropped at once, others as by their engine."""
        if request.status is Status.OVER:
            return
        taker = self._taker_of(request)
        if taker is not None:
            taker.engine.cancel(request, outcome)
            return
        request.cancelled_ns = self._clock.now_ns
        request.outcome = outcome
        if self._aborts or request.turned_away_by != NEVER:
            self._takers[0].policy.cancel(request)
            self._end(request, self._clock.now_ns)

    def stop(self) -> None:
        """The clock will not go on. Nothing was foreseen."""

    def end(self, request: Request, released_ns: int) -> None:
        """The last word on a request, as `Recorder.end`, in the tables of whoever has it."""
        taker = self._taker_of(request)
        (self._at_door if taker is None else taker.recorder).end(request, released_ns)

    def tables(self) -> tuple[list[Tables], Tables]:
        """Those of every replica, and that of the requests which none admitted. Ends the recording."""
        return [taker.recorder.tables() for taker in self._takers], self._at_door.tables()

    def _taker_of(self, request: Request) -> Taker | None:
        """Who has admitted the request. O(running): asked only for clients that leave, and when a run is cut."""
        return next((taker for taker in self._takers if request in taker.policy.running()), None)

    def _expire(self, request: Request) -> None:
        """Its time in the queue is up. Nothing happens to one that was admitted, or whose client has left."""
        if self._reception.is_due(request) and request.cancelled_ns == NEVER:
            request.turned_away_by = self._reception.timeout_reason
            self.on_expire(request)

    def _end(self, request: Request, released_ns: int) -> None:
        self._reception.admitted(request)
        self._at_door.end(request, released_ns)
        self.on_release(request)


def _ignore(_: Request) -> None:
    """Nobody listens."""
