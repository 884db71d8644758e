"""The tables of a run: one row per iteration, chunk, request and segment; none per token.

Everything that is ever reported is a function of these tables. Rows are appended to flat integer buffers
(8 bytes a value) and become columns when the run is over.

Token times are not stored. A *tick* counts a lane's iterations that decode. A *segment* says that a request
got a token from the last chunk of its prefill in `iteration` (NEVER: it goes on decoding after a step that
left it out) and then one token in each of `num_ticks` ticks of `lane` from `first_tick` on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from sim.errors import InvariantError
from sim.request import NEVER, Request
from sim.step import FEW_STEPS, NOTHING_ENDED, Finished, SteadyRun, SteadyTimes, Step

ITERATION_COLUMNS = (
    "lane",
    "start_ns",
    "end_ns",
    "host_ns",
    "num_decode",
    "decode_context_sum",
    "decode_context_sum_sq",
    "decode_context_max",
    "num_prefills",
    "prefill_tokens",
    "num_sampled",
    "num_padding_tokens",
    "num_swapped_blocks",
    "num_new_requests",
    "num_running",
    "num_waiting",
    "used_blocks",
    "num_new_blocks",
    "live_tokens",
    "num_preempted",
    "blocked_by",
)
CHUNK_COLUMNS = ("iteration", "request", "num_tokens", "context")
REQUEST_COLUMNS = (
    "request",
    "class_index",
    "arrival_ns",
    "prompt_tokens",
    "output_tokens",
    "queued_ns",
    "admitted_iteration",
    "admitted_ns",
    "first_token_iteration",
    "first_token_ns",
    "finished_iteration",
    "finished_ns",
    "released_ns",
    "cancelled_ns",
    "num_preemptions",
    "recomputed_tokens",
    "cached_prompt_tokens",
    "outcome",
    "turned_away_by",
)
_EVENTS = {"admitted_ns": "start_ns", "first_token_ns": "end_ns", "finished_ns": "end_ns"}
"""Times that follow from the iteration in which it happened, and its edge."""
SEGMENT_COLUMNS = ("request", "iteration", "lane", "first_tick", "num_ticks")


_ROWS_IN_CACHE = 4096
"""So many rows are turned into columns at a time: each row is read from memory once, not once a column."""


class Table:
    """Rows of integers under fixed column names, packed one after the other and read as columns."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self.rows = bytearray()
        """To be added to, `rows += pack(...)`: a method that does it would cost more than the row."""
        self.pack = Struct(f"{len(self.columns)}q").pack
        """One row (its values in column order) as bytes."""

    def append_columns(self, columns: Mapping[str, NDArray[np.int64] | int], num_rows: int) -> None:
        """Append many rows given by column; a column that is not named is 0."""
        rows = np.zeros((num_rows, len(self.columns)), dtype=np.int64)
        for name, values in columns.items():
            rows[:, self.columns.index(name)] = values
        self.rows += rows.tobytes()

    def __len__(self) -> int:
        return len(self.rows) // (8 * len(self.columns))

    def take_columns(self) -> dict[str, NDArray[np.int64]]:
        """Column name -> int64 array, each the caller's own. The rows are gone afterwards, to save memory."""
        columns = self._copied_columns()
        self.rows.clear()
        return columns

    def _copied_columns(self) -> dict[str, NDArray[np.int64]]:
        rows = np.frombuffer(self.rows, dtype=np.int64).reshape(-1, len(self.columns))
        columns = {name: np.empty(len(rows), dtype=np.int64) for name in self.columns}
        for start in range(0, len(rows), _ROWS_IN_CACHE):
            block = slice(start, start + _ROWS_IN_CACHE)
            for index, values in enumerate(columns.values()):
                values[block] = rows[block, index]
        return columns


Columns = dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Tables:
    """The finished tables of one engine: column name -> int64 array."""

    iterations: Columns
    """In order of completion. Only iterations that computed something."""
    chunks: Columns
    """One row per prefill chunk; `iteration` is a row of `iterations`, `context` what was in cache before."""
    requests: Columns
    """One row per request that arrived, sorted by `request`. `output_tokens` are those that its client
    received; `recomputed_tokens` counts tokens whose KV was lost to preemptions; `outcome` is an `Outcome`,
    `turned_away_by` the number of the reason why the engine did not serve it (`RunFacts.turn_away_reasons`).
    Where clients send calls with several prompts there is a further column `call` (`Traffic.call`)."""
    segments: Columns
    passes: Columns = field(default_factory=dict)
    """One row per pass of each iteration, where iterations run as several (`PassRecorder`). Only until the run is
    priced: it is not among what is saved."""


