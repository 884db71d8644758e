"""Replays logs of vLLM V1's own scheduler.

A step is one engine call: aborts, then arrivals, then a plan if the scheduler has anything, then the results
of the oldest batch, unless the engine would rather fill its queue of batches first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from sim.conformance.fields import read_rows
from sim.conformance.golden import Golden, Line
from sim.conformance.replay import Replay
from sim.conformance.vllm_v1_input import VllmRequest, note_on_version, read_config, read_max_steps, to_requests
from sim.core import EngineCore
from sim.policies.vllm_v1 import planner_for
from sim.policies.vllm_v1_state import V1Step
from sim.request import Request, Status
from sim.step import Finished


class VllmV1Replay(Replay):
    """Format and step semantics of the V1 oracle's logs."""

    FORMAT = 1

    def __init__(self, golden: Golden) -> None:
        super().__init__(golden)
        self._config = read_config(golden)
        self._max_steps = read_max_steps(golden)
        rows = read_rows(golden, VllmRequest)
        self.note = note_on_version(golden)
        self._policy = planner_for(self._config)
        self._core = EngineCore(self._policy)
        self._requests = to_requests(rows)
        self._arrivals, self._cancels = _schedule(rows, self._requests)
        self._steps_in_flight: list[int] = []
        self._totals: dict[str, int] = defaultdict(int)

    def lines(self) -> Iterator[Line]:
        times = sorted(self._arrivals.keys() | self._cancels.keys())
        step = 0
        while self._max_steps is None or step < self._max_steps:
            if not self._core.has_requests and not self._core.num_in_flight:
                upcoming = [time for time in times if time >= step]
                if not upcoming:
                    return
                step = upcoming[0]
            line = self._call(step)
            if line is not None:
                self._totals["lines"] += 1
                yield line
            step += 1

    def header(self) -> Line:
        totals = self._totals
        return {
            "format": self.FORMAT,
            "engine": "vllm",
            "version": self.golden.scenario.get("version"),
            "mode": self.golden.scenario.get("mode"),
            "requests": len(self._requests),
            **{key: totals[key] for key in ("lines", "finished", "cancelled", "rejected")},
            "unfinished": self._policy.num_unfinished,
            **{key: totals[key] for key in ("preemptions", "scheduled_tokens", "cached_tokens")},
            "evicted_blocks": self._policy.kv.num_evicted,
            "token_budget": self._config.max_num_scheduled_tokens or self._config.max_num_batched_tokens,
            "usable_blocks": self._policy.usable_blocks,
        }

    def _call(self, step: int) -> Line | None:
        """One engine call; its line, or None when the log leaves it out."""
        core, policy = self._core, self._policy
        line: Line = {"step": step, "scheduled": [], "new": [], "resumed": [], "preempted": [], "finished": []}
        in_engine = [r for r in self._cancels.get(step, ()) if r.policy_state is not None]
        cancelled = core.admit(in_engine, ())
        arrivals = self._arrivals.get(step, [])
        rejected = [r for r in arrivals if policy.refused_at_the_door(r) is not None]
        for request in rejected:
            request.status = Status.OVER
        core.admit((), [r for r in arrivals if r not in rejected])
        loggable = bool(policy.num_unfinished or cancelled or rejected or core.has_work_in_flight)
        line |= {"num_cached_tokens": {}}
        self._note_ends(line, cancelled, rejected)
        takes_results = not core.has_requests or self._plan(step, line)
        self._take_results(line, takes_results)
        line["running"] = [r.id for r in policy.running()]
        line["waiting"] = [r.id for r in policy.waiting()]
        line["free_blocks"] = policy.free_blocks
        return line if loggable else None

    def _note_ends(self, line: Line, cancelled: list[Request], rejected: list[Request]) -> None:
        for key, requests in (("cancelled", cancelled), ("rejected", rejected)):
            if requests:
                line[key] = [r.id for r in requests]
                self._totals[key] += len(requests)

    def _plan(self, step: int, line: Line) -> bool:
        """Plan a batch; whether results are taken in this call, too (else the queue of batches is filled first)."""
        core = self._core
        planned = core.plan(step)
        self._steps_in_flight.append(step)
        line["scheduled"] = [[r.id, num_tokens] for r, num_tokens in self._policy.batch(planned)]
        for request, num_cached_tokens, is_resumed in planned.admitted:
            line["resumed" if is_resumed else "new"].append(request.id)
            line["num_cached_tokens"][request.id] = num_cached_tokens
        line["preempted"] = [p.victim.id for p in planned.preempted]
        if planned.preempted:
            line["preempted_for"] = [p.beneficiary.id for p in planned.preempted]
        self._totals["preemptions"] += len(planned.preempted)
        self._totals["scheduled_tokens"] += sum(n for _, n in line["scheduled"])
        self._totals["cached_tokens"] += sum(line["num_cached_tokens"].values())
        return core.num_in_flight >= core.depth or (planned.is_empty and not core.has_requests)

    def _take_results(self, line: Line, takes_results: bool) -> None:
        core = self._core
        if core.depth > 1:
            line["updated_step"] = None
        if not (takes_results and core.num_in_flight):
            return
        step, finished = core.complete()
        number = self._steps_in_flight.pop(0)
        if core.depth > 1:
            line["updated_step"] = None if step.is_empty else number
        self._note_results(line, step, finished)

    def _note_results(self, line: Line, step: Any, finished: Finished) -> None:
        line["finished"] = [r.id for r in finished.finished]
        self._totals["finished"] += len(finished.finished)
        if self._config.num_speculative_tokens and isinstance(step, V1Step):
            rows = (step.rows or {}).values()
            line["drafts"] = {row.request.id: row.num_drafts for row in rows if row.num_drafts}
            line["sampled"] = {row.request.id: row.num_sampled for row in rows if row.num_sampled}


Timetable = dict[int, list[Request]]
"""Requests by the step in which something happens to them, each list in file order."""


def _schedule(rows: list[VllmRequest], requests: list[Request]) -> tuple[Timetable, Timetable]:
    """Who arrives when, and who is cancelled when."""
    arrivals: Timetable = defaultdict(list)
    cancels: Timetable = defaultdict(list)
    for row, request in zip(rows, requests, strict=True):
        arrivals[row.arrival_step].append(request)
        if row.cancel_step is not None:
            cancels[row.cancel_step].append(request)
    return arrivals, cancels
