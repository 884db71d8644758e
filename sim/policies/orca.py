"""Orca: iteration-level FCFS with whole prompts and reserved KV.

Requests join and leave the batch at every iteration. Those who run go on running; the earliest arrivals, or
whoever another queue order puts first, join while there is a place in the batch and room for all the KV that
they can ever need. The first one that finds none stops the admission, so nobody overtakes. A prompt runs whole,
in one iteration with the decodes of others.

With several workers, the stages of a pipeline, as many batches are in flight. They take turns, and whoever is in
one is not chosen for another: since nobody overtakes, a request stays in its batch from its first iteration to its
last. A batch without members still takes its turn, in no time.

Requests of different lengths share an iteration because attention alone is computed request by request (selective
batching). Without it a pass takes only requests that make up a rectangle: prompts of one length, or answers that
are at the same place. Who is in an iteration is then the same, and what it costs is the sum of its passes, so that
what selective batching gains can be read.

Source: Yu et al. 2022, "Orca: A Distributed Serving System for Transformer-Based Generative Models",
Algorithm 1, and section 3.2 for selective batching. Its `max_bs` is `max_batch_size`, its `n_slots` are
`num_gpu_blocks` × `block_size`. What Kwon et al. 2023 (PagedAttention) call Orca (Max), (Pow2) and (Oracle) is
`allocator: buddy` with `reserve: max_model_len`, `power_of_two` and `output_tokens`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from sim.kv.buddy import BuddyKV
from sim.kv.contiguous import ContiguousKV
from sim.options import Count
from sim.policies.base import About, Axes, EngineLimits
from sim.policies.whole_prompt import WholePromptOptions, WholePromptPolicy
from sim.request import Request, Status
from sim.step import BlockedBy, Finished, Pass, PassesShape, SteadyRun, Step, StepShape


class OrcaOptions(WholePromptOptions):
    """What Orca can be told."""

    policy: Literal["orca"] = Field(description="iteration-level batching, first come first served")
    n_workers: Count = Field(default=1, description="pipeline stages, each with a batch of max_batch_size in flight")
    selective_batching: bool = Field(
        default=True,
        description="true: any requests share the passes of an iteration; false: only those in the same phase and of "
        "the same length do, and an iteration takes the sum of its passes",
    )
    allocator: Literal["ideal", "buddy"] = Field(
        default="ideal", description="how stretches of KV are found: ideal loses nothing in holes between them"
    )


class Orca(WholePromptPolicy):
    """Algorithm 1: the waiting queue holds its pool's INITIATION requests, the running batch the others."""

    Options = OrcaOptions
    about = About(
        batching="iteration-level batching: requests join and leave at every step, prompts run whole",
        copies="Orca (Yu et al. 2022), Algorithm 1",
        proof="whole logs worked out by hand from the paper, not logs of the real system",
        note="KV is reserved for the longest answer, so nobody is preempted",
    )
    own_axes = Axes(
        "every step",
        "prefills and decodes, whole prompts",
        "in order of arrival",
        "max_tokens",
        "never happens",
        "nobody",
        "stops admission",
        "always",
        "fcfs",
        "requests, KV slots",
    )

    def __init__(self, options: WholePromptOptions, limits: EngineLimits) -> None:
        super().__init__(options, limits)
        assert isinstance(options, OrcaOptions)
        self.max_in_flight = self.num_stages = len(self._lanes)
        self.runs_in_passes = not options.selective_batching
        self._num_planned = 0

    @classmethod
    def pool(cls, options: WholePromptOptions) -> type[ContiguousKV]:
        assert isinstance(options, OrcaOptions)
        return BuddyKV if options.allocator == "buddy" else ContiguousKV

    @classmethod
    def num_lanes(cls, options: WholePromptOptions) -> int:
        assert isinstance(options, OrcaOptions)
        return options.n_workers

    def cancel(self, request: Request) -> bool:
        """Drop the request wherever it is: always possible."""
        if request.status is Status.WAITING:
            self.queue.remove(request)
        else:
            self._lane = next(x for x in self._lanes if request in x.running or request in x.prefilling)
            self._drop_from_batch(request)
        self._release(request)
        return True

    def plan(self, now_ns: int) -> Step:
        """Everybody who runs decodes; whoever fits behind them prefills."""
        self._planned_ns = now_ns
        self._lane = self._lanes[self._num_planned % len(self._lanes)]
        self._num_planned += 1
        admitted, blocked_by = self._select(now_ns)
        shape = self._own_rows(admitted)
        if self.runs_in_passes:
            shape = self._in_passes(shape, admitted)
        return self._step(shape, blocked_by, self._num_running + len(admitted), admitted)

    def update(self, step: Step) -> Finished:
        """Those whose answer is complete leave, and their stretch is free for the next plan."""
        self._lane = self._lanes[step.lane]
        finished, departed = self._take_in(step)
        for request in finished:
            self._release(request)
        return Finished(finished, finished, departed)

    def running(self) -> list[Request]:
        """Batch by batch in order of admission, those that prefill included."""
        return [request for lane in self._lanes for request in (*lane.running, *lane.prefilling)]

    @property
    def num_unfinished(self) -> int:
        """Waiting and running requests."""
        return len(self.queue) + self._num_running

    @property
    def _num_running(self) -> int:
        return sum([len(lane.running) + len(lane.prefilling) for lane in self._lanes])

    def _select(self, now_ns: int) -> tuple[list[Request], BlockedBy]:
        """Admit from the head of the queue until one does not fit; also says what it lacked."""
        admitted: list[Request] = []
        queue = self.queue
        queue.begin_admission(now_ns)
        while len(queue):
            if len(self._lane.running) + len(admitted) == self._max_batch_size:
                return admitted, BlockedBy.SLOTS
            request = queue.head(now_ns)
            if request is None:
                return admitted, BlockedBy.ADMISSION
            num_blocks = self._kv.blocks_to_reserve(request.prompt_tokens, self._kv.room_for_answer(request))
            if not self._kv.fits(num_blocks):
                queue.refused(request)
                return admitted, BlockedBy.KV
            queue.take(request, now_ns)
            self._seat(request, num_blocks)
            admitted.append(request)
        return admitted, BlockedBy.NOTHING

    def _in_passes(self, shape: StepShape, admitted: Sequence[Request]) -> PassesShape:
        """The same rows in as few passes as there are phases and lengths among them. O(batch)."""
        running = self._lane.running
        prompts = Counter(request.prompt_tokens for request in admitted)
        contexts = Counter(running.context(request) for request in running)
        split = PassesShape(*shape)
        split.passes = (
            *(Pass(True, number, length) for length, number in prompts.items()),
            *(Pass(False, number, length) for length, number in contexts.items()),
        )
        return split

    def steady_run(self, min_steps: int, max_steps: int) -> SteadyRun | None:
        if len(self._lanes) > 1 or self.runs_in_passes:
            return None
        return super().steady_run(min_steps, max_steps)

    def _steady_obstacle(self) -> BlockedBy | None:
        queue = self.queue
        if not len(queue):
            return BlockedBy.NOTHING
        if not queue.leaves_no_trace:
            return None
        if len(self._lane.running) == self._max_batch_size:
            return BlockedBy.SLOTS
        if not queue.is_fixed or queue.next_change_ns(self._planned_ns) is not None:
            return None
        request = queue.head(self._planned_ns)
        if request is None:
            return BlockedBy.ADMISSION
        num_blocks = self._kv.blocks_to_reserve(request.prompt_tokens, self._kv.room_for_answer(request))
        return None if self._kv.fits(num_blocks) else BlockedBy.KV
