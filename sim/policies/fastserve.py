"""FastServe: whole prompts beside decodes, in an order that is chosen anew in every iteration.

Four schedulers choose the batch: `fcfs` goes on with those who run and swaps out the last of them when GPU
blocks run out; `srpt` takes those with the fewest tokens to come, whoever ran before; `mlfq` and `sj-mlfq`
take from queues of falling priority, which a request sinks through as it uses up the time that each of them
grants. Whoever loses its place keeps its KV, on the GPU or swapped out to the host; nothing is recomputed.

Source: FastServe @187a274 (Wu et al. 2023, "Fast Distributed Inference Serving for Large Language Models"),
`scheduler.py`, `block_manager.py`, with one pipeline stage. Where the source stops with an assertion, so does this
(a full host pool), or it makes room first (`srpt`, which never looks at blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Self, cast

from pydantic import Field

from sim.clock import NS_PER_S
from sim.errors import InvariantError
from sim.kv.base import blocks_for
from sim.kv.swapped import SwappedCache
from sim.options import Count, CountOrZero, NonNegative
from sim.policies.base import About, Axes, EngineLimits, EngineOptions, Policy
from sim.policies.fastserve_crowd import Crowd
from sim.policies.fastserve_schedulers import SCHEDULERS, Job, Mlfq, Scheduler
from sim.request import Request, Status
from sim.step import NOTHING_ENDED, Admission, BlockedBy, Chunk, Finished, Preemption, Step, StepShape


class FastServeOptions(EngineOptions):
    """What the engine can be told; its own names."""

    policy: Literal["fastserve"] = Field(description="preemptive batches: FCFS, SRPT or (skip-join) MLFQ with swapping")
    scheduler: Literal["fcfs", "srpt", "mlfq", "sj-mlfq"] = Field(
        default="sj-mlfq", description="how the batch is chosen; sj-mlfq: long prompts join a lower queue"
    )
    max_batch_size: Count = Field(default=256, description="requests in the batch at most")
    max_tokens_per_batch: Count = Field(default=2048, description="tokens in the batch at most; a decode counts one")
    num_cpu_blocks: CountOrZero | None = Field(
        default=None, description="KV blocks in host memory; omitted: as many as are ever needed"
    )
    proactive_offloading: bool = Field(
        default=False, description="MLFQ: swap ahead of need, so that some GPU blocks are always free"
    )
    num_min_free_blocks_threshold: CountOrZero = Field(
        default=0, description="proactive offloading keeps so many blocks free, or max_batch_size if that is more"
    )
    starvation_threshold_s: NonNegative = Field(
        default=3.0, le=1e9, description="MLFQ: seconds without a turn after which a request goes to the top"
    )
    starvation_period: Count = Field(default=1000, description="MLFQ: iterations from one look for them to the next")
    profile_base_ms: NonNegative = Field(
        default=4.0, description="skip-join: time of a prefill beside what its tokens take"
    )
    profile_prefill_ms: NonNegative = Field(
        default=0.1, description="skip-join: time of a prefill per prompt token, from 32 to 4096 tokens"
    )

    def largest_pass(self, longest: int) -> tuple[int, int]:
        # MLFQ counts no decodes beside prompts.
        return self.max_tokens_per_batch + self.max_batch_size, self.max_batch_size


class Swap(NamedTuple):
    """A request's blocks moved between GPU and host."""

    request: Request
    is_out: bool
    num_blocks: int


