"""Replay of `engine-steps-v1`: the log format of the engines beside vLLM V1.

Before step s is planned, requests of that step arrive in file order, then those that leave are cancelled. A
step is one forward pass, or an empty one in which nothing can run although somebody waits; while the system
is empty no step is logged and the counter jumps to the next arrival. An engine adds what its config means,
which policy that is, and the fields that only its logs have.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from sim.clock import NS_PER_S
from sim.conformance.fields import LoggedRequest, read_rows, refuse_unknown, validated
from sim.conformance.golden import Golden, Line
from sim.conformance.replay import Replay
from sim.core import EngineCore
from sim.errors import GoldenError, did_you_mean
from sim.options import Options
from sim.policies.base import Policy
from sim.request import Request
from sim.step import NOTHING_ENDED, Finished, Step
from sim.tokens import Run, TokenRuns


class EngineRequest(LoggedRequest):
    """One of the `requests` of such a log."""

    client: str | None = None


class Call(NamedTuple):
    """What happened in one step of the log, for those who write its line."""

    number: int
    cancelled: list[Request]
    planned: Step
    completed: Step | None
    """The step whose results were taken in; None when a pipeline is still being filled."""
    finished: Finished


class EngineStepsReplay(Replay):
    """The loop and the common fields of the format."""

    FORMAT = "engine-steps-v1"
    VERSION: ClassVar[str]
    """The version whose rules the policy has, as the logs write it."""
    MODES: ClassVar[tuple[str, ...]]
    """What the input may say under `mode`."""
    Config: ClassVar[type[Options]]
    """The keys of the input's `config`."""
    Row: ClassVar[type[EngineRequest]] = EngineRequest
    ns_per_step = NS_PER_S
    """What the policy's clock advances in a step; an engine whose log keeps a clock of its own overrides `now_ns`."""

    def __init__(self, golden: Golden) -> None:
        super().__init__(golden)
        self.mode = golden.field("mode", str)
        if self.mode not in self.MODES:
            raise GoldenError(
                f"{golden.path}: mode",
                f"is {self.mode!r}",
                valid=f"known: {', '.join(self.MODES)}",
                remedy=did_you_mean(self.mode, self.MODES),
            )
        version = golden.field("version", str)
        self.note = "" if version == self.VERSION else f"rules of {self.VERSION}"
        place, given = f"{golden.path}: config", golden.field("config", dict)
        refuse_unknown(place, given, self.Config.model_fields)
        self.config = validated(self.Config, given, place)
        self.rows = read_rows(golden, self.Row)
        self.policy = self._build_policy()
        self.core = EngineCore(self.policy)
        self.requests = [self._to_request(index, row) for index, row in enumerate(self.rows)]
        self.ids: dict[Request, str] = {r: row.id for r, row in zip(self.requests, self.rows, strict=True)}
        self._step = 0
        self._in_flight: deque[Step] = deque()
        self._counters: Counter[str] = Counter()
        self._maxima: dict[str, int] = {}
        self._arriving = sorted(range(len(self.rows)), key=lambda index: self.rows[index].arrival_step)
        """Indices of requests that have not arrived, soonest first."""
        leaving = [index for index, row in enumerate(self.rows) if row.cancel_step is not None]
        self._leaving = dict.fromkeys(leaving)

    # ------------------------------------------------------------------ what an engine adds

    @abstractmethod
    def _build_policy(self) -> Policy:
        """The policy for `self.mode` and `self.config`. Raises GoldenError for options that it refuses."""

    @abstractmethod
    def _own_fields(self, call: Call) -> Line:
        """Fields of this engine's lines beside the common ones; may repeat those to overwrite them."""

    def _own_counters(self, call: Call, line: Line) -> Mapping[str, int]:
        """What this engine's header counts beside the common sums: increments for one line."""
        return {}

    def now_ns(self) -> int:
        """The policy's time when the step at hand is planned."""
        return self._step * self.ns_per_step

    def arrival_ns(self, index: int, row: EngineRequest) -> int:
        """When a request arrives: with its step, and after those before it in the file."""
        return row.arrival_step * self.ns_per_step + index

    def _arrive(self, request: Request) -> None:
        """A request reaches the engine; one that turns requests away overrides this."""
        self.core.admit((), [request])

    # ------------------------------------------------------------------ the loop

    def lines(self) -> Iterator[Line]:
        while self._arriving or self.policy.num_unfinished or self._in_flight:
            if not self.policy.num_unfinished and not self._in_flight:
                self._step = max(self._step, self.rows[self._arriving[0]].arrival_step)
            call = self._call()
            line = self._common_fields(call) | self._own_fields(call)
            self._count(call, line)
            yield line
            self._step += 1

    def header(self) -> Line:
        scenario = self.golden.scenario
        return {
            "format": self.FORMAT,
            "engine": scenario.get("engine"),
            "version": scenario.get("version"),
            "mode": self.mode,
            "scenario": scenario.get("name"),
            "counters": {**self._counters, **self._maxima},
        }

    def _call(self) -> Call:
        core, step = self.core, self._step
        while self._arriving and self.rows[self._arriving[0]].arrival_step <= step:
            request = self.requests[self._arriving.pop(0)]
            request.queued_ns = self.now_ns()
            self._arrive(request)
        leaving = [index for index in self._leaving if self._leaves(index)]
        for index in leaving:
            del self._leaving[index]
        cancelled = core.admit([self.requests[index] for index in leaving], ())
        planned = core.plan(self.now_ns())
        self._scheduled = [[r.id, num_tokens] for r, num_tokens in self.policy.batch(planned)]
        self._in_flight.append(planned)
        self._used_in_pass = self._used_kv()
        completed, finished = self._take_results(planned)
        return Call(step, cancelled, planned, completed, finished)

    def _leaves(self, index: int) -> bool:
        cancel_step = self.rows[index].cancel_step
        return cancel_step is not None and cancel_step <= self._step and index not in self._arriving

    def _take_results(self, planned: Step) -> tuple[Step | None, Finished]:
        """The oldest pass ends when as many are on their way as may be, or when nothing could be added to them."""
        num_computing = sum(not step.is_empty for step in self._in_flight)
        completed, finished = None, NOTHING_ENDED
        if num_computing and (num_computing == self.core.depth or planned.is_empty):
            while completed is None or completed.is_empty:
                completed, finished = self._complete()
        while self._in_flight and self._in_flight[0].is_empty:
            self._complete()
        return completed, finished

    def _complete(self) -> tuple[Step, Finished]:
        self._in_flight.popleft()
        return self.core.complete()

    def _used_kv(self) -> int:
        return self.policy.usable_blocks - self.policy.free_blocks

    def _common_fields(self, call: Call) -> Line:
        shape, planned = call.planned.shape, call.planned
        kinds = {(True, True): "mixed", (True, False): "prefill", (False, True): "decode", (False, False): "empty"}
        return {
            "step": call.number,
            "kind": kinds[bool(shape.prefills), shape.num_decode > 0],
            "scheduled": self._scheduled,
            "preempted": [p.victim.id for p in planned.preempted],
            "finished": [r.id for r in call.finished.finished],
            "running": [r.id for r in self.policy.running()],
            "waiting": [r.id for r in self.policy.waiting()],
            "used_kv": self._used_kv(),
            "used_kv_fwd": self._used_in_pass,
        }

    def _count(self, call: Call, line: Line) -> None:
        kinds = [f"{kind}_steps" for kind in ("prefill", "decode", "mixed", "empty")]
        sums = dict.fromkeys(["steps", *kinds, "preemptions", "finished"], 0)
        sums["steps"] = sums[f"{line['kind']}_steps"] = 1
        sums |= {"preemptions": len(line["preempted"]), "finished": len(line["finished"])}
        for name, value in {**sums, **self._own_counters(call, line)}.items():
            self._counters[name] += value
        largest = {
            "max_tokens_in_step": sum(num_tokens for _, num_tokens in line["scheduled"]),
            "max_batch": len(line["scheduled"]),
            "max_running": len(line["running"]),
            "max_waiting": len(line["waiting"]),
            "peak_used_kv": max(line["used_kv"], line["used_kv_fwd"]),
        }
        for name, value in largest.items():
            self._maxima[name] = max(self._maxima.get(name, 0), value)

    # ------------------------------------------------------------------ the input

    def _to_request(self, index: int, row: EngineRequest) -> Request:
        return Request(
            index,
            row.prompt_tokens,
            row.output_tokens,
            max_tokens=row.max_tokens,
            priority=row.priority,
            arrival_ns=self.arrival_ns(index, row),
            id=row.id,
            tokens=TokenRuns(tuple(Run(*segment) for segment in row.prefix or ())),
        )
