"""Virtual token counters that charge for the whole answer at admission, by a prediction of its length.

A client is charged for what it will have got before others are admitted, instead of while it gets it. What
an answer has beyond its prediction is charged as it comes; what it falls short by is paid back at its end.

Source: VTC-artifact @192c2e2, `vtc_oracle_req_queue.py` and `vtc_len_predict_req_queue.py`. The oracle's
prediction is `max_tokens`, not the true length; the other one is an exponential mean over the client's
answers, (4 × old + length) / 5, from 0 and the first answer's own length.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from sim.queues.accounts import Account, AccountOptions
from sim.queues.base import Setting
from sim.queues.vtc import VtcFair
from sim.request import Request


class VtcOracleOptions(AccountOptions):
    """What it can be told."""

    kind: Literal["vtc_oracle"] = Field(description="VTC that charges max_tokens at admission")


class VtcLenPredictOptions(AccountOptions):
    """What it can be told."""

    kind: Literal["vtc_len_predict"] = Field(description="VTC that charges the client's usual answer at admission")


class VtcOracle(VtcFair):
    """Charges `max_tokens` outputs at admission."""

    Options: ClassVar[type[AccountOptions]] = VtcOracleOptions

    def __init__(self, options: AccountOptions, setting: Setting) -> None:
        super().__init__(options, setting)
        self.has_one_price = False
        self._predicted: dict[Request, float] = {}
        """Of those that were admitted and are not over."""
        self._num_charged: dict[Request, int] = {}
        """Outputs of those that were preempted, for which their next admission is not to charge again."""

    def predict(self, request: Request) -> float:
        """Outputs that its admission is charged for."""
        return request.max_tokens

    def take(self, request: Request, now_ns: int) -> None:
        self._predicted.setdefault(request, self.predict(request))
        super().take(request, now_ns)

    def put_back(self, request: Request, now_ns: int) -> None:
        """What it got stays charged, so that nothing is free if its client leaves before it is admitted again."""
        if request in self._predicted:
            self._num_charged[request] = request.num_output_tokens
        super().put_back(request, now_ns)

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._predicted.pop(request, None)
        self._num_charged.pop(request, None)

    def released(self, request: Request, num_outputs: int) -> None:
        predicted = self._predicted.pop(request)
        self._num_charged.pop(request, None)
        if num_outputs < predicted:
            account = self._account(request)
            account.balance -= self._output_price * (predicted - num_outputs) / account.weight

    def _admission_price(self, request: Request, account: Account) -> float:
        predicted = self._predicted.get(request)
        num_outputs = self.predict(request) if predicted is None else predicted
        num_outputs = max(0.0, num_outputs - self._num_charged.get(request, 0))
        return (request.prompt_tokens * self._input_price + num_outputs * self._output_price) / account.weight

    def _token_price(self, request: Request, account: Account, output: int) -> float:
        return account.token_price if output > self._predicted[request] else 0.0


class VtcLenPredict(VtcOracle):
    """Charges the running mean of the client's answers."""

    Options = VtcLenPredictOptions

    def __init__(self, options: AccountOptions, setting: Setting) -> None:
        super().__init__(options, setting)
        self.usual_outputs: dict[int, float] = {}
        """By class: the mean, which starts at the first answer's length."""

    def predict(self, request: Request) -> float:
        return self.usual_outputs.get(request.class_index, 0.0)

    def released(self, request: Request, num_outputs: int) -> None:
        super().released(request, num_outputs)
        old = self.usual_outputs.get(request.class_index)
        self.usual_outputs[request.class_index] = num_outputs if old is None else (old * 4 + num_outputs) / 5
