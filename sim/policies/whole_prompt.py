"""What the policies from before paging share: whole prompts, reserved contiguous KV, a waiting queue.

A prompt runs in one iteration and yields the first token; from the next one on the request decodes with
everybody else, one token per tick of a RunningBatch. KV for its longest possible course is reserved at
admission, so nobody is ever preempted. Who is admitted when is the matter of each policy. A lane is one of the
batches that may be in flight at once, and a request stays in its lane.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field

from sim.batch import RunningBatch
from sim.errors import InvariantError
from sim.kv.contiguous import ContiguousKV, Reserve
from sim.options import Count, OneOf
from sim.policies.base import EngineLimits, EngineOptions, Policy
from sim.queues.base import QUEUE_ORDERS, QueueOrderOptions, Setting, build_order
from sim.queues.fcfs import FcfsOptions
from sim.request import NEVER, Request, Status
from sim.step import Admission, BlockedBy, Chunk, SteadyRun, Step, StepShape


class WholePromptOptions(EngineOptions):
    """What each of these policies can be told."""

    max_batch_size: Count = Field(default=32, description="requests in the batch at most")
    reserve: Reserve = Field(
        default="max_tokens",
        description="KV that a request reserves: its prompt and max_tokens, output_tokens (its answer's true length) "
        "or the power_of_two above that; or max_model_len",
    )
    queue_order: Annotated[QueueOrderOptions, OneOf(QUEUE_ORDERS)] = Field(
        default_factory=FcfsOptions, description="who is next in the waiting queue"
    )

    def largest_pass(self, longest: int) -> tuple[int, int]:
        return longest, self.max_batch_size


class Lane:
    """One of the batches that may be in flight."""

    def __init__(self, block_size: int) -> None:
        self.prefilling: dict[Request, None] = {}
        """Admitted in the step in flight; they decode from the next one on."""
        self.prompting: dict[Request, None] = {}
        """Members whose prompt has been computed in part, which only `static` has."""
        self.running = RunningBatch(block_size)
        self.joined: dict[Request, None] = {}
        """Those of the running batch whose first decode is in the next step."""
        self.is_decoding = False
        """Whether the step in flight decodes: the running batch has then ticked ahead of its results."""

    @property
    def live_tokens(self) -> int:
        """Tokens that its members have in KV."""
        apart = [r.num_computed_tokens for members in (self.prefilling, self.prompting) for r in members]
        return self.running.context_sum + sum(apart)


class WholePromptPolicy(Policy):
    """The queue, the decodes and the KV; subclasses admit, and release what ends."""

    Options: ClassVar[type[WholePromptOptions]]

    def __init__(self, options: WholePromptOptions, limits: EngineLimits) -> None:
        self._max_batch_size = options.max_batch_size
        self._max_model_len = limits.max_model_len
        self._kv = self.pool(options)(limits.num_gpu_blocks, limits.block_size, limits.max_model_len, options.reserve)
        self.queue = build_order(
            options.queue_order,
            Setting(
                limits.class_names,
                options.max_batch_size * self.num_lanes(options),
                limits.num_gpu_blocks * limits.block_size,
            ),
        )
        self.follows_arrival_order = self.queue.is_arrival_order
        self.deadlines = self.queue if self.queue.drops_late else None
        self.reads_clock = self.queue.reads_clock
        self._lanes = [Lane(limits.block_size) for _ in range(self.num_lanes(options))]
        self._lane = self._lanes[0]
        """Whose turn it is."""
        self._planned_ns = 0
        """When the last step was planned."""

    @classmethod
    def build(cls, options: EngineOptions, limits: EngineLimits) -> Self:
        """A fresh policy."""
        assert isinstance(options, cls.Options)
        return cls(options, limits)

    @classmethod
    def pool(cls, options: WholePromptOptions) -> type[ContiguousKV]:
        """How stretches of KV are found."""
        return ContiguousKV

    @classmethod
    def num_lanes(cls, options: WholePromptOptions) -> int:
        """Batches in flight at most, each with members of its own."""
        return 1

    def share_queue(self, other: Policy) -> bool:
        """Where the order keeps no account of what one engine runs."""
        if not isinstance(other, WholePromptPolicy) or other.queue.keeps_accounts:
            return False
        self.queue = other.queue
        return True

    def never_fits(self, request: Request) -> str | None:
        """A prompt that leaves no room for an answer, or a reservation larger than the pool."""
        return self._kv.never_fits(request.prompt_tokens, self._kv.room_for_answer(request))

    def add(self, request: Request) -> None:
        """Put in the queue. The answer ends at `max_model_len` at the latest."""
        request.num_target_tokens = min(request.num_target_tokens, self._max_model_len - request.prompt_tokens)
        self.queue.add(request, request.queued_ns)

    def steady_run(self, min_steps: int, max_steps: int) -> SteadyRun | None:
        """Until somebody's answer ends, where the head of the queue stays out for certain."""
        running, next_tick = self._lane.running, self._lane.running.due.next_tick()
        if self._lane.prefilling or self._lane.joined or next_tick is None:
            return None
        num_steps = min(max_steps, next_tick - running.tick)
        blocked_by = self._steady_obstacle() if num_steps >= min_steps else None
        if blocked_by is None:
            return None
        return SteadyRun(
            StepShape(len(running), *running.context_sums(), (), len(running)),
            [0] * num_steps,
            len(self.running()),
            len(self.queue),
            blocked_by,
            self._kv.used_blocks,
            running.context_sum,
        )

    def advance_steady(self, num_steps: int) -> None:
        """Everybody who decodes gets so many tokens; their KV has been theirs from the start."""
        self._lane.running.advance(num_steps)
        self.queue.advance(num_steps)

    @abstractmethod
    def _steady_obstacle(self) -> BlockedBy | None:
        """What keeps the head of the queue out while the same requests decode; None when that is not certain. Pure."""

    def batch(self, step: Step) -> list[tuple[Request, int]]:
        """Decodes in running order, then prompts."""
        decodes = [(r, 1) for r in self._lane.running] if step.shape.num_decode else []
        return decodes + [(chunk.request, chunk.num_tokens) for chunk in step.chunks]

    def waiting(self) -> list[Request]:
        """The queue in its order."""
        return list(self.queue)

    @property
    def num_waiting(self) -> int:
        """Length of the queue."""
        return len(self.queue)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody reserved."""
        return self._kv.free_blocks

    @property
    def usable_blocks(self) -> int:
        """All blocks: contiguous KV needs no null block."""
        return self._kv.usable_blocks

    def check_integrity(self) -> None:
        """Blocks are held by members of the batch, all of them and nobody else."""
        members = self.running()
        held = sum(r.num_blocks for r in members)
        if held != self._kv.used_blocks:
            raise InvariantError(f"the batch holds {held} blocks, the pool lacks {self._kv.used_blocks}")
        if len(members) > self._max_batch_size * len(self._lanes):
            raise InvariantError(f"{len(members)} requests in a batch of at most {self._max_batch_size}")
        if any(r.num_blocks or r.status is not Status.WAITING for r in self.queue):
            raise InvariantError("a waiting request holds blocks or is not marked as waiting")
        for lane in self._lanes:
            if not set(members).issuperset(lane.running) or not set(lane.running).issuperset(lane.joined):
                raise InvariantError("somebody decodes who is not in the batch")

    def _own_rows(self, admitted: Sequence[Request] = ()) -> StepShape:
        """One row for each running request at its own context, and the prompts of `admitted`. Pure."""
        running = self._lane.running
        return StepShape(
            num_decode=len(running),
            decode_context_sum=running.context_sum,
            decode_context_sum_sq=running.context_sum_sq,
            decode_context_max=running.context_max,
            prefills=tuple((r.prompt_tokens, 0) for r in admitted),
            num_sampled=len(running) + len(admitted),
            num_new_requests=len(admitted),
        )

    def _step(
        self,
        shape: StepShape,
        blocked_by: BlockedBy,
        num_running: int,
        admitted: Sequence[Request] = (),
        left: Sequence[Request] = (),
        chunks: Sequence[Chunk] = (),
    ) -> Step:
        """The step with this shape: the running batch ticks, and prompts (of those who hold their KV) are computed.

        `chunks` of prompts; default: all of those of the admitted.
        """
        self._lane.is_decoding = len(self._lane.running) > 0
        if self._lane.is_decoding:
            self._lane.running.advance()
            self.queue.advance()
        joined, self._lane.joined = self._lane.joined, {}
        chunks = chunks or [Chunk(r, r.prompt_tokens, 0, True) for r in admitted]
        for chunk in chunks:
            request = chunk.request
            request.num_computed_tokens = chunk.context + chunk.num_tokens
            self._lane.prompting.pop(request, None)
            (self._lane.prefilling if chunk.is_last else self._lane.prompting)[request] = None
        return Step(
            shape,
            num_running,
            len(self.queue),
            self._kv.used_blocks,
            sum([r.num_blocks for r in admitted]),
            sum([lane.live_tokens for lane in self._lanes]),
            blocked_by,
            self._lane.running.tick,
            self._lanes.index(self._lane),
            chunks=chunks,
            joined=list(joined),
            left=left,
            admitted=[Admission(r, 0, False) for r in admitted],
        )

    def _seat(self, request: Request, num_blocks: int) -> None:
        """A request that was taken out of the queue enters the batch, with its stretch of KV."""
        request.status = Status.RUNNING
        self._kv.allocate(request, num_blocks)

    def _release(self, request: Request) -> None:
        """The request is gone and its KV is free."""
        if request.num_blocks:
            self.queue.released(request, request.num_output_tokens)
        request.status = Status.OVER
        self._kv.free(request)

    def _drop_from_batch(self, request: Request) -> bool:
        """Compute nothing more for a member of the batch. Returns whether it has decoded before."""
        if request not in self._lane.running:
            del self._lane.prefilling[request]
            return False
        self._lane.running.leave(request)
        self.queue.stop_decoding(request)
        if self._lane.is_decoding:
            request.num_output_tokens -= 1
        if request in self._lane.joined:
            del self._lane.joined[request]
            return False
        return True

    def _take_in(self, step: Step) -> tuple[list[Request], list[Request]]:
        """Results of a step: one token for each member. Returns who finished and whose client leaves now."""
        self._lane.is_decoding = False
        finished: list[Request] = []
        departed: list[Request] = []
        running = self._lane.running
        for request in running.due.pop_tick(step.tick):
            num_output_tokens = request.num_output_tokens + step.tick - request.joined_tick
            if num_output_tokens < request.num_target_tokens:
                departed.append(request)
                running.postpone(request, request.num_target_tokens - num_output_tokens)
            else:
                running.leave(request)
                self.queue.stop_decoding(request)
                finished.append(request)
        for request in self._lane.prefilling:
            request.num_output_tokens = 1
            self.queue.served(request, 1)
            if request.num_target_tokens == 1:
                finished.append(request)
                continue
            num_received = self._tokens_until_client_leaves(request)
            if num_received == 1:
                departed.append(request)
                num_received = request.num_target_tokens
            running.join(request, num_received - 1)
            self.queue.start_decoding(request, 2)
            self._lane.joined[request] = None
        self._lane.prefilling.clear()
        return finished, departed

    def _tokens_until_client_leaves(self, request: Request) -> int:
        """Tokens that its client waits for: all, unless it sees them come and leaves earlier."""
        if self.streams_answers and request.cancel_after_tokens != NEVER:
            return min(request.cancel_after_tokens, request.num_target_tokens)
        return request.num_target_tokens
