"""A world that writes tables through the real recorder and, beside it, lists every token naively."""

from __future__ import annotations

from collections import defaultdict

import pytest

from sim.record import Recorder, Tables
from sim.request import NEVER, Outcome, Request
from sim.step import Admission, BlockedBy, Chunk, Finished, Preemption, Step, StepShape

NOTHING_HELD = dict.fromkeys(["num_running", "num_waiting", "used_blocks", "num_new_blocks", "live_tokens"], 0)


class World:
    def __init__(self):
        self.recorder = Recorder()
        self.requests: list[Request] = []
        self.over: set[Request] = set()
        self.made_ns: dict[int, list[int]] = defaultdict(list)
        """Request index -> the time of every token that a step made for it, whoever saw it."""
        self.num_dropped = 0
        """Tokens that a step had computed when their request was cancelled."""
        self.now_ns = 0
        self._decoding: dict[int, list[Request]] = defaultdict(list)

    def request(self, arrival_ns=0, prompt=10, output=5, *, queued_ns=None, class_index=0) -> Request:
        request = Request(len(self.requests), prompt, output, arrival_ns=arrival_ns, class_index=class_index)
        request.queued_ns = arrival_ns if queued_ns is None else queued_ns
        self.requests.append(request)
        return request

    def step(
        self,
        duration_ns,
        *,
        prefill=(),
        decode=(),
        finish=(),
        release=None,
        preempt=(),
        start_ns=None,
        host_ns=0,
        lane=0,
        blocked_by=BlockedBy.NOTHING,
        cancelled_meanwhile=(),
        shape=None,
        **facts,
    ):
        """One step. `prefill`: requests, or (request, tokens, context, is_last); first prefills admit."""
        start_ns = self.now_ns + host_ns if start_ns is None else start_ns
        end_ns = self.now_ns = start_ns + duration_ns
        chunks = [Chunk(*(p if isinstance(p, tuple) else (p, p.prompt_tokens, 0, True))) for p in prefill]
        before = [r for r in self._decoding[lane] if r not in self.over]
        for request in decode:
            request.num_output_tokens += 1
            self.made_ns[request.index].append(end_ns)
        for chunk in chunks:
            if chunk.is_last:
                chunk.request.num_output_tokens += 1
                self.made_ns[chunk.request.index].append(end_ns)
        step = Step(
            shape=shape
            or StepShape(
                num_decode=len(decode),
                prefills=tuple((c.num_tokens, c.context) for c in chunks),
                num_padding_tokens=facts.pop("padding", 0),
            ),
            chunks=chunks,
            joined=[r for r in decode if r not in before],
            left=[r for r in before if decode and r not in decode and r not in preempt],
            admitted=[
                Admission(c.request, 0, c.request.num_preemptions > 0)
                for c in chunks
                if c.request.admitted_iteration == NEVER or c.context == 0
            ],
            preempted=[Preemption(r, r, r.num_tokens) for r in preempt],
            blocked_by=blocked_by,
            lane=lane,
            **NOTHING_HELD | {"num_running": len(decode) + len(chunks)} | facts,
        )
        for members in self._decoding.values():  # a request goes on in one lane only
            members[:] = [r for r in members if r not in preempt and r not in decode]
        if decode:
            self._decoding[lane] = list(decode)
        for request, at_ns in cancelled_meanwhile:
            self.cancel(request, at_ns)
            self.num_dropped += request in decode
        release = list(finish) if release is None else release
        self.recorder.record(step, start_ns, end_ns, host_ns, Finished(list(finish), list(release), []))
        self.over.update(finish, release)

    def cancel(self, request, at_ns, outcome=Outcome.CANCELLED):
        request.num_delivered_tokens = self.recorder.num_tokens(request)
        request.cancelled_ns = at_ns
        self._end(request, outcome, at_ns if request.admitted_iteration != NEVER else NEVER)

    def end(self, request, outcome=Outcome.UNFINISHED):
        self._end(request, outcome, NEVER)

    def _end(self, request, outcome, released_ns):
        request.outcome = outcome
        self.over.add(request)
        self.recorder.end(request, released_ns)

    def tables(self) -> Tables:
        """The tables so far; unlike a recorder's own, they do not end the recording."""
        snapshot = Recorder()
        for name in ("iterations", "chunks", "requests", "segments"):
            getattr(snapshot, name).rows.extend(getattr(self.recorder, name).rows)
        return snapshot.tables()


@pytest.fixture
def world():
    return World()


@pytest.fixture
def new_world():
    return World
