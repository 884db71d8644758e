"""Orca: iteration-level FCFS with whole prompts and reserved KV.

Requests join and leave the batch at every iteration. Those who run go on running; the earliest arrivals, or
whoever another queue order puts first, join while there is a place in the batch and room for all the KV that
they can ever need. The first one that finds none stops the admission, so nobody overtakes. A prompt runs whole,
in one iteration with the decodes of others.

Source: Yu et al. 2022, "Orca: A Distributed Serving System for Transformer-Based Generative Models",
Algorithm 1, with one worker (a batch's results are in before the next one is chosen). Its `max_bs` is
`max_batch_size`, its `n_slots` are `num_gpu_blocks` × `block_size`. With `reserve: max_model_len` it is
what Kwon et al. 2023 (PagedAttention) call Orca (Max).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sim.policies.base import About, Axes
from sim.policies.whole_prompt import WholePromptOptions, WholePromptPolicy
from sim.request import Request, Status
from sim.step import BlockedBy, Finished, Step


class OrcaOptions(WholePromptOptions):
    """What Orca can be told."""

    policy: Literal["orca"] = Field(description="iteration-level batching, first come first served")


class Orca(WholePromptPolicy):
    """Algorithm 1: the waiting queue holds its pool's INITIATION requests, the running batch the others."""

    Options = OrcaOptions
    about = About(
        batching="iteration-level batching: requests join and leave at every step, prompts run whole",
        copies="Orca (Yu et al. 2022), Algorithm 1, with one worker",
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

    def cancel(self, request: Request) -> bool:
        """Drop the request wherever it is: always possible."""
        if request.status is Status.WAITING:
            self.queue.remove(request)
        else:
            self._drop_from_batch(request)
        self._release(request)
        return True

    def plan(self, now_ns: int) -> Step:
        """Everybody who runs decodes; whoever fits behind them prefills."""
        self._planned_ns = now_ns
        admitted, blocked_by = self._select(now_ns)
        shape = self._own_rows(admitted)
        return self._step(shape, blocked_by, len(self._running) + len(admitted), admitted)

    def update(self, step: Step) -> Finished:
        """Those whose answer is complete leave, and their stretch is free for the next plan."""
        finished, departed = self._take_in(step)
        for request in finished:
            self._release(request)
        return Finished(finished, finished, departed)

    def running(self) -> list[Request]:
        """In order of admission, those that prefill included."""
        return [*self._running, *self._prefilling]

    @property
    def num_unfinished(self) -> int:
        """Waiting and running requests."""
        return len(self.queue) + len(self._running) + len(self._prefilling)

    def _select(self, now_ns: int) -> tuple[list[Request], BlockedBy]:
        """Admit from the head of the queue until one does not fit; also says what it lacked."""
        admitted: list[Request] = []
        queue = self.queue
        queue.begin_admission(now_ns)
        while len(queue):
            if len(self._running) + len(admitted) == self._max_batch_size:
                return admitted, BlockedBy.SLOTS
            request = queue.head(now_ns)
            if request is None:
                return admitted, BlockedBy.ADMISSION
            num_blocks = self._kv.blocks_to_reserve(request.prompt_tokens, request.max_tokens)
            if num_blocks > self._kv.free_blocks:
                queue.refused(request)
                return admitted, BlockedBy.KV
            queue.take(request, now_ns)
            self._seat(request, num_blocks)
            admitted.append(request)
        return admitted, BlockedBy.NOTHING

    def _steady_obstacle(self) -> BlockedBy | None:
        queue = self.queue
        if not len(queue):
            return BlockedBy.NOTHING
        if not queue.leaves_no_trace:
            return None
        if len(self._running) == self._max_batch_size:
            return BlockedBy.SLOTS
        if not queue.is_fixed or queue.next_change_ns(self._planned_ns) is not None:
            return None
        request = queue.head(self._planned_ns)
        if request is None:
            return BlockedBy.ADMISSION
        num_blocks = self._kv.blocks_to_reserve(request.prompt_tokens, request.max_tokens)
        return BlockedBy.KV if num_blocks > self._kv.free_blocks else None