class FastServe(Policy):
    """Runs the batch that its scheduler chooses: O(changes) per step for MLFQ while everybody fits, else O(batch)."""

    Options = FastServeOptions
    about = About(
        batching="iteration-level batches chosen anew each step; prompts run whole beside decodes",
        copies="FastServe @187a274 (Wu et al. 2023)",
        proof="step logs of the real schedulers and block manager: 12 of 12",
        note="preempted requests keep their KV, on the GPU or swapped out to the host",
    )
    may_swap = True
    own_axes = Axes(
        "every step",
        "prefills and decodes, whole prompts",
        "by level",
        "prompt",
        "swap",
        "lowest level; stays in its queue",
        "skips",
        "always",
        "mlfq",
        "requests, tokens",
    )

    def __init__(self, options: FastServeOptions, limits: EngineLimits) -> None:
        self.options = options
        self.follows_arrival_order = options.scheduler == "fcfs"
        self.reads_clock = "mlfq" in options.scheduler
        self._max_model_len = limits.max_model_len
        self.kv = SwappedCache(limits.num_gpu_blocks, limits.block_size, options.num_cpu_blocks)
        self.scheduler: Scheduler = SCHEDULERS[options.scheduler](self)
        self._num_unfinished = 0
        self._batch: list[Request] = []
        """Of the pass in flight."""
        self._to_settle: list[Request] = []
        """Of the pass that has ended, those who are not over and not yet back with the scheduler."""
        self._has_ended = False
        self._planned_s = 0.0
        self.read_clock: Callable[[int], float] = _to_seconds
        """The engine's own clock, which has the rounding of binary fractions of a second."""
        self._decoding: dict[Request, None] = {}
        """Of the last pass that decoded."""
        self._live_tokens = 0
        self.swaps: list[Swap] = []
        """Since the last pass was planned; those that it names itself come first."""
        self._num_named = 0
        self._was_everybody = False
        """Whether the last pass had everybody in it, and nobody was moved for it."""
        self._tick = 0
        self._is_in_flight = False
        self._crowd: Crowd | None = None
        """Everybody, while all fit and nobody is on the host; the scheduler then holds nobody."""
        if isinstance(self.scheduler, Mlfq) and options.num_cpu_blocks != 0:
            self._crowd = Crowd(limits.block_size)

    @classmethod
    def build(cls, options: EngineOptions, limits: EngineLimits) -> Self:
        """A fresh engine."""
        assert isinstance(options, FastServeOptions)
        return cls(options, limits)

    def never_fits(self, request: Request) -> str | None:
        """A prompt longer than a batch, or more blocks than the GPU has beside those that are kept free."""
        if request.prompt_tokens >= self._max_model_len:
            return (
                f"its prompt of {request.prompt_tokens} tokens leaves no room for an answer"
                f" within max_model_len {self._max_model_len}"
            )
        if request.prompt_tokens > self.options.max_tokens_per_batch:
            return (
                f"its prompt of {request.prompt_tokens} tokens exceeds"
                f" max_tokens_per_batch {self.options.max_tokens_per_batch}"
            )
        most = min(request.prompt_tokens + request.max_tokens, self._max_model_len) - 1
        num_blocks = blocks_for(most, self.kv.block_size) + self.scheduler.num_kept_free
        if num_blocks > self.kv.usable_blocks:
            return f"it takes {num_blocks} KV blocks, those to be kept free included, of {self.kv.usable_blocks}"
        return None

    def add(self, request: Request) -> None:
        """To the scheduler. The answer ends at `max_model_len` at the latest."""
        request.num_target_tokens = min(request.num_target_tokens, self._max_model_len - request.prompt_tokens)
        request.policy_state = Job()
        self._num_unfinished += 1
        if self._crowd is None:
            self.scheduler.add(request)
        else:
            cast("Mlfq", self.scheduler).choose_level(request)
            self._crowd.new[request] = None

    def cancel(self, request: Request) -> bool:
        """Drop the request wherever it is: always possible."""
        if self._crowd is not None:
            self._crowd.remove(request, is_in_flight=self._is_in_flight)
            self._end(request)
            return True
        for members in (self._batch, self._to_settle):
            if request in members:
                members.remove(request)
        self.scheduler.remove(request)
        self._end(request)
        return True

    def settle(self, now_ns: int) -> None:
        """What the scheduler does when a pass has ended at `now_ns`: queue its members anew, swap ahead of need."""
        if not self._has_ended:
            return
        now_s = self.read_clock(now_ns)
        if self._crowd is None:
            self.scheduler.after_pass(self._to_settle, now_s - self._planned_s, now_s)
        else:
            self._crowd.settle(now_s - self._planned_s, now_s)
            if self.scheduler.num_kept_free > self.kv.free_blocks:
                self._dissolve(self._crowd)
                cast("Mlfq", self.scheduler).swap_ahead()
        self._to_settle, self._has_ended = [], False

    def plan(self, now_ns: int) -> Step:
        """Run those whom the scheduler chooses: prompts first, then decodes."""
        self.settle(now_ns)
        now_s = self.read_clock(now_ns)
        self._is_in_flight = True
        self._gather()
        if self._crowd is not None:
            if self._crowd.fits(self.kv, self.options, self.scheduler.num_kept_free):
                return self._plan_crowd(self._crowd, now_s)
            self._dissolve(self._crowd)
        self.swaps, carried = [], self.swaps[self._num_named :]
        batch = self.scheduler.next_batch(now_s)
        batch.sort(key=_has_output)
        num_new_blocks = sum(swap.num_blocks for swap in self.swaps if not swap.is_out)
        for request in batch:
            num_blocks = self.kv.blocks_to_run(request, request.num_tokens)
            self.kv.allocate(request, num_blocks)
            num_new_blocks += num_blocks
        self._num_named = len(self.swaps)
        self._batch, self._planned_s = list(batch), now_s
        self._was_everybody = len(batch) == self._num_unfinished and not self.swaps
        return self._step(batch, [*carried, *self.swaps], num_new_blocks)

    def update(self, step: Step) -> Finished:
        """Each member has one more token; those whose answer is complete leave."""
        self._is_in_flight = False
        if self._crowd is not None:
            return self._update_crowd(self._crowd, step)
        finished: list[Request] = []
        departed: list[Request] = []
        for request in self._batch:
            request.num_output_tokens += 1
            if request.num_output_tokens == request.num_target_tokens:
                finished.append(request)
            elif request.num_output_tokens == request.cancel_after_tokens:
                departed.append(request)
        self._to_settle = [r for r in self._batch if r.num_output_tokens < r.num_target_tokens]
        self._batch, self._has_ended = [], True
        for request in finished:
            self.scheduler.finish(request)
            self._end(request)
        return Finished(finished, finished, departed) if finished or departed else NOTHING_ENDED

    def batch(self, step: Step) -> list[tuple[Request, int]]:
        """Prompts, then decodes."""
        prompts = [(chunk.request, chunk.num_tokens) for chunk in step.chunks]
        if self._crowd is not None:
            decodes = self._crowd.in_pass_order(list(self._crowd.running)) if self._is_in_flight else []
            return prompts + [(request, 1) for request in decodes]
        return prompts + [(r, 1) for r in self._batch if r.num_output_tokens]

    def running(self) -> list[Request]:
        """The batch, where it lasts from pass to pass; MLFQ queues everybody again."""
        return self.scheduler.running()

    def waiting(self) -> list[Request]:
        """Everybody else, in the scheduler's order."""
        if self._crowd is not None:
            return list(self._crowd.new) if self._is_in_flight or self._has_ended else self._crowd.in_order()
        return self.scheduler.waiting()

    @property
    def num_unfinished(self) -> int:
        """Everybody."""
        return self._num_unfinished

    @property
    def num_waiting(self) -> int:
        """Those who are not in the pass in flight."""
        if self._crowd is not None and self._is_in_flight:
            return len(self._crowd.new)
        return self._num_unfinished - len(self._batch)

    @property
    def free_blocks(self) -> int:
        """Blocks of the GPU that nobody holds."""
        return self.kv.free_blocks

    @property
    def usable_blocks(self) -> int:
        """Blocks of the GPU."""
        return self.kv.usable_blocks

    def check_integrity(self) -> None:
        """The pool lacks what requests hold, and nobody is in two places."""
        everybody = [*self.running(), *self.waiting(), *self._to_settle, *self._batch]
        if self._crowd is not None:
            everybody = [*self._crowd.in_order(), *self._crowd.prompting]
            for request in self._crowd.running:
                request.num_blocks = blocks_for(self._crowd.running.context(request), self.kv.block_size)
        held = sum(r.num_blocks for r in set(everybody))
        if held != self.kv.used_blocks:
            raise InvariantError(f"requests hold {held} blocks, the pool lacks {self.kv.used_blocks}")
        if len(set(everybody)) != self._num_unfinished:
            raise InvariantError(f"{len(set(everybody))} requests are somewhere, {self._num_unfinished} unfinished")

    # ------------------------------------------------------------------ for the scheduler

    def swap_out(self, request: Request) -> int:
        """Move a request's KV to the host; how many blocks that frees."""
        num_blocks = self.kv.swap_out(request)
        request.status = Status.PREEMPTED
        self._live_tokens -= request.num_computed_tokens
        self._decoding.pop(request, None)
        self.swaps.append(Swap(request, True, num_blocks))
        return num_blocks

    def swap_in(self, request: Request) -> None:
        """Move a request's KV back to the GPU."""
        num_blocks = self.kv.swap_in(request)
        request.status = Status.RUNNING
        self._live_tokens += request.num_computed_tokens
        self.swaps.append(Swap(request, False, num_blocks))

    # ------------------------------------------------------------------ while everybody fits

    def _gather(self) -> None:
        """After a pass of everybody, in which nobody was moved: from now on count only what changes."""
        is_quiet = self._was_everybody and not self.kv.used_cpu_blocks and len(self.swaps) == self._num_named
        if self._crowd is not None or not is_quiet or not isinstance(self.scheduler, Mlfq):
            return
        self._crowd = crowd = Crowd(self.kv.block_size)
        everybody = self.scheduler.empty()
        members = [r for r in everybody if r.num_output_tokens]
        crowd.take_in(members)
        crowd.joined = {r: None for r in members if r not in self._decoding}
        crowd.new = {r: None for r in everybody if not r.num_output_tokens}

    def _dissolve(self, crowd: Crowd) -> None:
        """Hand everybody back to the scheduler, between two passes."""
        everybody, decoded = crowd.dissolve()
        cast("Mlfq", self.scheduler).fill_again(everybody, crowd.num_passes)
        if crowd.num_passes:
            self._decoding = dict.fromkeys(decoded)
        self._crowd, self._was_everybody = None, False

    def _plan_crowd(self, crowd: Crowd, now_s: float) -> Step:
        """A pass of everybody."""
        num_free = self.kv.free_blocks
        shape, prompts, joined = crowd.plan(self.kv)
        self._tick += shape.num_decode > 0
        self._live_tokens += shape.num_decode + shape.prefill_tokens
        self.swaps, self._num_named, self._planned_s = [], 0, now_s
        return Step(
            shape,
            shape.num_sampled,
            0,
            self.kv.used_blocks,
            num_free - self.kv.free_blocks,
            self._live_tokens,
            tick=self._tick,
            chunks=[Chunk(r, r.prompt_tokens, 0, True) for r in prompts],
            joined=joined,
            admitted=[Admission(r, 0, False) for r in prompts],
        )

    def _update_crowd(self, crowd: Crowd, step: Step) -> Finished:
        self._has_ended = True
        decodes = crowd.end_decodes(crowd.running.tick) if step.shape.num_decode else ([], [])
        if not (crowd.prompting or decodes[0] or decodes[1]):
            return NOTHING_ENDED
        prompts = crowd.end_prompts()
        finished, departed = prompts[0] + decodes[0], prompts[1] + decodes[1]
        for request in finished:
            crowd.remove(request)
            self._end(request)
        return Finished(finished, finished, departed) if finished or departed else NOTHING_ENDED

    # ------------------------------------------------------------------ steps

    def _step(self, batch: Sequence[Request], swaps: Sequence[Swap], num_new_blocks: int) -> Step:
        prompts = [r for r in batch if not r.num_output_tokens]
        decodes = [r for r in batch if r.num_output_tokens]
        contexts = [r.num_computed_tokens for r in decodes]
        shape = StepShape(
            num_decode=len(decodes),
            decode_context_sum=sum(contexts),
            decode_context_sum_sq=sum(context * context for context in contexts),
            decode_context_max=max(contexts, default=0),
            prefills=tuple((r.prompt_tokens, 0) for r in prompts),
            num_sampled=len(batch),
            num_swapped_blocks=sum(swap.num_blocks for swap in swaps),
            num_new_requests=len(prompts),
        )
        for request in batch:
            request.status = Status.RUNNING
            num_tokens = 1 if request.num_output_tokens else request.prompt_tokens
            request.num_computed_tokens += num_tokens
            self._live_tokens += num_tokens
        joined, left = self._changes(decodes)
        beneficiary = batch[0] if batch else None
        return Step(
            shape,
            len(batch),
            self._num_unfinished - len(batch),
            self.kv.used_blocks,
            num_new_blocks,
            self._live_tokens,
            self.scheduler.blocked_by if self._num_unfinished > len(batch) else BlockedBy.NOTHING,
            self._tick,
            chunks=[Chunk(r, r.prompt_tokens, 0, True) for r in prompts],
            joined=joined,
            left=left,
            admitted=[Admission(r, 0, False) for r in prompts],
            preempted=[Preemption(s.request, beneficiary or s.request, 0) for s in swaps if s.is_out],
        )

    def _changes(self, decodes: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Who decodes now and did not in the last pass that decoded, and the other way round."""
        if not decodes:
            return [], []
        self._tick += 1
        before, self._decoding = self._decoding, dict.fromkeys(decodes)
        return [r for r in decodes if r not in before], [r for r in before if r not in self._decoding]

    def _end(self, request: Request) -> None:
        if request.num_blocks:
            self._live_tokens -= request.num_computed_tokens
        request.status = Status.OVER
        self.kv.free(request)
        self._decoding.pop(request, None)
        self._num_unfinished -= 1


def _to_seconds(time_ns: int) -> float:
    return time_ns / NS_PER_S


def _has_output(request: Request) -> bool:
    return request.num_output_tokens > 0
