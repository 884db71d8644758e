"""The clients: they send requests, wait for answers, leave, and limit themselves.

Open-loop requests arrive by themselves; closed-loop clients send the next one some time after an answer, and
so does everybody who is in a conversation.
A class's connection limit holds requests back at the client, which is not batching: what waits there is
invisible to the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from sim.clock import Clock, Priority
from sim.request import NEVER, Outcome, Request, Status
from sim.workload.base import Traffic

_REJECTED = Outcome.REJECTED


class Server(Protocol):
    """Whom clients send requests to: an `Engine`, or the `Router` of a fleet."""

    on_release: Callable[[Request], None]
    on_answer: Callable[[Request], None]

    @property
    def on_depart(self) -> Callable[[Request], None]:
        """See `Engine`."""

    @on_depart.setter
    def on_depart(self, called: Callable[[Request], None]) -> None: ...

    @property
    def on_expire(self) -> Callable[[Request], None]:
        """See `Engine`."""

    @on_expire.setter
    def on_expire(self, called: Callable[[Request], None]) -> None: ...

    def submit(self, request: Request) -> None:
        """A request reaches the server now."""

    def cancel(self, request: Request, outcome: Outcome) -> None:
        """The client of a submitted request leaves now."""

    def stop(self) -> None:
        """The clock will not go on."""


class Ledger(Protocol):
    """Where the end of a request is written down that the server does not see: a `Recorder`, or a `Router`."""

    def end(self, request: Request, released_ns: int) -> None:
        """The last word on a request."""


class Clients:
    """Everybody who talks to one server in a run."""

    def __init__(self, clock: Clock, engine: Server, recorder: Ledger, traffic: Traffic) -> None:
        self._clock = clock
        self._engine = engine
        self._recorder = recorder
        self._traffic = traffic
        is_first = traffic.is_first_of_call()
        self._open_rows: deque[int] = deque(np.flatnonzero((traffic.arrival_ns != NEVER) & is_first).tolist())
        reactions = np.flatnonzero((traffic.arrival_ns == NEVER) & is_first)
        if traffic.has_next_turn is not None:
            reactions = reactions[~traffic.has_next_turn[reactions - 1]]
        self._closed_rows: list[deque[int]] = [
            deque(reactions[traffic.class_index[reactions] == i].tolist()) for i in range(len(traffic.pools))
        ]
        self._limits = {
            i: pool.max_connections for i, pool in enumerate(traffic.pools) if pool.max_connections is not None
        }
        """Classes with a connection limit. The others need not count."""
        self._num_connected = dict.fromkeys(self._limits, 0)
        self._held_back: dict[int, deque[tuple[Request, ...]]] = {i: deque() for i in self._limits}
        self._call = None if traffic.call is None else traffic.call.tolist()
        self._num_unanswered: dict[int, int] = {}
        """Prompts of each call under way whose answer is still to come."""
        self._impatient = set(np.unique(traffic.class_index[traffic.cancel_after_ns != NEVER]).tolist())
        """Classes some of whose clients leave after a time."""
        self._restrained = self._impatient | set(self._limits)
        """Classes of which more is to be known at an arrival than that it happened."""
        self._reacts = traffic.has_next_turn is not None or any(p.num_clients is not None for p in traffic.pools)
        self._live: dict[int, Request] = {}
        self._arrival = clock.timer(Priority.ARRIVE)
        engine.on_release = self._on_release
        if self._limits or self._reacts or self._call is not None:
            engine.on_answer = self._disconnect
        engine.on_depart = lambda request: self._leave(request, Outcome.CANCELLED)
        engine.on_expire = lambda request: self._leave(request, Outcome.TIMED_OUT)

    def start(self) -> None:
        """Schedule the first arrivals."""
        if self._open_rows:
            self._schedule_arrival(self._requests(self._open_rows.popleft()))
        for class_index, pool in enumerate(self._traffic.pools):
            for _ in range(min(pool.num_clients or 0, len(self._closed_rows[class_index]))):
                self._think(class_index)

    def stop(self) -> None:
        """The run is cut here: whoever is still in the system ends as unfinished."""
        self._engine.stop()
        for request in list(self._live.values()):
            if not request.is_recorded:
                request.outcome = Outcome.UNFINISHED
                self._recorder.end(request, NEVER)
        self._live.clear()

    def _schedule_arrival(self, requests: tuple[Request, ...]) -> None:
        self._next_open = requests
        self._arrival.set(requests[0].arrival_ns).callbacks.append(self._arrive_open)

    def _arrive_open(self, _: object) -> None:
        """What comes next in an open loop arrives, and with it what follows before anything else happens."""
        self._arrive(self._next_open)
        rows, clock = self._open_rows, self._clock
        while rows:
            requests = self._requests(rows.popleft())
            if not clock.advance_to(requests[0].arrival_ns):
                self._schedule_arrival(requests)
                return
            self._arrive(requests)

    def _think(self, class_index: int) -> None:
        """A closed-loop client takes its next request, if any is left, and sends it when it has thought."""
        rows = self._closed_rows[class_index]
        if not rows:
            return
        self._send_after_thinking(rows.popleft())

    def _send_after_thinking(self, row: int) -> None:
        arrival_ns = self._clock.now_ns + int(self._traffic.think_ns[row])
        self._clock.call_at(arrival_ns, Priority.ARRIVE, lambda: self._arrive_now(row))

    def _arrive_now(self, row: int) -> None:
        requests = self._requests(row)
        for request in requests:
            request.arrival_ns = self._clock.now_ns
        self._arrive(requests)

    def _requests(self, first_row: int) -> tuple[Request, ...]:
        """What a client sends at once: a request, or all prompts of a call."""
        if self._call is None or self._call[first_row] == NEVER:
            return (self._traffic.request(first_row),)
        call, end = self._call[first_row], first_row + 1
        while end < len(self._call) and self._call[end] == call:
            end += 1
        self._num_unanswered[call] = end - first_row
        return tuple(self._traffic.request(row) for row in range(first_row, end))

    def _arrive(self, requests: tuple[Request, ...]) -> None:
        class_index = requests[0].class_index
        for request in requests:
            self._live[request.index] = request
        if class_index not in self._restrained or self._connect(class_index, requests):
            for request in requests:
                self._engine.submit(request)

    def _connect(self, class_index: int, requests: tuple[Request, ...]) -> bool:
        """Start the patience of what arrives, and take a connection for it. False: it is held back."""
        if class_index in self._impatient:
            for request in requests:
                self._limit_patience(request)
        if class_index in self._limits:
            if self._num_connected[class_index] >= self._limits[class_index]:
                self._held_back[class_index].append(requests)
                return False
            self._num_connected[class_index] += 1
        return True

    def _limit_patience(self, request: Request) -> None:
        patience_ns = int(self._traffic.cancel_after_ns[request.index])
        if patience_ns != NEVER:
            late = bool(self._traffic.leaves_at_deadline[request.index])
            outcome = Outcome.TIMED_OUT if late else Outcome.CANCELLED
            self._clock.call_at(
                request.arrival_ns + patience_ns, Priority.CANCEL, lambda: self._leave(request, outcome)
            )

    def _leave(self, request: Request, outcome: Outcome) -> None:
        """A client gives up. Its connection is free at once; what the engine does about it is its own affair."""
        if request.status is Status.OVER or request.outcome is not Outcome.FINISHED:
            return
        if request.queued_ns == NEVER:
            self._held_back[request.class_index].remove((request,))
            request.status = Status.OVER
            request.outcome = outcome
            request.cancelled_ns = self._clock.now_ns
            self._recorder.end(request, NEVER)
            del self._live[request.index]
            self._react(request)
            return
        self._engine.cancel(request, outcome)
        self._disconnect(request)

    def _on_release(self, request: Request) -> None:
        del self._live[request.index]
        if request.outcome is _REJECTED:
            self._disconnect(request)

    def _disconnect(self, request: Request) -> None:
        if self._call is not None and not self._completes_call(self._call[request.index]):
            return
        if request.class_index in self._limits:
            self._free_connection(request.class_index)
        if self._reacts:
            self._react(request)

    def _free_connection(self, class_index: int) -> None:
        """Whoever is held back takes it when all results of this nanosecond have arrived, as for any arrival."""
        if self._held_back[class_index]:
            self._clock.call_at(self._clock.now_ns, Priority.ARRIVE, lambda: self._pass_connection_on(class_index))
        else:
            self._num_connected[class_index] -= 1

    def _pass_connection_on(self, class_index: int) -> None:
        if self._held_back[class_index]:
            for request in self._held_back[class_index].popleft():
                self._engine.submit(request)
        else:
            self._num_connected[class_index] -= 1

    def _completes_call(self, call: int) -> bool:
        """Whether this answer was the last that its call waited for; a request by itself waits for no other."""
        if call == NEVER:
            return True
        self._num_unanswered[call] -= 1
        return self._num_unanswered[call] == 0

    def _react(self, request: Request) -> None:
        """A conversation goes on; a client whose conversation or single request is over begins the next one."""
        if self._has_next_turn(request):
            self._send_after_thinking(request.index + 1)
        elif self._traffic.pools[request.class_index].num_clients is not None:
            self._think(request.class_index)

    def _has_next_turn(self, request: Request) -> bool:
        """Whether the answer is there as the next turn quotes it, and there is a next turn."""
        has_next_turn = self._traffic.has_next_turn
        if has_next_turn is None or not has_next_turn[request.index] or request.outcome is not Outcome.FINISHED:
            return False
        return request.num_target_tokens == min(request.output_tokens, request.max_tokens)
