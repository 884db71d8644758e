"""The engine under VTC: prompts in batches of their own, joins every ten decode steps, admission by future peak.

While requests run, their decodes go on for `max_wait_tokens` steps before the queue is asked for more; what it
gives is prefilled alone, and nobody decodes in that step. KV is held token by token. A request is admitted only
if, should every answer become `max_tokens` long, the pool would still hold the worst moment to come; so
nobody is ever preempted, and whoever does not fit holds up everybody behind.

Clients are request classes. The engine charges the queue order one token too many for each member of a pass
in which anybody finishes, and never for first tokens, as its source does. A client that leaves while its
request runs gets rid of it after the next pass that the request is in.

Source: VTC-artifact @192c2e2 (on S-LoRA and LightLLM), `router/manager.py` and `router/req_queue.py`. Its queues
are `fcfs` (slora) and the orders that its names stand for; `lora_rank` is what adapters take from the pool.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from sim.batch import RunningBatch
from sim.errors import InvariantError
from sim.kv.counted import CountedCache
from sim.options import Count, CountOrZero, OneOf
from sim.policies.base import About, Axes, EngineLimits, EngineOptions, Policy
from sim.queues.base import QUEUE_ORDERS, QueueOrder, QueueOrderOptions, Setting, build_order
from sim.queues.vtc import VtcFair
from sim.request import Request, Status
from sim.step import NOTHING_ENDED, Admission, BlockedBy, Chunk, Finished, SteadyRun, Step, StepShape

TOKENS_PER_LORA_RANK = 4
"""Places in the pool that an adapter takes for each of its rank."""


class Course(NamedTuple):
    """What a request holds, and what it may come to hold."""

    num_held: int
    num_to_come: int


class VtcOptions(EngineOptions):
    """What the engine can be told; its own names but for the pool, which is `num_gpu_blocks` of one token."""

    policy: Literal["vtc"] = Field(description="prompts apart from decodes, fair queues, admission by future peak")
    queue_order: Annotated[QueueOrderOptions, OneOf(QUEUE_ORDERS)] = Field(
        default_factory=lambda: VtcFair.Options(kind="vtc_fair"), description="who is next in the waiting queue"
    )
    block_size: Literal[1] = Field(default=1, description="KV is held token by token")
    batch_max_tokens: Count = Field(default=8192, description="prompt tokens of one prefill at most")
    running_max_req_size: Count = Field(default=1000, description="requests that run at most")
    max_wait_tokens: CountOrZero = Field(default=10, description="decode steps before the queue is asked again")
    lora_rank: CountOrZero = Field(
        default=0, description="rank of each class's adapter, which takes four tokens of the pool a rank; 0: none"
    )

    def largest_pass(self, longest: int) -> tuple[int, int]:
        return self.batch_max_tokens, self.running_max_req_size


class Vtc(Policy):
    """The router's loop: one call, one pass."""

    Options: ClassVar[type[VtcOptions]] = VtcOptions
    about = About(
        batching="prefill or decode: new requests are prefilled alone, every ten decode steps at most",
        copies="VTC-artifact @192c2e2 (Sheng et al. 2024) with its queues",
        proof="step logs of the real router and queues: 18 of 18",
        note="clients are request classes; nobody is preempted",
    )
    own_axes = Axes(
        "every step",
        "prefills or decodes, whole prompts",
        "prefills, then decodes",
        "input + max_tokens of the batch to come",
        "never happens",
        "nobody",
        "stops admission",
        "every 10 decode steps",
        "vtc_fair",
        "requests, KV tokens, prefill tokens",
    )

    def __init__(self, options: VtcOptions, limits: EngineLimits) -> None:
        self._options = options
        self._max_model_len = limits.max_model_len
        self.queue = build_order(
            options.queue_order,
            Setting(limits.class_names, options.running_max_req_size, limits.num_gpu_blocks * limits.block_size),
        )
        self.follows_arrival_order = self.queue.is_arrival_order
        self.deadlines = self.queue if self.queue.drops_late else None
        self.reads_clock = self.queue.reads_clock
        self._settles_each = type(self.queue).released is not QueueOrder.released
        """Whether the queue's accounts change with everybody who is over."""
        self._num_waiting = 0
        """In the queue and not cancelled: who is cancelled there stays in it until it is at the head."""
        self._kv = CountedCache(limits.num_gpu_blocks, 1)
        self._running = RunningBatch(1)
        self._prefilling: dict[Request, None] = {}
        """The mini batch in flight; nobody else is in that pass."""
        self._joined: dict[Request, None] = {}
        self._leaving: dict[Request, None] = {}
        """Members whose client has left; they go after their next pass."""
        self._most_tokens = 0
        """What those who run would hold if all came to the ends of their longest answers at once."""
        self._is_decoding = False
        self.num_decode_steps = 0
        """Since the queue last gave anything, counted up to `max_wait_tokens`."""

    @classmethod
    def build(cls, options: EngineOptions, limits: EngineLimits) -> Self:
        """A fresh engine."""
        assert isinstance(options, VtcOptions)
        return cls(options, limits)

    def never_fits(self, request: Request) -> str | None:
        """A prompt longer than a prefill, or a request that fills the pool."""
        if request.prompt_tokens >= self._max_model_len:
            return (
                f"its prompt of {request.prompt_tokens} tokens leaves no room for an answer"
                f" within max_model_len {self._max_model_len}"
            )
        most = self._options.batch_max_tokens
        if request.prompt_tokens > most:
            return f"its prompt of {request.prompt_tokens} tokens exceeds batch_max_tokens {most}"
        places = self._places(1)
        peak = _future_peak([self._course(request)])
        return None if peak < places else f"it takes {peak} tokens of the pool, which must stay below {places}"

    def add(self, request: Request) -> None:
        """Into the queue. The answer ends at `max_model_len` at the latest."""
        request.num_target_tokens = min(request.num_target_tokens, self._max_model_len - request.prompt_tokens)
        self.queue.add(request, request.queued_ns)
        self._num_waiting += 1

    def cancel(self, request: Request) -> bool:
        """A waiting request is gone, a running one stays for one more pass."""
        if request.status is Status.WAITING:
            request.status = Status.OVER
            self._num_waiting -= 1
            return True
        self._leaving[request] = None
        return False

    def plan(self, now_ns: int) -> Step:
        """Prefill what the queue gives when it is to be asked, else decode."""
        num_running = len(self._running)
        asks = not num_running or self.num_decode_steps >= self._options.max_wait_tokens
        admitted, blocked_by = self._select(now_ns) if asks else ([], self._pause())
        if admitted:
            self.num_decode_steps = 0
            return self._prefill(admitted, blocked_by)
        if not num_running:
            return self._step(StepShape(), 0, blocked_by)
        if not asks:
            self.num_decode_steps += 1
        return self._decode(blocked_by)

    def update(self, step: Step) -> Finished:
        """Each member of the pass has one more token; who ends, or was left by its client, goes."""
        if self._prefilling:
            return self._end_prefill()
        return self._end_decode(step) if self._is_decoding else NOTHING_ENDED

    def steady_run(self, min_steps: int, max_steps: int) -> SteadyRun | None:
        """Until somebody's answer ends or the queue is asked, or beyond that where it has nothing to give."""
        running, next_tick = self._running, self._running.due.next_tick()
        if self._prefilling or self._joined or self._leaving or next_tick is None:
            return None
        blocked_by, num_paused = self._pause(), self._options.max_wait_tokens - self.num_decode_steps
        num_steps = min(max_steps, next_tick - running.tick)
        if self._num_waiting and len(running) >= self._options.running_max_req_size and num_paused <= 0:
            blocked_by = BlockedBy.SLOTS
        elif len(self.queue) or not self.queue.leaves_no_trace:
            num_steps = min(num_steps, num_paused)
        if num_steps < min_steps:
            return None
        return SteadyRun(
            StepShape(len(running), *running.context_sums(), (), len(running)),
            [len(running)] * num_steps,
            len(running),
            self._num_waiting,
            blocked_by,
            self._kv.used_blocks,
            self._kv.used_blocks,
        )

    def advance_steady(self, num_steps: int) -> None:
        self.queue.advance(num_steps)
        self._kv.take(num_steps * len(self._running))
        self._running.advance(num_steps)
        paused = self._options.max_wait_tokens - self.num_decode_steps
        self.num_decode_steps += max(0, min(num_steps, paused))

    def batch(self, step: Step) -> list[tuple[Request, int]]:
        """A mini batch, or everybody who runs."""
        if step.chunks:
            return [(chunk.request, chunk.num_tokens) for chunk in step.chunks]
        return [(request, 1) for request in self._running] if step.shape.num_decode else []

    def running(self) -> list[Request]:
        """In order of admission."""
        return [*self._running, *self._prefilling]

    def waiting(self) -> list[Request]:
        """In the order in which the queue would give them now."""
        return [request for request in self.queue if request.status is Status.WAITING]

    @property
    def num_unfinished(self) -> int:
        """Waiting and running requests."""
        return self._num_waiting + len(self._running) + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        """Length of the queue, without those whose client has left."""
        return self._num_waiting

    @property
    def free_blocks(self) -> int:
        """Tokens that the pool has room for."""
        return self._kv.free_blocks

    @property
    def usable_blocks(self) -> int:
        """Tokens of the pool, those that adapters take included."""
        return self._kv.usable_blocks

    def check_integrity(self) -> None:
        """The pool lacks what the members of the batch hold."""
        held = sum(self._running.context(r) for r in self._running) + sum(r.prompt_tokens for r in self._prefilling)
        if held != self._kv.used_blocks:
            raise InvariantError(f"the batch holds {held} tokens, the pool lacks {self._kv.used_blocks}")
        if self._num_waiting != len(self.waiting()):
            raise InvariantError(f"{self._num_waiting} requests count as waiting, {len(self.waiting())} do")
        if not set(self._leaving).issubset(self.running()):
            raise InvariantError("a request that left the batch is still to leave it")

    # ------------------------------------------------------------------ admission

    def _select(self, now_ns: int) -> tuple[list[Request], BlockedBy]:
        """The mini batch, taken out of the queue, and what the first one that is not in it lacked."""
        options, queue = self._options, self.queue
        if len(self._running) >= options.running_max_req_size:
            return [], BlockedBy.SLOTS if self._num_waiting else BlockedBy.NOTHING
        queue.begin_admission(now_ns)
        most_tokens = self._most_tokens
        courses: list[Course] | None = None
        clients = {r.class_index for r in self._running} if options.lora_rank else set()
        admitted: list[Request] = []
        num_tokens = 0
        while (request := queue.head(now_ns)) is not None:
            if request.status is Status.OVER:
                queue.remove(request)
                continue
            course = self._course(request)
            most_tokens += sum(course)
            clients.add(request.class_index)
            num_tokens += request.prompt_tokens
            places = self._places(len(clients))
            if most_tokens >= places and courses is None:
                courses = sorted(map(self._course, [*self._running, *admitted]), key=_still_to_come)
            if courses is not None:
                insort(courses, course, key=_still_to_come)
            lacks = self._lack(len(self._running) + len(admitted) + 1, places, num_tokens, courses)
            if lacks is not BlockedBy.NOTHING:
                queue.refused(request)
                return admitted, lacks
            queue.take(request, now_ns)
            self._num_waiting -= 1
            admitted.append(request)
        return admitted, self._pause()

    def _lack(self, num_requests: int, places: int, num_tokens: int, courses: Sequence[Course] | None) -> BlockedBy:
        """What so many requests, running and new, would lack.

        `num_tokens`: prompts of the new ones; `courses`: of all, or None where they fit even if all came to their
        ends at once, which is never less than the peak.
        """
        if num_requests > self._options.running_max_req_size:
            return BlockedBy.SLOTS
        if courses is not None and _future_peak(courses) >= places:
            return BlockedBy.KV
        return BlockedBy.BUDGET if num_tokens > self._options.batch_max_tokens else BlockedBy.NOTHING

    def _places(self, num_clients: int) -> int:
        """Tokens of the pool that the adapters of so many clients leave."""
        return self._kv.usable_blocks - TOKENS_PER_LORA_RANK * self._options.lora_rank * num_clients

    def _course(self, request: Request) -> Course:
        """Tokens that it holds (one that is new: after its prefill), and how many may still come.

        Together they are the same in every pass, but that one that runs will never hold its last token.
        """
        num_outputs = max(1, self._num_outputs(request))
        num_to_come = self._longest_answer(request) - num_outputs - (request in self._running)
        return Course(request.prompt_tokens + num_outputs, num_to_come)

    def _longest_answer(self, request: Request) -> int:
        return min(request.max_tokens, self._max_model_len - request.prompt_tokens)

    def _most_held(self, request: Request) -> int:
        """Tokens that one that runs holds at the end of its longest answer."""
        return request.prompt_tokens + self._longest_answer(request) - 1

    def _pause(self) -> BlockedBy:
        """Why whoever waits was not even tried."""
        return BlockedBy.ADMISSION if self._num_waiting else BlockedBy.NOTHING

    # ------------------------------------------------------------------ passes

    def _prefill(self, admitted: Sequence[Request], blocked_by: BlockedBy) -> Step:
        for request in admitted:
            request.status = Status.RUNNING
            request.num_computed_tokens = request.prompt_tokens
            self._kv.allocate(request, request.prompt_tokens)
            self._prefilling[request] = None
        shape = StepShape(
            prefills=tuple((r.prompt_tokens, 0) for r in admitted),
            num_sampled=len(admitted),
            num_new_requests=len(admitted),
        )
        return self._step(shape, sum(r.prompt_tokens for r in admitted), blocked_by, admitted)

    def _decode(self, blocked_by: BlockedBy) -> Step:
        running, num_decode = self._running, self._running.num_decode
        context_sum, context_sum_sq, context_max = running.context_sums()
        shape = StepShape(
            num_decode=num_decode,
            decode_context_sum=context_sum,
            decode_context_sum_sq=context_sum_sq,
            decode_context_max=context_max,
            num_sampled=num_decode,
        )
        self.queue.advance()
        self._kv.take(num_decode)
        running.advance()
        return self._step(shape, num_decode, blocked_by)

    def _step(
        self, shape: StepShape, num_new_tokens: int, blocked_by: BlockedBy, admitted: Sequence[Request] = ()
    ) -> Step:
        self._is_decoding = shape.num_decode > 0
        joined: list[Request] = []
        if self._is_decoding:
            joined, self._joined = list(self._joined), {}
        return Step(
            shape,
            len(self._running) + len(admitted),
            self._num_waiting,
            self._kv.used_blocks,
            num_new_tokens,
            self._kv.used_blocks,
            blocked_by,
            self._running.tick,
            chunks=[Chunk(r, r.prompt_tokens, 0, True) for r in admitted],
            joined=joined,
            admitted=[Admission(r, 0, False) for r in admitted],
        )

    # ------------------------------------------------------------------ results

    def _end_prefill(self) -> Finished:
        members, self._prefilling = list(self._prefilling), {}
        finished: list[Request] = []
        departed: list[Request] = []
        gone: dict[Request, None] = {}
        for request in members:
            request.num_output_tokens = 1
            if request.num_target_tokens == 1:
                finished.append(request)
            elif request.cancel_after_tokens == 1 and request not in self._leaving:
                departed.append(request)
            if request.num_target_tokens == 1 or request in self._leaving:
                gone[request] = None
        self._charge_again(members, gone)
        for request in members:
            if request in gone:
                self._release(request)
                continue
            self._running.join(request, self._tokens_until_something_ends(request))
            self._most_tokens += self._most_held(request)
            self._joined[request] = None
            self.queue.start_decoding(request, 1)
        return Finished(finished, list(gone), departed)

    def _end_decode(self, step: Step) -> Finished:
        running = self._running
        due = dict.fromkeys(running.due.pop_tick(step.tick) if step.tick in running.due else ())
        if not due and not self._leaving:
            return NOTHING_ENDED
        concerned = due | self._leaving
        in_order = [r for r in running if r in concerned] if len(concerned) > 1 else list(concerned)
        finished = [r for r in in_order if r in due and self._num_outputs(r) == r.num_target_tokens]
        departed = [r for r in due if self._num_outputs(r) < r.num_target_tokens and r not in self._leaving]
        gone = {r: None for r in in_order if r in self._leaving or r not in departed}
        for request in departed:
            running.postpone(request, request.num_target_tokens - self._num_outputs(request))
        self._charge_again(list(running) if gone else (), gone)
        for request in gone:
            self.queue.stop_decoding(request)
            running.leave(request)
            self._most_tokens -= self._most_held(request)
            self._joined.pop(request, None)
            self._release(request)
        return Finished(finished, list(gone), departed)

    def _charge_again(self, members: Sequence[Request], gone: Collection[Request]) -> None:
        """The source's second count of a pass in which anybody ended, and its settlement with those who did."""
        if gone and not self._settles_each:
            self.queue.served_each(members, self._num_outputs)
            return
        for request in members if gone else ():
            num_outputs = self._num_outputs(request)
            self.queue.served(request, num_outputs)
            if request in gone:
                self.queue.released(request, num_outputs)

    def _release(self, request: Request) -> None:
        self._leaving.pop(request, None)
        request.status = Status.OVER
        request.num_blocks = request.num_computed_tokens
        self._kv.free(request)

    def _num_outputs(self, request: Request) -> int:
        """Output tokens of a request, those of the pass in flight included."""
        ticks = self._running.tick - request.joined_tick if request in self._running else 0
        return request.num_output_tokens + ticks

    def _tokens_until_something_ends(self, request: Request) -> int:
        """After its first one: until its answer is complete, or until its client has what it waits for."""
        last = request.num_target_tokens
        if 1 < request.cancel_after_tokens < last:
            last = request.cancel_after_tokens
        return last - 1


def _future_peak(courses: Sequence[Course]) -> int:
    """The most that requests in this order, longest rest first, will ever hold at once.

    When the i-th one ends, those before it have grown as much as it has, and those behind it are gone.
    """
    peak = held = 0
    for count, (num_held, num_to_come) in enumerate(courses, 1):
        held += num_held
        peak = max(peak, num_to_come * count + held)
    return peak


def _still_to_come(course: Course) -> int:
    return -course.num_to_come
