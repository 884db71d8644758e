"""What the orders that are fair to clients share: a queue and an account of service for each client.

A client is a request class. Within a client the oldest request is first. Where all output tokens cost the
same, a tick costs nothing: an account is what it was when somebody joined or left, plus the price of a token
for each of the client's decoding requests and each tick since, worked out when somebody asks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Annotated, ClassVar, Self

from pydantic import Field

from sim.options import NonNegative, Positive, by_class_index
from sim.queues.base import QueueOrder, QueueOrderOptions, Setting
from sim.request import Request, Status


class AccountOptions(QueueOrderOptions):
    """What the orders with accounts can be told."""

    input_price: NonNegative = Field(default=1.0, description="service of one prompt token")
    output_price: Positive = Field(default=2.0, description="service of one output token")
    weights: dict[str, Annotated[Positive, Field(ge=1e-6, le=1e6)]] = Field(
        default_factory=dict, description="share of service by request class; others have 1"
    )


class Account:
    """One client: its weight, what it was charged, who waits and who decodes."""

    __slots__ = ("balance", "decoding", "is_exact", "queue", "settled_tick", "token_price", "weight")

    def __init__(self, weight: float, output_price: float) -> None:
        self.weight = weight
        self.balance = 0.0
        self.queue: OrderedDict[Request, None] = OrderedDict()
        self.decoding: dict[Request, int] = {}
        """Who gets a token per tick, and the number of its output token at tick 0 if it had decoded then."""
        self.settled_tick = 0
        self.token_price = output_price / weight
        self.is_exact = (self.token_price * 2**20).is_integer()
        """Whether sums of this price have no rounding, so that n times the price is n additions of it."""

    def charge(self, num_tokens: int) -> None:
        """So many output tokens at the one price that they have."""
        if self.is_exact:
            self.balance += num_tokens * self.token_price
            return
        for _ in range(num_tokens):  # rounds as an account does that is charged token by token
            self.balance += self.token_price


class AccountOrder(QueueOrder):
    """Queues and accounts; subclasses choose the next client and set prices."""

    Options: ClassVar[type[AccountOptions]]
    has_one_price = True
    """Whether every output token costs `output_price`."""

    def __init__(self, options: AccountOptions, setting: Setting) -> None:
        self._weights = by_class_index(options.weights, setting.class_names, "weights")
        self._input_price, self._output_price = options.input_price, options.output_price
        self._accounts: dict[int, Account] = {}
        """By class, in the order in which clients were first seen."""
        self._size = 0
        self._tick = 0

    @classmethod
    def build(cls, options: QueueOrderOptions, setting: Setting) -> Self:
        assert isinstance(options, AccountOptions)
        return cls(options, setting)

    def add(self, request: Request, now_ns: int) -> None:
        account = self._account(request)
        was_idle = not account.queue
        account.queue[request] = None
        self._size += 1
        if was_idle:
            self._returns(account)

    def put_back(self, request: Request, now_ns: int) -> None:
        """At the front of its client's queue. Its admission is paid back, because there will be another one."""
        account = self._account(request)
        self._settle(account)
        account.balance -= self._admission_price(request, account)
        account.queue[request] = None
        account.queue.move_to_end(request, last=False)
        self._size += 1

    def take(self, request: Request, now_ns: int) -> None:
        account = self._account(request)
        self._leave_queue(request)
        self._settle(account)
        account.balance += self._admission_price(request, account)

    def remove(self, request: Request) -> None:
        """One that was preempted owes its prompt again: there will be no other admission that it is charged at."""
        self._leave_queue(request)
        if request.status is Status.PREEMPTED:
            account = self._account(request)
            self._settle(account)
            account.balance += self._prompt_price(request, account)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """As the accounts stand, if every admission were charged and no token generated."""
        balances = {client: self.balance(client) for client in self._accounts}
        queues = {client: list(account.queue) for client, account in self._accounts.items() if account.queue}
        while queues:
            client = min(queues, key=balances.__getitem__)
            request = queues[client].pop(0)
            balances[client] += self._admission_price(request, self._accounts[client])
            if not queues[client]:
                del queues[client]
            yield request

    def start_decoding(self, request: Request, next_output: int) -> None:
        account = self._account(request)
        self._settle(account)
        account.decoding[request] = next_output - self._tick

    def stop_decoding(self, request: Request) -> None:
        account = self._account(request)
        self._settle(account)
        del account.decoding[request]

    def advance(self, num_ticks: int = 1) -> None:
        if self.has_one_price:
            self._tick += num_ticks
            return
        for _ in range(num_ticks):
            for account in self._accounts.values():
                for request, offset in account.decoding.items():
                    account.balance += self._token_price(request, account, offset + self._tick)
            self._tick += 1

    def served(self, request: Request, output: int) -> None:
        account = self._account(request)
        self._settle(account)
        account.balance += self._token_price(request, account, output)

    def served_each(self, requests: Sequence[Request], num_outputs: Callable[[Request], int]) -> None:
        if not self.has_one_price:
            super().served_each(requests, num_outputs)
            return
        for client, num_tokens in Counter(map(attrgetter("class_index"), requests)).items():
            account = self._accounts[client]
            self._settle(account)
            account.charge(num_tokens)

    def balance(self, client: int) -> float:
        """What a client has been charged so far (0 for one that was never seen). Pure, as seen from outside."""
        if client not in self._accounts:
            return 0.0
        self._settle(self._accounts[client])
        return self._accounts[client].balance

    def balances(self) -> dict[int, float]:
        """What each client that was ever seen has been charged, by request class."""
        return {client: self.balance(client) for client in self._accounts}

    @abstractmethod
    def _returns(self, account: Account) -> None:
        """A client that had nobody in its queue has now: its account may be adjusted."""

    def _leave_queue(self, request: Request) -> None:
        del self._account(request).queue[request]
        self._size -= 1

    def _admission_price(self, request: Request, account: Account) -> float:
        return self._prompt_price(request, account)

    def _prompt_price(self, request: Request, account: Account) -> float:
        return request.prompt_tokens * self._input_price / account.weight

    def _token_price(self, request: Request, account: Account, output: int) -> float:
        """Of the request's output token number `output`, counted from 1."""
        return account.token_price

    def _account(self, request: Request) -> Account:
        account = self._accounts.get(request.class_index)
        if account is None:
            weight = self._weights.get(request.class_index, 1.0)
            account = self._accounts[request.class_index] = Account(weight, self._output_price)
            account.settled_tick = self._tick
        return account

    def _settle(self, account: Account) -> None:
        """Charge for the ticks that have not been charged yet."""
        num_ticks = self._tick - account.settled_tick
        account.settled_tick = self._tick
        if num_ticks and self.has_one_price:
            account.charge(num_ticks * len(account.decoding))
