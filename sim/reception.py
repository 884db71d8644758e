"""Before an engine's queue: who is turned away, who has waited too long, and what doors may know of the inside.

Whoever is turned away carries the number of the reason: 0 for what could never run, then one for each door in
its order, then one for a wait in the queue that became too long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from sim.doors.base import Door
from sim.errors import InvariantError
from sim.queues.base import QueueOrder
from sim.request import Request, Status
from sim.step import Step

NEVER_FITS = 0
"""The reason of those who could not run even alone."""
NUM_OBSERVED = 64
"""Steps with prompts whose pace stands for the next ones."""


def reason_names(door_kinds: Sequence[str]) -> tuple[str, ...]:
    """The name of each reason, by its number."""
    return ("never_fits", *door_kinds, "queue_timeout")


class Reception:
    """The doors of one engine, and the account of who waits behind them."""

    def __init__(self, doors: Sequence[Door] = (), timeout_ns: int | None = None) -> None:
        """`timeout_ns`: how long a request may wait for its first admission; None: for ever."""
        self._doors = tuple(doors)
        self.timeout_ns = timeout_ns
        self.is_open = not self._doors and timeout_ns is None
        """Whether nobody is ever turned away here and nothing needs to be observed."""
        self._waiting: dict[Request, None] = {}
        self._waiting_prompt_tokens = 0
        self._busy_ns = 0
        self._last_end_ns = 0
        self._observed: deque[tuple[int, int, int]] = deque(maxlen=NUM_OBSERVED)
        """Of steps with prompts: the busy time when they started and ended, and their prompt tokens."""

    @property
    def timeout_reason(self) -> int:
        """The number of the last reason."""
        return len(self._doors) + 1

    def reason_to_refuse(self, request: Request, now_ns: int) -> int | None:
        """The number of the first door that refuses an arrival, or None: it is in. Mutates the doors then."""
        for number, door in enumerate(self._doors, 1):
            if door.refuses(request, now_ns, self):
                return number
        for door in self._doors:
            door.let_in(request, now_ns)
        if self._doors:
            self._waiting[request] = None
            self._waiting_prompt_tokens += request.prompt_tokens
        return None

    def admitted(self, request: Request) -> None:
        """It waits no longer: it was admitted, or it is over."""
        if request in self._waiting:
            del self._waiting[request]
            self._waiting_prompt_tokens -= request.prompt_tokens

    def observe(self, step: Step, start_ns: int, end_ns: int) -> None:
        """A step has run; who is admitted in it waits no longer."""
        before_ns = self._busy_ns
        self.observe_busy(start_ns, end_ns)
        if step.chunks:
            self._observed.append((before_ns, self._busy_ns, step.shape.prefill_tokens))
        for admission in step.admitted:
            self.admitted(admission.request)

    def observe_steady(self, start_ns: Iterable[int], end_ns: Iterable[int]) -> None:
        """Steps without prompts have run, one after the other. The host's time between them is not busy."""
        for start, end in zip(start_ns, end_ns, strict=True):
            self.observe_busy(int(start), int(end))

    def observe_busy(self, start_ns: int, end_ns: int) -> None:
        """The engine computed in this time. Steps that overlap count once."""
        self._busy_ns += end_ns - max(start_ns, min(self._last_end_ns, end_ns))
        self._last_end_ns = max(self._last_end_ns, end_ns)

    def wait_ends_ns(self, request: Request, now_ns: int, deadlines: QueueOrder | None) -> int:
        """When an arrival is turned away if it still waits then: at the deadline of its order, or by the time-out.

        Raises InvariantError where neither exists.
        """
        if deadlines is not None:
            return max(deadlines.due_ns(request), now_ns)
        if self.timeout_ns is None:
            raise InvariantError("waits have no end here")
        return now_ns + self.timeout_ns

    def is_due(self, request: Request) -> bool:
        """Whether a request whose time is up still waits for its first admission."""
        return request.status is Status.WAITING

    # ------------------------------------------------------------------ what doors may know

    @property
    def num_waiting(self) -> int:
        """Requests that are in and have not been admitted to the batch, those on their way to the queue included."""
        return len(self._waiting)

    def predicted_ttft_ns(self, request: Request) -> float | None:
        """When its first token would come, from now: the prompts ahead of it and its own at the recent pace.

        None before any prompt has been computed. The pace is busy time per prompt token over the last steps that
        had prompts, decodes and steps between them included, so it falls when decodes hold up admissions.
        """
        if not self._observed:
            return None
        num_tokens = sum(tokens for _, _, tokens in self._observed)
        busy_ns = self._observed[-1][1] - self._observed[0][0]
        return (self._waiting_prompt_tokens + request.prompt_tokens) * busy_ns / num_tokens
