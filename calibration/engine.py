"""The tiny real engine: the simulator's own engine, on a clock that follows the time of day and a device that computes.

Clients, scheduler and recorder are those of a simulation. Only two things differ: time passes by itself, so that
requests arrive when the clock on the wall says so, and a step takes as long as its kernels do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from calibration.attention import Row
from calibration.executor import Executor
from sim.clock import Clock
from sim.cost.base import CostModel
from sim.device import Device
from sim.errors import InvariantError, ScenarioError
from sim.request import Request, Status
from sim.step import Step

_MAX_HOST_SAMPLES = 1000
_SPIN_NS = 200_000
"""Sleeping overshoots by about a tenth of this; the rest of a wait is spent looking at the clock."""


class WallClock(Clock):
    """Nanoseconds since the run began, as they pass."""

    def __init__(self) -> None:
        super().__init__()
        self._start_ns = time.perf_counter_ns()

    def elapsed_ns(self) -> int:
        """How long the run has lasted: later than `now_ns` while something is being done about now."""
        return time.perf_counter_ns() - self._start_ns

    def advance_to(self, time_ns: int) -> bool:
        """Time passes by itself."""
        return False

    def run(self, until_ns: int | None = None) -> None:
        """As the contract says, waiting for each event until its time has come."""
        env, end_ns = self.env, float("inf") if until_ns is None else until_ns
        self._start_ns = time.perf_counter_ns()
        while (due_ns := env.peek()) <= end_ns and due_ns != float("inf"):
            while (left_ns := due_ns - self.elapsed_ns()) > 0:
                if left_ns > _SPIN_NS:
                    time.sleep((left_ns - _SPIN_NS) / 1e9)
            env.step()


class RealDevice(Device):
    """Executes steps when they are launched. Follows who decodes from the changes that steps name."""

    def __init__(self, executor: Executor, clock: WallClock, cost: CostModel, seed: int = 0) -> None:
        """`cost` is asked for nothing; a device has one. `seed` is that of the prompts' tokens."""
        super().__init__(cost)
        self._executor, self._clock = executor, clock
        self._rng = np.random.default_rng(seed)
        self._free = list(range(executor.cache.num_pages - 1, 0, -1))
        self._decoding: dict[int, Request] = {}
        self._sequences: dict[int, _Sequence] = {}
        self.num_steps = 0
        """Steps executed."""
        self.num_sampled = 0
        """Tokens they sampled."""
        self.wall_ns = 0
        """How long they took."""
        self.cpu_ns = 0
        """How long this thread really ran meanwhile; less where other processes had its core."""

    def launch(self, step: Step, now_ns: int) -> None:
        """Execute a step that was planned at `now_ns`; when this returns, its tokens exist."""
        if step.is_empty:
            super().launch(step, now_ns)
            return
        members = self._members(step)
        rows = [sequence.row(num_tokens, is_last) for sequence, num_tokens, is_last in members]
        start_ns, start_cpu_ns = self._clock.elapsed_ns(), time.thread_time_ns()
        tokens = self._executor.run(rows)
        end_ns = self._clock.elapsed_ns()
        self._launches.append((step, start_ns, end_ns, start_ns - now_ns))
        self.wall_ns += end_ns - start_ns
        self.cpu_ns += time.thread_time_ns() - start_cpu_ns
        self._take_in(members, tokens)

    def _members(self, step: Step) -> list[_Member]:
        """Everybody whom the step computes, decodes first, with pages for what it computes."""
        self._follow(step)
        members: list[_Member] = [(self._sequences[index], 1, True) for index in self._decoding]
        contexts = [sequence.num_computed for sequence, _, _ in members]
        if len(contexts) != step.shape.num_decode or sum(contexts) != step.shape.decode_context_sum:
            raise InvariantError(
                f"a step of {step.shape.num_decode} decodes over {step.shape.decode_context_sum} tokens reached an "
                f"engine that follows {len(contexts)} over {sum(contexts)}"
            )
        for chunk in step.chunks:
            sequence = self._sequences.get(chunk.request.index) or self._begin(chunk.request)
            sequence.num_computed = chunk.context
            members.append((sequence, chunk.num_tokens, chunk.is_last))
        for sequence, num_tokens, _ in members:
            sequence.take_pages(-(-(sequence.num_computed + num_tokens) // self._executor.page_size), self._free)
        return members

    def _follow(self, step: Step) -> None:
        """Forget who left, and take in who came."""
        for preemption in step.preempted:
            self._release(preemption.victim.index)
        over = [sequence.request for sequence in self._sequences.values() if sequence.request.status is Status.OVER]
        for request in over:
            self._release(request.index)
        for request in step.left:
            self._decoding.pop(request.index, None)
        for request in step.joined:
            self._decoding[request.index] = request

    def _take_in(self, members: Sequence[_Member], tokens: Sequence[int]) -> None:
        sampled = iter(tokens)
        for sequence, num_tokens, is_last in members:
            sequence.num_computed += num_tokens
            if is_last:
                sequence.token_ids[sequence.num_computed : sequence.num_computed + 1] = [next(sampled)]
        self.num_steps += 1
        self.num_sampled += len(tokens)

    def _begin(self, request: Request) -> _Sequence:
        vocabulary = self._executor.decoder.shard.vocab_size
        prompt = self._rng.integers(vocabulary, size=request.prompt_tokens).tolist()
        self._sequences[request.index] = sequence = _Sequence(request, prompt)
        return sequence

    def _release(self, index: int) -> None:
        """Its pages are free; its tokens are kept, for it may come back."""
        self._decoding.pop(index, None)
        sequence = self._sequences.get(index)
        if sequence is not None:
            self._free.extend(sequence.pages)
            sequence.pages.clear()
            if sequence.request.status is Status.OVER:
                del self._sequences[index]


class HostTimer(RealDevice):
    """Notes how long the host works between steps, while simulated time passes as steps are priced.

    Steps are computed too, for the host is slower after them (its caches hold something else), but how long that
    takes counts for nothing.
    """

    def __init__(self, executor: Executor, cost: CostModel) -> None:
        super().__init__(executor, WallClock(), cost)
        self.samples: list[tuple[int, int]] = []
        """Per step: requests in it, and ns from the end of the last step to its start."""
        self._since_ns: int | None = None

    def launch(self, step: Step, now_ns: int) -> None:
        """Note how long the host took since the last step, compute this one, let its price pass."""
        if step.is_empty:
            self._since_ns = None
            super().launch(step, now_ns)
            return
        members = self._members(step)
        rows = [sequence.row(num_tokens, is_last) for sequence, num_tokens, is_last in members]
        if self._since_ns is not None and len(self.samples) < _MAX_HOST_SAMPLES:
            self.samples.append((len(members), self._clock.elapsed_ns() - self._since_ns))
        Device.launch(self, step, now_ns)
        is_enough = len(self.samples) >= _MAX_HOST_SAMPLES
        tokens = [0] * len(rows) if is_enough else self._executor.run(rows)
        self._since_ns = self._clock.elapsed_ns()
        self._take_in(members, tokens)

    def host_us(self) -> tuple[float, float]:
        """µs of the host an iteration and a request in it: a line through the medians of every size of batch."""
        sizes, times = np.array(self.samples, dtype=float).reshape(-1, 2).T
        batches, counts = np.unique(sizes, return_counts=True)
        if not len(batches):
            return 0.0, 0.0
        medians = np.array([np.median(times[sizes == batch]) for batch in batches]) / 1e3
        if len(batches) == 1:
            return float(medians[0]), 0.0
        per_request, fixed = np.polyfit(batches, medians, 1, w=np.sqrt(counts))
        return max(0.0, float(fixed)), max(0.0, float(per_request))


class _Sequence:
    """The tokens of one request, and where their keys and values are."""

    def __init__(self, request: Request, token_ids: list[int]) -> None:
        self.request, self.token_ids = request, token_ids
        self.num_computed = 0
        self.pages: list[int] = []

    def take_pages(self, number: int, free: list[int]) -> None:
        """Have `number` pages. Raises ScenarioError when there are none left."""
        while len(self.pages) < number:
            if not free:
                raise ScenarioError(
                    "engine",
                    "the requests of a step do not fit into the memory of this device",
                    valid="expected no prefixes that requests share, which would be held once for each of them here",
                    remedy="Lower num_gpu_blocks or max_num_seqs.",
                )
            self.pages.append(free.pop())

    def row(self, num_tokens: int, is_sampled: bool) -> Row:
        """Its part of the next batch."""
        tokens = self.token_ids[self.num_computed : self.num_computed + num_tokens]
        return Row(tokens, self.num_computed, self.pages, is_sampled)


_Member = tuple[_Sequence, int, bool]
"""Who takes part in a step, with how many tokens, and whether the last of them is sampled from."""
