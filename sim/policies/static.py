"""Request-level batching: a batch is formed, runs until its last member is done, and nobody joins it.

The first iteration prefills all prompts of the batch, each later one decodes. With a queue delay this is
traditional dynamic batching: an idle engine lets the oldest request wait for company. A delay has no
effect while a batch runs, for then the next batch forms by itself. Preferred sizes are sent as soon as one is
reached, without those beyond it, as long as nobody has waited for the whole delay. With `max_batch_size: 1` it
is serving without batching.

What else Triton's batcher has stands in other options: priority levels and time-outs that only delay in the
`triton` queue order, time-outs that reject in `queue_timeout_s`, a longest queue in a `queue_limit` door, instances in
`fleet.replicas` with `router: {kind: shared_queue}`.

Padded compute makes the batch a rectangle: prompts are padded to the longest one, and finished members
keep their row until the end. Rows are kept no longer than `max_model_len`. With early exit every row has
its own length and those that finish drop out of the computation, but their KV stays reserved. With a shortest
prompt, the first iteration computes so much of each prompt as the shortest one has, and the longer ones go on token
by token beside those who already decode; finished members keep their row. In no form is a place reused before
the batch is over.

A client that leaves while its request waits takes it along. In a batch its request must stay: a padded row
generates its answer to the end, for nobody; an early-exit row drops out of the computation with the next
results, as if it had met a stop condition, and keeps its KV until the end of the batch. Without
streaming, clients see no token before the end of the batch, so none leaves after n tokens.

Sources: Triton Inference Server, `dynamic_batch_scheduler.cc` (`max_batch_size`,
`max_queue_delay_microseconds`); FasterTransformer's GPT backend (padded, all answers together); FasterTransformer as
Yu et al. 2022 (Orca) describe and measure it in section 6.2 (shortest prompt); Sarathi-Serve,
`faster_transformer_scheduler.py` (early exit).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sim.clock import NS_PER_MS
from sim.options import Count, NonNegative
from sim.policies.base import About, Axes, EngineLimits
from sim.policies.whole_prompt import WholePromptOptions, WholePromptPolicy
from sim.request import Request, Status
from sim.step import BlockedBy, Chunk, Finished, Step, StepShape


class StaticOptions(WholePromptOptions):
    """What request-level batching can be told."""

    policy: Literal["static"] = Field(description="request-level batching; with a queue delay: dynamic batching")

    max_queue_delay_ms: NonNegative = Field(
        default=0.0,
        le=1e9,
        description="how long an idle engine lets the oldest request wait for a full batch; 0: not at all",
    )
    preferred_batch_size: tuple[Count, ...] = Field(
        default=(), description="sizes that are sent without waiting for more; each at most max_batch_size"
    )
    compute: Literal["padded", "early_exit", "shortest_prompt"] = Field(
        default="padded",
        description="padded: prompts as long as the longest, finished rows still computed; early_exit: neither; "
        "shortest_prompt: prompts beyond the shortest token by token, finished rows still computed",
    )
    release: Literal["at_batch_end", "streaming"] = Field(
        default="at_batch_end",
        description="at_batch_end: all answers leave together; streaming: tokens leave as they come",
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        for size in self.preferred_batch_size:
            if size > self.max_batch_size:
                raise PydanticCustomError(
                    "size_too_large",
                    "a preferred batch size of {size} exceeds max_batch_size {most}",
                    {"size": size, "most": self.max_batch_size},
                )
        return self


class StaticBatching(WholePromptPolicy):
    """A queue and at most one batch, whose members all stay until the last one is done."""

    Options = StaticOptions
    about = About(
        batching="request-level batching: a batch runs until its last member is done, and nobody joins it",
        copies="Triton's dynamic batcher, FasterTransformer (padded), Sarathi-Serve's baseline (early exit)",
        proof="whole logs worked out by hand from their sources, not logs of the real systems",
        note="with max_queue_delay_ms it is dynamic batching, with max_batch_size: 1 no batching; Triton's instances "
        "are replicas of a fleet with router: {kind: shared_queue}",
    )
    own_axes = Axes(
        "when all are done",
        "prefills or decodes, whole prompts",
        "one batch at a time",
        "max_tokens of the padded batch",
        "never happens",
        "nobody",
        "stops admission",
        "queue delay",
        "fcfs",
        "requests, padded tokens",
    )

    def __init__(self, options: StaticOptions, limits: EngineLimits) -> None:
        super().__init__(options, limits)
        self.streams_answers = options.release == "streaming"
        self._is_padded = options.compute != "early_exit"
        self._has_shortest_prompt = options.compute == "shortest_prompt"
        self._preferred = frozenset(options.preferred_batch_size)
        self._max_queue_delay_ns = round(options.max_queue_delay_ms * NS_PER_MS)
        self._members: dict[Request, None] = {}
        self._first_tokens = 0
        """Tokens of each row in the batch's first step, where it is a rectangle."""
        self._num_steps = 0
        """Of the batch so far."""
        self._aborted: list[Request] = []
        """Members that drop out of the computation with the next results."""
        self._left: list[Request] = []
        """Members that have dropped out since the last step."""

    def cancel(self, request: Request) -> bool:
        """Drop a waiting request. A member of the batch must stay until its end: False."""
        if request.status is Status.WAITING:
            self.queue.remove(request)
            self._release(request)
            return True
        if not self._is_padded:
            self._aborted.append(request)
        return False

    def plan(self, now_ns: int) -> Step:
        """The batch decodes; without a batch, form one and prefill it, or go on waiting for company."""
        return self._decode() if self._members else self._form(now_ns)

    def update(self, step: Step) -> Finished:
        """Those whose answer is complete finish; when nobody is left, the whole batch is released."""
        finished, departed = self._take_in(step)
        if self.streams_answers:
            for request in finished:
                request.status = Status.OVER
        for request in self._aborted:
            if request in self._lane.running and self._drop_from_batch(request):
                self._left.append(request)
        self._aborted.clear()
        released: list[Request] = []
        if not self._lane.running and not self._lane.prompting:
            released.extend(self._members)
            self._members.clear()
            self._left.clear()
        for request in released:
            self._release(request)
        return Finished(finished, released, departed)

    def running(self) -> list[Request]:
        """All members of the batch, finished ones included, in order of arrival."""
        return list(self._members)

    @property
    def num_unfinished(self) -> int:
        """Waiting requests and members of the batch."""
        return len(self.queue) + len(self._members)

    def wake_ns(self) -> int | None:
        """When the oldest waiting request has waited long enough for company."""
        if self._members or not len(self.queue) or not self._max_queue_delay_ns:
            return None
        return min(request.queued_ns for request in self.queue) + self._max_queue_delay_ns

    def _steady_obstacle(self) -> BlockedBy | None:
        if self._is_padded or self._aborted or self._left:
            return None  # rows for nobody are counted step by step
        return BlockedBy.ADMISSION if len(self.queue) else BlockedBy.NOTHING

    def _decode(self) -> Step:
        left, self._left = self._left, []
        blocked_by = BlockedBy.ADMISSION if len(self.queue) else BlockedBy.NOTHING
        context = min(self._first_tokens + self._num_steps, self._max_model_len)
        self._num_steps += 1
        chunks = [Chunk(r, 1, context, context + 1 == r.prompt_tokens) for r in self._lane.prompting]
        shape = self._rectangle(context, len(chunks)) if self._is_padded else self._own_rows()
        return self._step(shape, blocked_by, len(self._members), left=left, chunks=chunks)

    def _rectangle(self, context: int, num_prompting: int) -> StepShape:
        num_decode = len(self._members) - num_prompting
        return StepShape(
            num_decode=num_decode,
            decode_context_sum=num_decode * context,
            decode_context_sum_sq=num_decode * context * context,
            decode_context_max=context if num_decode else 0,
            prefills=((1, context),) * num_prompting,
            num_sampled=len(self._members),
            num_padding_tokens=num_decode - len(self._lane.running),
        )

    def _form(self, now_ns: int) -> Step:
        chosen, blocked_by = self._take_fitting(now_ns)
        num_sent = self._num_to_send(chosen, blocked_by, now_ns)
        for request in reversed(chosen[num_sent:]):
            self.queue.put_back(request, now_ns)
        if num_sent:
            return self._start(chosen[:num_sent], blocked_by if num_sent == len(chosen) else BlockedBy.ADMISSION)
        return self._step(StepShape(), BlockedBy.ADMISSION if len(self.queue) else BlockedBy.NOTHING, 0)

    def _num_to_send(self, chosen: Sequence[Request], blocked_by: BlockedBy, now_ns: int) -> int:
        """How many of those who could form a batch now are sent; 0: they wait for company."""
        if not chosen:
            return 0
        is_late = now_ns - min(request.queued_ns for request in chosen) >= self._max_queue_delay_ns
        preferred = max((size for size in self._preferred if size <= len(chosen)), default=0)
        if preferred and not (self._max_queue_delay_ns and is_late):
            return preferred
        is_full = blocked_by is not BlockedBy.NOTHING or len(chosen) == self._max_batch_size
        return len(chosen) if is_full or is_late else 0

    def _start(self, chosen: Sequence[Request], blocked_by: BlockedBy) -> Step:
        """Prefill a batch of these, who are out of the queue."""
        prompts = [r.prompt_tokens for r in chosen]
        longest_prompt, longest_answer = max(prompts), max(self._kv.room_for_answer(r) for r in chosen)
        for request in chosen:
            lengths = (request.prompt_tokens, self._kv.room_for_answer(request))
            if self._is_padded:
                lengths = (longest_prompt, longest_answer)
            self._members[request] = None
            self._seat(request, self._kv.blocks_to_reserve(*lengths))
        shape, chunks = self._own_rows(chosen), []
        if self._is_padded:
            self._first_tokens = min(prompts) if self._has_shortest_prompt else longest_prompt
            self._num_steps = 0
            num_tokens = self._first_tokens * len(chosen)
            num_padding = 0 if self._has_shortest_prompt else num_tokens - shape.prefill_tokens
            shape = shape._replace(prefills=((self._first_tokens, 0),) * len(chosen), num_padding_tokens=num_padding)
        if self._has_shortest_prompt:
            first = self._first_tokens
            chunks = [Chunk(r, first, 0, first == r.prompt_tokens) for r in chosen]
        return self._step(shape, blocked_by, len(chosen), chosen, chunks=chunks)

    def _take_fitting(self, now_ns: int) -> tuple[list[Request], BlockedBy]:
        """The head of the queue that fits into an empty pool, taken out of it, and what the next one lacks."""
        chosen: list[Request] = []
        num_blocks = longest_prompt = longest_answer = 0
        self.queue.begin_admission(now_ns)
        while (request := self.queue.head(now_ns)) is not None:
            if len(chosen) == self._max_batch_size:
                return chosen, BlockedBy.SLOTS
            if self._is_padded:
                longest_prompt = max(longest_prompt, request.prompt_tokens)
                longest_answer = max(longest_answer, self._kv.room_for_answer(request))
                num_blocks = (len(chosen) + 1) * self._kv.blocks_to_reserve(longest_prompt, longest_answer)
            else:
                num_blocks += self._kv.blocks_to_reserve(request.prompt_tokens, self._kv.room_for_answer(request))
            if num_blocks > self._kv.usable_blocks:
                self.queue.refused(request)
                return chosen, BlockedBy.KV
            self.queue.take(request, now_ns)
            chosen.append(request)
        return chosen, BlockedBy.ADMISSION if len(self.queue) else BlockedBy.NOTHING