class Recorder:
    """Writes the tables of one engine. Called once per completed step and once per end of a request."""

    def __init__(self) -> None:
        self.iterations = Table(ITERATION_COLUMNS)
        self.chunks = Table(CHUNK_COLUMNS)
        self.requests = Table([name for name in REQUEST_COLUMNS if name not in _EVENTS])
        self.segments = Table(SEGMENT_COLUMNS)
        self._num_iterations = 0
        self._pack_iteration, self._iteration_rows = self.iterations.pack, self.iterations.rows
        self._pack_chunk, self._chunk_rows = self.chunks.pack, self.chunks.rows
        self._pack_segment, self._segment_rows = self.segments.pack, self.segments.rows
        self._pack_request, self._request_rows = self.requests.pack, self.requests.rows
        self._lane_ticks: dict[int, int] = defaultdict(int)
        self._tables: Tables | None = None
        self._num_preempted = 0
        """Since the last iteration that has a row."""

    def record(self, step: Step, start_ns: int, end_ns: int, host_ns: int, finished: Finished) -> None:
        """One completed, non-empty step and what its results ended. Mutates the recorder's marks on requests."""
        iteration = self._num_iterations
        self._num_iterations = iteration + 1
        chunks, lane = step.chunks, step.lane
        num_decode, context_sum, context_sum_sq, context_max, prefills, sampled, padding, swapped, new = step.shape
        prefill_tokens = 0
        if chunks or step.joined or step.left or step.admitted or step.preempted:
            self._record_changes(step, iteration)
            for num_tokens, _ in prefills:
                prefill_tokens += num_tokens
        if num_decode:
            self._lane_ticks[lane] += 1
        rows, pack = self._iteration_rows, self._pack_iteration
        rows += pack(
            lane,
            start_ns,
            end_ns,
            host_ns,
            num_decode,
            context_sum,
            context_sum_sq,
            context_max,
            len(chunks),
            prefill_tokens,
            sampled,
            padding,
            swapped,
            new,
            step.num_running,
            step.num_waiting,
            step.used_blocks,
            step.num_new_blocks,
            step.live_tokens,
            self._num_preempted,
            step.blocked_by,
        )
        self._num_preempted = 0
        if finished is NOTHING_ENDED:
            return
        for request in finished.finished:
            request.finished_iteration = iteration
            self._close_segment(request)
        for request in finished.released:
            self.end(request, end_ns)

    def record_steady(self, run: SteadyRun, times: SteadyTimes, num_steps: int) -> None:
        """The first `num_steps` steps of a run in which the same requests decode and nothing else happens."""
        self._num_iterations += num_steps
        self._lane_ticks[0] += num_steps
        if num_steps <= FEW_STEPS:
            self._record_few(run, times, num_steps)
            return
        shape, index = run.shape, np.arange(num_steps, dtype=np.int64)
        context_sum = shape.decode_context_sum + shape.num_decode * index
        num_new_blocks = np.array(run.num_new_blocks[:num_steps])
        columns: dict[str, NDArray[np.int64] | int] = {
            "start_ns": np.asarray(times.start_ns[:num_steps]),
            "end_ns": np.asarray(times.end_ns[:num_steps]),
            "host_ns": times.host_ns,
            "num_decode": shape.num_decode,
            "decode_context_sum": context_sum,
            "decode_context_sum_sq": shape.decode_context_sum_sq
            + index * (2 * shape.decode_context_sum + shape.num_decode * index),
            "decode_context_max": shape.decode_context_max + index,
            "num_sampled": shape.num_sampled,
            "num_running": run.num_running,
            "num_waiting": run.num_waiting,
            "used_blocks": run.used_blocks + np.cumsum(num_new_blocks),
            "num_new_blocks": num_new_blocks,
            "live_tokens": run.live_tokens + shape.num_decode * (index + 1),
            "blocked_by": run.blocked_by,
        }
        self.iterations.append_columns(columns, num_steps)

    def _record_few(self, run: SteadyRun, times: SteadyTimes, num_steps: int) -> None:
        num_decode, context_sum, context_sum_sq, context_max, _, num_sampled, _, _, _ = run.shape
        used_blocks, live_tokens = run.used_blocks, run.live_tokens
        rows, pack = self._iteration_rows, self._pack_iteration
        for start_ns, end_ns, num_new_blocks in zip(
            times.start_ns[:num_steps], times.end_ns, run.num_new_blocks, strict=False
        ):
            used_blocks += num_new_blocks
            live_tokens += num_decode
            rows += pack(
                0,
                start_ns,
                end_ns,
                times.host_ns,
                num_decode,
                context_sum,
                context_sum_sq,
                context_max,
                0,
                0,
                num_sampled,
                0,
                0,
                0,
                run.num_running,
                run.num_waiting,
                used_blocks,
                num_new_blocks,
                live_tokens,
                0,
                run.blocked_by,
            )
            context_sum_sq += 2 * context_sum + num_decode
            context_sum += num_decode
            context_max += 1

    def end(self, request: Request, released_ns: int) -> None:
        """The last word on a request, with the outcome that it carries. Appends its row.

        `released_ns` is when its KV was free; NEVER for one that was refused at the door or holds it still.
        """
        if request.segment_lane != NEVER:
            self._close_segment(request)
        request.is_recorded = True
        rows, pack = self._request_rows, self._pack_request
        rows += pack(
            request.index,
            request.class_index,
            request.arrival_ns,
            request.prompt_tokens,
            request.num_delivered_tokens,
            request.queued_ns,
            request.admitted_iteration,
            request.first_token_iteration,
            request.finished_iteration,
            released_ns,
            request.cancelled_ns,
            request.num_preemptions,
            request.recomputed_tokens,
            request.cached_prompt_tokens,
            request.outcome,
            request.turned_away_by,
        )

    def tables(self) -> Tables:
        """All rows as columns. Ends the recording: the rows themselves are given up, and each call returns the same."""
        if self._tables is None:
            self._tables = self._take_tables()
        return self._tables

    def _take_tables(self) -> Tables:
        requests = self.requests.take_columns()
        order = np.argsort(requests["request"], kind="stable")
        for name, values in requests.items():
            requests[name] = values[order]
        iterations = self.iterations.take_columns()
        for event_ns, edge_ns in _EVENTS.items():
            iteration = requests[f"{event_ns.removesuffix('_ns')}_iteration"]
            requests[event_ns] = np.full(len(order), NEVER, dtype=np.int64)
            happened = iteration != NEVER
            requests[event_ns][happened] = iterations[edge_ns][iteration[happened]]
        return Tables(
            iterations=iterations,
            chunks=self.chunks.take_columns(),
            requests={name: requests[name] for name in REQUEST_COLUMNS},
            segments=self.segments.take_columns(),
        )

    def record_preemptions(self, step: Step) -> None:
        """The victims of a completed step, which may be empty: then the next iteration's row counts them."""
        self._num_preempted += len(step.preempted)
        for victim, _, num_lost_tokens in step.preempted:
            if victim.is_recorded:
                continue
            victim.num_preemptions += 1
            victim.recomputed_tokens += num_lost_tokens
            self._close_segment(victim)

    def _record_changes(self, step: Step, iteration: int) -> None:
        lane = step.lane
        if step.preempted:
            self.record_preemptions(step)
        for request, num_cached_tokens, is_resumed in step.admitted:
            if not is_resumed:
                request.admitted_iteration = iteration
                request.cached_prompt_tokens = num_cached_tokens
        for request in step.left:
            if request.segment_lane == lane:
                self._close_segment(request)
        for request in step.joined:
            if not request.is_recorded:
                if request.segment_first_tick != NEVER or request.segment_lane not in (lane, NEVER):
                    self._close_segment(request)
                request.segment_lane = lane
                request.segment_first_tick = self._lane_ticks[lane]
        rows, pack = self._chunk_rows, self._pack_chunk
        for chunk in step.chunks:
            request = chunk.request
            rows += pack(iteration, request.index, chunk.num_tokens, chunk.context)
            if chunk.is_last and not request.is_recorded:
                # The prefill is complete: its last chunk yields a token and opens a segment.
                if request.first_token_iteration == NEVER:
                    request.first_token_iteration = iteration
                request.segment_iteration = iteration
                request.segment_lane = lane
                request.segment_first_tick = NEVER

    def num_tokens(self, request: Request) -> int:
        """Tokens that its client has received by the end of the last recorded step (all of them, if streamed)."""
        is_sampled = request.segment_iteration != NEVER
        return request.num_delivered_tokens + is_sampled + self._num_ticks_of_open_segment(request)

    def _close_segment(self, request: Request) -> None:
        """Write the row. Tokens of a client that has left count no more: they were computed for nobody."""
        if request.segment_lane == NEVER:
            return
        iteration, num_ticks = request.segment_iteration, self._num_ticks_of_open_segment(request)
        if num_ticks < 0:
            raise InvariantError(f"{request} has a segment of {num_ticks} ticks")
        rows, pack = self._segment_rows, self._pack_segment
        rows += pack(request.index, iteration, request.segment_lane, request.segment_first_tick, num_ticks)
        if request.cancelled_ns == NEVER:
            request.num_delivered_tokens += num_ticks + (iteration != NEVER)
        request.segment_iteration = request.segment_lane = request.segment_first_tick = NEVER

    def _num_ticks_of_open_segment(self, request: Request) -> int:
        first_tick = request.segment_first_tick
        return 0 if first_tick == NEVER else self._lane_ticks[request.segment_lane] - first_tick
