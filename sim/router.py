"""Several engines behind one `submit()`: what clients talk to when there is a fleet.

To clients a router looks like an engine. Each request goes to one replica, at once, and stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim.clock import Clock
from sim.engine import Engine
from sim.record import Recorder, Tables
from sim.request import Outcome, Request
from sim.routing.base import ReplicaView, RoutingPolicy


class Member(ReplicaView):
    """One engine of a fleet, its tables, and what the router knows of it."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self.engine = engine
        self.recorder = recorder
        self.num_requests = 0
        self.num_tokens = 0

    def num_waiting(self) -> int:
        return self.engine.num_waiting

    def num_running(self) -> int:
        return self.engine.num_running

    def kv_usage(self) -> float:
        return self.engine.kv_usage


class Router:
    """A fleet. Its interface towards clients is that of an `Engine` and of a `Recorder`."""

    def __init__(
        self, clock: Clock, members: Sequence[Member], policy: RoutingPolicy, session_of: Callable[[int], int]
    ) -> None:
        """`session_of` names the conversation of a request, which it gets by its index."""
        self._clock = clock
        self._members = tuple(members)
        self._policy = policy
        self._session_of = session_of
        self._member_of: dict[Request, Member] = {}
        """Of every request that is not over in its engine."""
        self._open: dict[Request, Member] = {}
        """Those of them whose client still waits."""
        self._at_clients = Recorder()
        """Of requests that never reached a member."""
        self.on_release: Callable[[Request], None] = _ignore
        """Called once for every request that is over in its engine, however it ended."""
        self.on_answer: Callable[[Request], None] = _ignore
        """Called when the whole answer of a request has reached its client, which is still there."""
        for member in members:
            member.engine.on_release = self._on_release
            member.engine.on_answer = self._on_answer

    @property
    def on_depart(self) -> Callable[[Request], None]:
        """Called when a request's client has received the tokens after which it leaves."""
        return self._members[0].engine.on_depart

    @on_depart.setter
    def on_depart(self, called: Callable[[Request], None]) -> None:
        for member in self._members:
            member.engine.on_depart = called

    @property
    def on_expire(self) -> Callable[[Request], None]:
        """Called when a request has waited too long in its engine's queue."""
        return self._members[0].engine.on_expire

    @on_expire.setter
    def on_expire(self, called: Callable[[Request], None]) -> None:
        for member in self._members:
            member.engine.on_expire = called

    def submit(self, request: Request) -> None:
        """A request reaches the router, and its engine, now."""
        index = request.index
        position = self._policy.pick(request, self._session_of(index), self._clock.now_ns, self._members)
        member = self._members[position]
        self._member_of[request] = self._open[request] = member
        member.num_requests += 1
        member.num_tokens += request.prompt_tokens + request.max_tokens
        member.engine.submit(request)

    def cancel(self, request: Request, outcome: Outcome) -> None:
        """The client of a submitted request leaves now; its engine notices as `Engine.cancel` says."""
        self._close(request)
        member = self._member_of.get(request)
        if member is not None:
            member.engine.cancel(request, outcome)

    def stop(self) -> None:
        """The clock will not go on: let all that was foreseen up to and including now happen."""
        for member in self._members:
            member.engine.stop()

    def end(self, request: Request, released_ns: int) -> None:
        """The last word on a request, as `Recorder.end`, in the tables of whoever has it."""
        member = self._member_of.pop(request, None)
        (self._at_clients if member is None else member.recorder).end(request, released_ns)

    def tables(self) -> tuple[list[Tables], Tables]:
        """Those of every replica, and that of the requests which never reached one. Ends the recording."""
        return [member.recorder.tables() for member in self._members], self._at_clients.tables()

    def _on_answer(self, request: Request) -> None:
        self._close(request)
        self.on_answer(request)

    def _on_release(self, request: Request) -> None:
        self._close(request)
        del self._member_of[request]
        self.on_release(request)

    def _close(self, request: Request) -> None:
        """Nobody waits for the request any more."""
        member = self._open.pop(request, None)
        if member is not None:
            member.num_requests -= 1
            member.num_tokens -= request.prompt_tokens + request.max_tokens


def _ignore(_: Request) -> None:
    """Nobody listens."""
