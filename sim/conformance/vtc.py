"""Replays logs of the VTC artifact's router and queues. The pool counts tokens, and clients are request classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.clock import NS_PER_S, to_ns
from sim.conformance.engine_steps import Call, EngineRequest, EngineStepsReplay
from sim.conformance.fields import validated
from sim.conformance.golden import Golden, Line
from sim.doors.rate_limit import RateLimit
from sim.errors import GoldenError
from sim.options import Count, CountOrZero, NonNegative, Options, Positive
from sim.policies.base import EngineLimits
from sim.policies.vtc import Vtc
from sim.queues.accounts import AccountOrder
from sim.queues.base import QueueOrder
from sim.queues.mdrr import MdrrFair
from sim.queues.vtc_foresight import VtcLenPredict
from sim.request import Request

QUANTA_IN_POOL = 20
RATE_WINDOW_NS = 60 * NS_PER_S
DECIMALS = 6
"""Of the accounts in a log."""
FCFS_MODES = ("slora", "lshare_fair")


class VtcConfig(Options):
    """The keys of a log's `config`."""

    max_total_token_num: Count
    batch_max_tokens: Count
    running_max_req_size: Count
    max_wait_tokens: CountOrZero
    clients: tuple[str, ...]
    fair_weights: tuple[Positive, ...]
    """Of the first clients; the others have 1."""
    cost_func: str
    predict_range: NonNegative
    rate_limit: Count | None
    lora_rank: CountOrZero
    seconds_per_step: Positive


class VtcReplay(EngineStepsReplay):
    """The artifact's modes: one queue each."""

    VERSION = "VTC-artifact @192c2e2"
    MODES = (
        "slora",
        "vtc_fair",
        "lcf_fair",
        "vtc_max_fair",
        "vtc_oracle",
        "vtc_len_predict",
        "mdrr_fair",
        "lshare_fair",
    )
    Config = VtcConfig
    config: VtcConfig
    policy: Vtc

    def __init__(self, golden: Golden) -> None:
        super().__init__(golden)
        self.ns_per_step = to_ns(self.config.seconds_per_step)
        limit = self.config.rate_limit if self.mode == "lshare_fair" else None
        self._door = RateLimit(limit, RATE_WINDOW_NS) if limit else None
        self._rejected: list[Request] = []
        self._left: list[Request] = []
        self._kv_before = 0

    def now_ns(self) -> int:
        return self._step * self.ns_per_step

    def _build_policy(self) -> Vtc:
        config, place = self.config, f"{self.golden.path}: config"
        if config.predict_range:
            raise GoldenError(f"{place}.predict_range", f"is {config.predict_range}", valid="0: nothing random")
        if config.cost_func != "linear" and self.mode != "vtc_fair":
            raise GoldenError(f"{place}.cost_func", f"is {config.cost_func!r}", valid=f"linear in mode {self.mode}")
        options = {
            "policy": "vtc",
            "queue_order": self._queue_order(),
            "batch_max_tokens": config.batch_max_tokens,
            "running_max_req_size": config.running_max_req_size,
            "max_wait_tokens": config.max_wait_tokens,
            "lora_rank": config.lora_rank,
        }
        longest = max(row.prompt_tokens + row.max_tokens for row in self.rows)
        return Vtc.build(
            validated(Vtc.Options, options, place), EngineLimits(longest, 1, config.max_total_token_num, config.clients)
        )

    def _queue_order(self) -> dict[str, Any]:
        """The scheduler of the log as options of a queue order."""
        config = self.config
        if self.mode in FCFS_MODES:
            return {"kind": "fcfs"}
        order: dict[str, Any] = {
            "kind": self.mode,
            "weights": dict(zip(config.clients, config.fair_weights, strict=False)),
        }
        if self.mode == "mdrr_fair":
            order["quantum"] = config.max_total_token_num / QUANTA_IN_POOL
        if self.mode == "vtc_fair":
            order["cost_func"] = config.cost_func
        return order

    def _to_request(self, index: int, row: EngineRequest) -> Request:
        request = super()._to_request(index, row)
        if row.client not in self.config.clients:
            place = f"{self.golden.path}: requests[{index}].client"
            raise GoldenError(place, f"is {row.client!r}", valid=f"config.clients: {', '.join(self.config.clients)}")
        request.class_index = self.config.clients.index(row.client)
        return request

    def _call(self) -> Call:
        leaving, self._rejected = list(self._leaving), []
        self._kv_before = self._used_tokens()
        call = super()._call()
        self._left = [self.requests[index] for index in leaving if index not in self._leaving]
        return call

    def _arrive(self, request: Request) -> None:
        if self._door and self._door.refuses(request, request.queued_ns, self.policy):
            self._rejected.append(request)
            return
        if self._door:
            self._door.let_in(request, request.queued_ns)
        super()._arrive(request)

    def _used_tokens(self) -> int:
        """As the source counts: the newest output of a request counts although its KV is not computed yet."""
        return self._used_kv() + len(self.policy.running())

    def _own_fields(self, call: Call) -> Line:
        finished, released = call.finished.finished, call.finished.released
        waiting = sorted(self.policy.waiting(), key=lambda r: (r.queued_ns, r.index))
        fields: Line = {
            "cancelled": [r.id for r in self._left],
            "rejected": [r.id for r in self._rejected],
            "dropped": [r.id for r in released if r not in finished],
            "waiting": [r.id for r in waiting],
            "used_kv": self._used_tokens(),
            "used_kv_fwd": self._kv_before + call.planned.shape.prefill_tokens,
            "has_wait_tokens": self.policy.num_decode_steps,
        }
        return fields | self._accounts(self.policy.queue)

    def _accounts(self, queue: QueueOrder) -> Line:
        if not isinstance(queue, AccountOrder):
            return {}
        names = self.config.clients
        charged = {names[client]: round(balance, DECIMALS) for client, balance in queue.balances().items()}
        if isinstance(queue, MdrrFair):
            deficits = {name: -balance for name, balance in charged.items()}
            return {"dcounter": deficits, "active_list": [names[client] for client in queue.turns()]}
        fields: Line = {"served": charged}
        if isinstance(queue, VtcLenPredict):
            usual = {client: queue.usual_outputs.get(client, 0) for client in queue.balances()}
            fields["predict_len"] = {names[client]: round(length, DECIMALS) for client, length in usual.items()}
        return fields

    def _own_counters(self, call: Call, line: Line) -> Mapping[str, int]:
        return {"rejected": len(self._rejected), "cancelled": len(self._left)}
