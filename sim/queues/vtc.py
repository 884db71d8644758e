"""Virtual token counters: the client that was served least is next.

Each client has a counter of the service that it got: a price for every prompt token at admission and for
every output token as it comes, divided by its weight. Whoever has the smallest counter has its oldest
request admitted next. A client that comes back is lifted to the others, so that it gets no credit for having
been away.

Sources: Sheng et al. 2024, "Fairness in Serving Large Language Models" (VTC; least counter first, LCF, is
the same without the lift), and its artifact (VTC-artifact @192c2e2, `vtc_req_queue.py`, `lcf_req_queue.py`,
`vtc_max_req_queue.py`), whose names the variants have. The paper bounds the difference in service between two
clients that always wait by 2 max(input_price × longest prompt, output_price × tokens in a batch).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from sim.queues.accounts import Account, AccountOptions, AccountOrder
from sim.queues.base import Setting
from sim.request import Request


class VtcOptions(AccountOptions):
    """What VTC can be told."""

    kind: Literal["vtc"] = Field(description="virtual token counters, the paper's rules")


class CostedOptions(AccountOptions):
    """What the artifact's VTC can be told."""

    kind: Literal["vtc_fair"] = Field(description="virtual token counters as the artifact keeps them")
    cost_func: Literal["linear", "profile"] = Field(
        default="linear", description="prices per token, or the artifact's fit of measured times (prices unused)"
    )


class LcfOptions(AccountOptions):
    """What LCF can be told."""

    kind: Literal["lcf_fair"] = Field(description="least counter first: VTC without the lift")


class VtcMaxOptions(AccountOptions):
    """What VTC with a lift to the maximum can be told."""

    kind: Literal["vtc_max_fair"] = Field(description="VTC whose counters are all lifted before each admission")


class LcfFair(AccountOrder):
    """Least counter first. Among equals, the client that was seen first ever."""

    Options: ClassVar[type[AccountOptions]] = LcfOptions

    def head(self, now_ns: int) -> Request | None:
        least, first = float("inf"), None
        for account in self._accounts.values():
            if account.queue:
                self._settle(account)
                if account.balance < least:
                    least, first = account.balance, account
        return next(iter(first.queue)) if first else None

    def _returns(self, account: Account) -> None:
        """Its counter is what it was."""


class VtcFair(LcfFair):
    """Least counter first, and a client that comes back is lifted to the least of those who wait."""

    Options: ClassVar[type[AccountOptions]] = CostedOptions

    def __init__(self, options: AccountOptions, setting: Setting) -> None:
        super().__init__(options, setting)
        self._is_measured = getattr(options, "cost_func", "linear") == "profile"
        self.has_one_price = not self._is_measured

    def _returns(self, account: Account) -> None:
        others = [other for other in self._accounts.values() if other.queue and other is not account]
        for other in others:
            self._settle(other)
        if others:
            self._settle(account)
            account.balance = max(account.balance, min(other.balance for other in others))

    def _prompt_price(self, request: Request, account: Account) -> float:
        if not self._is_measured:
            return super()._prompt_price(request, account)
        return _measured_cost(request.prompt_tokens, 0) / account.weight

    def _token_price(self, request: Request, account: Account, output: int) -> float:
        if not self._is_measured:
            return super()._token_price(request, account, output)
        prompt = request.prompt_tokens
        return (_measured_cost(prompt, output) - _measured_cost(prompt, output - 1)) / account.weight


class Vtc(VtcFair):
    """As in the paper: when nobody waits, the lift is to the client that left the queue last (Algorithm 2)."""

    Options = VtcOptions

    def __init__(self, options: AccountOptions, setting: Setting) -> None:
        super().__init__(options, setting)
        self._last_to_leave: Account | None = None

    def _leave_queue(self, request: Request) -> None:
        super()._leave_queue(request)
        account = self._account(request)
        if not account.queue:
            self._last_to_leave = account

    def _returns(self, account: Account) -> None:
        if self._size > len(account.queue):
            super()._returns(account)
        elif self._last_to_leave is not None:
            self._settle(self._last_to_leave)
            self._settle(account)
            account.balance = max(account.balance, self._last_to_leave.balance)


class VtcMaxFair(LcfFair):
    """No lift at arrival; before each admission all counters are raised to the level of those who are served.

    The level is the largest counter when nobody decodes, else the counter that the client of the youngest
    decoding request would have without that request's prompt and outputs.
    """

    Options = VtcMaxOptions

    def __init__(self, options: AccountOptions, setting: Setting) -> None:
        super().__init__(options, setting)
        self._decoding: dict[Request, int] = {}

    def begin_admission(self, now_ns: int) -> None:
        balances = self.balances()
        if self._decoding:
            youngest = next(reversed(self._decoding))
            num_outputs = self._decoding[youngest] + self._tick
            level = balances[youngest.class_index] - youngest.prompt_tokens - num_outputs
        else:
            level = max(balances.values(), default=0.0)
        for account in self._accounts.values():
            account.balance = max(account.balance, level)

    def start_decoding(self, request: Request, next_output: int) -> None:
        super().start_decoding(request, next_output)
        self._decoding[request] = next_output - self._tick

    def stop_decoding(self, request: Request) -> None:
        super().stop_decoding(request)
        del self._decoding[request]


def _measured_cost(num_inputs: int, num_outputs: int) -> float:
    """Service of a request with so many tokens: the artifact's fit to measured times of an A10G."""
    x, y = num_inputs, num_outputs
    return 0.21001891 * x + 0.10075395 * y + 0.0039868 * x * y + 0.00324733 * y * y + 1.14601454
