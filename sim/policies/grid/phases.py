"""What the steps of the grid's engines consist of: decodes, prefills, admissions, returns from host memory.

Each phase adds to a `Draft` and changes who runs and who has which blocks. Which phases a step has, and in
which order, is the composition's matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from sim.batch import RunningBatch
from sim.kv.base import blocks_for
from sim.kv.counted import CountedCache
from sim.policies.base import Policy
from sim.policies.grid.config import GridConfig
from sim.policies.grid.draft import Draft, GridState
from sim.policies.grid.head_of_line import MISFITS
from sim.policies.grid.members import Members
from sim.policies.grid.pacing import Always, Situation, build_pacing
from sim.policies.grid.pressure import relieve
from sim.policies.grid.reservation import Reservation
from sim.policies.grid.victims import Standing, choose, put_back
from sim.queues.base import QueueOrder, Setting, build_order
from sim.request import NEVER, Request, Status
from sim.step import Admission, BlockedBy


class Phases(Policy):
    """An engine's state and the phases of its steps, without the step itself."""

    def __init__(self, config: GridConfig) -> None:
        limits, num_stages = config.limits, config.num_stages
        self.config = config
        self.pressure = config.pressure
        self.may_swap = config.pressure == "swap"
        self.max_in_flight = self.num_stages = num_stages
        self.kv = self._build_kv()
        self.num_cpu_blocks = self.free_cpu_blocks = config.num_cpu_blocks
        self._block_size = limits.block_size
        self._reservation = Reservation(
            config.reservation,
            limits.block_size,
            limits.max_model_len,
            config.watermark_blocks,
            config.needs_free_block and config.pressure != "pause",
        )
        kv_tokens = limits.num_gpu_blocks * limits.block_size
        self.queue = build_order(config.queue_order, Setting(limits.class_names, config.max_num_seqs, kv_tokens))
        self._skips = config.head_of_line == "skip"
        self.follows_arrival_order = self.queue.is_arrival_order and not self._skips
        self.deadlines = self.queue if self.queue.drops_late else None
        self.pacing = build_pacing(config.pacing, limits.predictor, plans_ahead=False, num_stages=num_stages)
        self.reads_clock = self.pacing.reads_clock or self.pacing.reads_batch or self.queue.reads_clock
        self._is_unpaced = isinstance(self.pacing, Always)
        prepares = type(self.queue).begin_admission is not QueueOrder.begin_admission
        self.must_try_to_admit = prepares or not self.pacing.is_steady
        """Whether an admission changes something although nobody waits."""
        self._swapped: deque[Request] = deque()
        self.members = Members(limits.block_size, num_stages, self.queue, keeps_arrival_order=config.sorts_running)

    def _build_kv(self) -> CountedCache:
        return CountedCache(self.config.limits.num_gpu_blocks, self.config.limits.block_size)

    # ------------------------------------------------------------------ the door, the queue, the exit

    def longest_answer(self, request: Request) -> int:
        """Tokens after which the engine ends the answer, whatever the model says. Pure."""
        room = self.config.limits.max_model_len + self.config.longest_overrun - request.prompt_tokens
        return min(request.max_tokens, room)

    def never_fits(self, request: Request) -> str | None:
        limit, longest_answer = self.config.prompt_limit, self.longest_answer(request)
        if not 1 <= request.prompt_tokens <= limit:
            return f"its prompt of {request.prompt_tokens} tokens is not between 1 and {limit}"
        if longest_answer < 1:
            return f"its prompt leaves no room for an answer within {self.config.limits.max_model_len} tokens"
        return self._reservation.never_fits(request, longest_answer, self.kv.usable_blocks)

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        request.num_target_tokens = min(request.output_tokens, self.longest_answer(request))
        request.policy_state = GridState()
        self.queue.add(request, request.queued_ns)

    def cancel(self, request: Request) -> bool:
        state: GridState = request.policy_state
        if request in self.members:
            self.unseat(request)
        elif state.num_cpu_blocks:
            self._swapped.remove(request)
        else:
            self.queue.remove(request)
        self.end(request)
        return True

    def unseat(self, request: Request) -> None:
        """Take a request out of those that run and bring its counters up to date. Its blocks stay its own."""
        self.members.unseat(request)

    def end(self, request: Request) -> None:
        """The request is over: its blocks are free, on the GPU and in host memory."""
        state: GridState = request.policy_state
        if request.status is Status.RUNNING or state.num_cpu_blocks:
            self.queue.released(request, request.num_output_tokens)
        request.status = Status.OVER
        self.release(request)
        self.free_cpu_blocks += state.num_cpu_blocks
        state.num_cpu_blocks = 0

    def release(self, request: Request) -> None:
        """Give back the blocks of a request that runs no more."""
        self.kv.free(request)

    def requeue(self, victim: Request, draft: Draft) -> None:
        """A victim waits again: now, or when the step is planned."""
        if self.config.requeues_at_once:
            self.put_back(victim, draft.now_ns)
        else:
            draft.to_requeue.append(victim)

    def put_back(self, victim: Request, now_ns: int) -> None:
        """A victim takes its place in the queue."""
        put_back(self.queue, victim, self.config.victim_goes_to, now_ns)

    @property
    def num_swapped(self) -> int:
        """How many are swapped out."""
        return len(self._swapped)

    @property
    def needs_free_block(self) -> bool:
        """Whether a decode wants a free block even when its last block has room."""
        return self._reservation.needs_free_block

    # ------------------------------------------------------------------ phases

    def decode(self, draft: Draft) -> None:
        """Everybody who can decode does. Where blocks are short, victims make room, last ones first."""
        if not self.decode_all(draft):
            self._decode_one_by_one(draft)

    def decode_all(self, draft: Draft) -> bool:
        """Let all decode at once, where nobody can lack a block for it. False, and nothing changed, where one might."""
        num_new_blocks = self.give_all_a_slot(draft.lane)
        if num_new_blocks is None:
            return False
        num_decode = self.members.lanes[draft.lane].num_decode
        draft.num_new_blocks += num_new_blocks
        draft.decodes = num_decode > 0
        draft.num_tokens += num_decode
        return True

    def give_all_a_slot(self, lane: int) -> int | None:
        """Blocks for the next token of all who decode: how many they took. None, and nothing changed: one may lack."""
        batch = self.members.lanes[lane]
        if self.members.idle or self.num_stages > 1:
            return None
        growing = self._growing(batch)
        if batch.num_decode and len(growing) + self.needs_free_block > self.kv.free_blocks:
            return None
        if growing:
            self.kv.allocate_each(growing)
        if self.config.enable_prefix_caching:
            self._publish(batch.at_context(self._block_size - 1))
        return len(growing)

    def _growing(self, batch: RunningBatch) -> Collection[Request]:
        """Who of those that decode needs a block for the token to come. A view: use it before anybody moves. Pure."""
        if self.config.reservation == "prompt":
            return batch.at_context(0)
        if batch.context_max < self.config.limits.max_model_len:
            return ()
        return [r for r in batch.at_context(0) if r.num_blocks * self._block_size <= batch.context(r)]

    def _decode_one_by_one(self, draft: Draft) -> None:
        rest = deque(self.members)
        while rest:
            request = rest.popleft()
            if request.policy_state.is_decoding and not self._is_in_flight(request):
                self.decode_one(request, rest, draft)

    def _is_in_flight(self, request: Request) -> bool:
        return self.num_stages > 1 and self.members.is_in_flight(request)

    def decode_one(self, request: Request, rest: deque[Request], draft: Draft) -> bool:
        """Give a request its slot, preempting where none is free. Mutates `rest`; whether it decodes."""
        if not self.make_room(request, rest, draft):
            return False
        request.num_blocks = self.members.num_blocks(request)
        needs_block = blocks_for(self.members.context(request) + 1, self._block_size) > request.num_blocks
        if needs_block:
            self.kv.allocate(request, 1)
            draft.num_new_blocks += 1
        draft.served[request] = int(needs_block)
        self._publish([request])
        self.members.join_lane(request, draft.lane)
        draft.decodes = True
        draft.num_tokens += 1
        return True

    def _publish(self, requests: Iterable[Request]) -> None:
        """These decode: with prefix caching, blocks that their next tokens fill are known from now on."""

    def make_room(self, request: Request, rest: deque[Request], draft: Draft) -> bool:
        """Preempt until a request has a slot or is a victim itself; whether it has one now.

        `rest`: those who run and were not yet visited in this step, in order. Mutates it.
        """
        while not self._has_slot(request):
            if self.pressure == "pause":
                if request.policy_state.is_decoding:
                    self.members.leave_out(request, draft)
                draft.paused.append(request)
                return False
            victim = self._choose_victim(request, rest, draft)
            relieve(self, victim, request, draft)
            if victim is request:
                return False
        return True

    def _choose_victim(self, request: Request, rest: deque[Request], draft: Draft) -> Request:
        """Who makes room for a request; by the engines' own rule the end of `rest`. Mutates `rest` and the draft."""
        rule = self.config.victim
        if rule == "own":
            return rest.pop() if rest else request
        victim = choose(rule, [self._standing(member, request) for member in self.members])
        if victim in rest:
            rest.remove(victim)
        else:
            self._take_out(victim, draft)
        return victim

    def _standing(self, member: Request, requester: Request) -> Standing:
        return Standing(
            member,
            self.members.num_output_tokens(member),
            member.num_blocks,
            member.policy_state.is_decoding,
            member is requester,
        )

    def _take_out(self, victim: Request, draft: Draft) -> None:
        """The decode of a victim goes back to the budget; in no step do prefills come before it. Mutates the draft."""
        if victim in draft.served:
            draft.num_new_blocks -= draft.served.pop(victim)
            draft.num_tokens -= 1

    def _has_slot(self, request: Request) -> bool:
        if self._reservation.needs_free_block:
            return self.kv.free_blocks > 0
        room = self.members.num_blocks(request) * self._block_size
        return self.kv.free_blocks > 0 or self.members.context(request) < room

    def continue_prefills(self, draft: Draft) -> None:
        """Those who run and are not through their prefill get what is left of the budget, in their order."""
        waiting_for_more = [r for r in self.members.prefilling if not self._is_in_flight(r)]
        for request in waiting_for_more:
            left = request.policy_state.num_to_prefill - request.num_computed_tokens
            num_tokens = self.cut(left, self.budget_left(draft, request.num_computed_tokens))
            if num_tokens > 0:
                self.prefill(request, num_tokens, draft)
        self.members.move_to_end(waiting_for_more)

    def prefill(self, request: Request, num_tokens: int, draft: Draft) -> None:
        """A piece of the request's prefill runs in this step."""
        draft.chunks.append((request, num_tokens))
        draft.num_tokens += num_tokens
        request.policy_state.last_pass_ns = draft.now_ns

    def swap_in(self, draft: Draft) -> None:
        """Bring back those who are swapped out, first come first served, while they fit."""
        while self._swapped:
            request = self._swapped[0]
            if self.touched_blocks(request) > self.kv.usable_blocks:
                self._swapped.popleft()
                self._drop(request, draft)
                continue
            draft.blocked_by = self.obstacle_to_return(request, draft)
            if draft.blocked_by is not BlockedBy.NOTHING:
                return
            self._swapped.popleft()
            self._bring_back(request, draft)

    def obstacle_to_return(self, request: Request, draft: Draft) -> BlockedBy:
        """What keeps the first of those who are swapped out there. Pure."""
        if len(self.members) >= self.config.max_num_seqs:
            return BlockedBy.SLOTS
        if not 0 < self._tokens_to_return(request, draft) <= self.budget_left(draft, request.num_computed_tokens):
            return BlockedBy.BUDGET
        if self.touched_blocks(request) > self.kv.free_blocks - self._reservation.watermark_blocks:
            return BlockedBy.KV
        return BlockedBy.NOTHING

    def _bring_back(self, request: Request, draft: Draft) -> None:
        state: GridState = request.policy_state
        draft.swapped_in.append(request)
        draft.num_swapped_blocks += state.num_cpu_blocks
        num_blocks = self.touched_blocks(request)
        self.kv.allocate(request, num_blocks)
        draft.num_new_blocks += num_blocks
        self.free_cpu_blocks += state.num_cpu_blocks
        state.num_cpu_blocks = 0
        request.status = Status.RUNNING
        self.members.seat(request)
        if state.is_decoding:
            self.members.join_lane(request, draft.lane)
            draft.decodes = True
            draft.num_tokens += 1
        else:
            self.members.prefilling[request] = None
            self.prefill(request, self._tokens_to_return(request, draft), draft)

    def _tokens_to_return(self, request: Request, draft: Draft) -> int:
        left = self.tokens_left(request)
        if self.config.chunked and self.config.returns_cut_prefills:
            return min(left, self.budget_left(draft, request.num_computed_tokens))
        return left

    def admit(self, draft: Draft, num_running: int | None = None) -> None:
        """Bring in waiting requests, from the head, until one does not fit or its time has not come.

        Where the engine skips the one that does not fit, those behind it have their turn.
        `num_running`: what the pacing rule takes for the number of those who run, if not what it is.
        """
        if not (self.queue or self.must_try_to_admit):
            return
        if num_running is None:
            num_running = len(self.members)
        self.queue.begin_admission(draft.now_ns)
        while True:
            candidate = self.queue.head(draft.now_ns) if self.pacing.reads_batch else None
            if not (self._is_unpaced or self._pacing_opens(candidate, num_running, draft)):
                draft.blocked_by = BlockedBy.ADMISSION
                return
            head = self.queue.head(draft.now_ns)
            if head is None:
                if len(self.queue):
                    draft.blocked_by = BlockedBy.ADMISSION
                return
            num_tokens = self.tokens_for(head, draft)
            if self.is_hopeless(head, num_tokens):
                self.queue.remove(head)
                self._drop(head, draft)
                continue
            draft.blocked_by = self.obstacle(head, num_tokens, draft)
            if draft.blocked_by is not BlockedBy.NOTHING:
                self.queue.refused(head)
                if self._skips and draft.blocked_by in MISFITS and not draft.preempted:
                    self._admit_behind(head, num_running, draft)
                return
            self._admit_one(head, num_tokens, draft)

    def _admit_behind(self, head: Request, num_running: int, draft: Draft) -> None:
        """Bring in whoever fits behind a head that does not, in their order. What holds back the head is noted."""
        for request in [request for request in self.queue if request is not head]:
            num_tokens = self.tokens_for(request, draft)
            obstacle = self.obstacle(request, num_tokens, draft)
            if obstacle is BlockedBy.SLOTS or not self._pacing_opens(request, num_running, draft):
                return
            if obstacle is BlockedBy.NOTHING and not self.is_hopeless(request, num_tokens):
                self._admit_one(request, num_tokens, draft)

    def _pacing_opens(self, candidate: Request | None, num_running: int, draft: Draft) -> bool:
        earliest_ns = None
        if self.pacing.reads_clock:
            earliest_ns = min([r.queued_ns for r in self.queue], default=None)
        next_decodes = None
        if self.pacing.reads_batch and candidate is not None:
            next_decodes = self.members.next_decodes(candidate, decodes_now=draft.decodes)
        return self.pacing.opens(
            Situation(
                draft.now_ns,
                earliest_ns,
                len(self.queue),
                num_running,
                self.members.num_decoding,
                len(draft.admitted),
                next_decodes,
            )
        )

    def tokens_for(self, head: Request, draft: Draft) -> int:
        """Tokens that a waiting request would get: all that are known, or what the budget leaves of them. Pure."""
        state: GridState = head.policy_state
        is_stale = state.stale_tokens != NEVER
        left = state.num_to_prefill - state.stale_tokens if is_stale else head.num_tokens
        if not self.config.chunked:
            return left
        return self.cut(left, self.budget_left(draft, state.stale_tokens if is_stale else 0))

    def cut(self, left: int, budget: int) -> int:
        """Tokens of a prefill that has so many left, within a budget. Pure."""
        return min(left, budget)

    def budget_left(self, draft: Draft, num_done: int) -> int:
        """Tokens that a prefill of which `num_done` are done may still get in this step. Pure."""
        return self.config.token_budget - draft.num_tokens

    def is_hopeless(self, head: Request, num_tokens: int) -> bool:
        """Whether the engine gives up the head of the queue: it is too long. Pure."""
        return head.num_tokens > self.config.prompt_limit or self.never_admitted(head)

    def never_admitted(self, head: Request) -> bool:
        """Whether the engine drops a request because the watermark will never admit it. Pure."""
        if not self.config.drops_what_never_fits:
            return False
        return self._reservation.blocks(head) > self.kv.usable_blocks - self._reservation.watermark_blocks

    def obstacle(self, head: Request, num_tokens: int, draft: Draft) -> BlockedBy:
        """What keeps the head of the queue out of this step. Pure."""
        if len(self.members) >= self.config.max_num_seqs:
            return BlockedBy.SLOTS
        if not 0 < num_tokens <= self.budget_left(draft, 0):
            return BlockedBy.BUDGET
        if self._reservation.blocks(head) > self.kv.free_blocks - self._reservation.watermark_blocks:
            return BlockedBy.KV
        return BlockedBy.NOTHING

    def steady_obstacle(self, draft: Draft) -> BlockedBy | None:
        """What keeps the head of the queue out while the same requests decode; None when that is not certain. Pure."""
        queue, now_ns = self.queue, draft.now_ns
        if type(queue).begin_admission is not QueueOrder.begin_admission:
            return None
        if not len(queue):
            return None if self.pacing.must_be_asked else BlockedBy.NOTHING
        head = queue.head(now_ns) if queue.leaves_no_trace else None
        if head is None:
            return None
        num_tokens = self.tokens_for(head, draft)
        is_certain = self.pacing.is_steady and queue.next_change_ns(now_ns) is None
        if not is_certain or self.is_hopeless(head, num_tokens):
            return None
        obstacle = self.obstacle(head, num_tokens, draft)
        may_change = obstacle is BlockedBy.NOTHING
        may_change |= obstacle is not BlockedBy.SLOTS and type(queue).advance is not QueueOrder.advance
        if self._skips and obstacle is not BlockedBy.SLOTS:
            may_change |= any(not self.obstacle(r, self.tokens_for(r, draft), draft) for r in queue)
        return None if may_change else obstacle

    def steady_obstacle_to_return(self, draft: Draft) -> BlockedBy | None:
        """The same for those who are swapped out, of whom there are some. Pure."""
        first = self._swapped[0]
        obstacle = self.obstacle_to_return(first, draft)
        is_final = self.touched_blocks(first) <= self.kv.usable_blocks and obstacle is not BlockedBy.NOTHING
        return obstacle if is_final else None

    def _admit_one(self, head: Request, num_tokens: int, draft: Draft) -> None:
        self.queue.take(head, draft.now_ns)
        state: GridState = head.policy_state
        num_used = self.kv.used_blocks
        state.num_cached = self._hold(head)
        draft.num_new_blocks += self.kv.used_blocks - num_used
        state.num_to_prefill = head.num_tokens
        draft.admitted.append(Admission(head, state.num_cached, head.status is Status.PREEMPTED))
        head.status = Status.RUNNING
        self.members.seat(head)
        self.members.prefilling[head] = None
        self.prefill(head, num_tokens, draft)

    def _hold(self, head: Request) -> int:
        """Take the blocks of an admission. Returns how many of its tokens are in them already."""
        self.kv.allocate(head, self._reservation.blocks(head))
        return 0

    def _drop(self, request: Request, draft: Draft) -> None:
        draft.dropped.append(request)
        self.end(request)

    def touched_blocks(self, request: Request) -> int:
        """Blocks that a swapped request needs to go on: those of its tokens and of the next one."""
        held = request.num_blocks or request.policy_state.num_cpu_blocks
        if not request.policy_state.is_decoding:
            return int(held)
        return max(held, blocks_for(request.num_computed_tokens + 1, self._block_size))

    def tokens_left(self, request: Request) -> int:
        """Tokens that a request which runs or is swapped out has to compute next, by itself: one when it decodes."""
        state: GridState = request.policy_state
        return 1 if state.is_decoding else state.num_to_prefill - request.num_computed_tokens
