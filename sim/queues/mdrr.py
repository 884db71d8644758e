"""Deficit round robin over clients, for requests whose cost is known only when they are over.

Clients take turns. At its turn a client gets a quantum if it has used up what it had, and its requests are
admitted while it has anything left; prompts are charged at admission, outputs as they come, so that a client
may end far below zero and then lets its turns pass.

Source: VTC-artifact @192c2e2, `mdrr_req_queue.py` (there the quantum is a twentieth of the KV pool's tokens).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from copy import copy
from typing import Annotated, Literal

from pydantic import Field

from sim.options import Positive
from sim.queues.accounts import Account, AccountOptions, AccountOrder
from sim.queues.base import Setting
from sim.request import Request

MANY_ROUNDS = 50
"""In which debts are paid off at once: sums round otherwise than one by one."""


class MdrrOptions(AccountOptions):
    """What it can be told."""

    kind: Literal["mdrr_fair"] = Field(description="deficit round robin over request classes")
    quantum: Annotated[Positive, Field(ge=1e-6)] = Field(
        default=1000.0, description="service that a client may get at its turn"
    )


class MdrrFair(AccountOrder):
    """Balances are what clients owe: the deficit counter with the other sign."""

    Options = MdrrOptions

    def __init__(self, options: AccountOptions, setting: Setting) -> None:
        super().__init__(options, setting)
        assert isinstance(options, MdrrOptions)
        self._quantum = options.quantum
        self._turns: deque[Account] = deque()
        self._current: Account | None = None
        """Whose turn it is."""
        self._was_refused: Account | None = None
        """Whose request did not fit: it keeps its turn, but lets it pass if it owes."""

    def add(self, request: Request, now_ns: int) -> None:
        super().add(request, now_ns)
        self._line_up(request)

    def put_back(self, request: Request, now_ns: int) -> None:
        super().put_back(request, now_ns)
        self._line_up(request)

    def head(self, now_ns: int) -> Request | None:
        """Moves on to the client whose turn it is, and grants quanta on the way."""
        num_turns = 0
        while account := self._current or self._next_turn():
            if self._debt(account) < 0 and account.queue:
                return next(iter(account.queue))
            self._end_turn(account)
            num_turns += 1
            if num_turns > len(self._turns):
                self._skip_rounds()
                num_turns = 0
        return None

    def refused(self, request: Request) -> None:
        """Its client keeps the turn."""
        account = self._account(request)
        self._turns.appendleft(account)
        self._was_refused = account
        self._current = None

    def turns(self) -> list[int]:
        """Classes of the clients in the order of their turns, whose turn it is first."""
        clients = {id(account): client for client, account in self._accounts.items()}
        return [clients[id(account)] for account in ([self._current] if self._current else []) + list(self._turns)]

    def __iter__(self) -> Iterator[Request]:
        twin = copy(self)
        twins = {id(account): copy(account) for account in self._accounts.values()}
        for account in twins.values():
            account.queue = account.queue.copy()
        twin._accounts = {client: twins[id(account)] for client, account in self._accounts.items()}
        twin._turns = deque(twins[id(account)] for account in self._turns)
        twin._current = twins.get(id(self._current))
        twin._was_refused = twins.get(id(self._was_refused))
        while (head := twin.head(0)) is not None:
            twin.take(head, 0)
            yield head

    def _returns(self, account: Account) -> None:
        """It owes what it owed."""

    def _line_up(self, request: Request) -> None:
        account = self._account(request)
        if account is not self._current and account not in self._turns:
            self._turns.append(account)

    def _next_turn(self) -> Account | None:
        while self._turns:
            account = self._turns.popleft()
            if account is self._was_refused and self._debt(account) > 0:
                self._turns.append(account)
                self._was_refused = None
                continue
            if self._debt(account) >= 0:
                account.balance -= self._quantum
            self._current = account
            return account
        return None

    def _skip_rounds(self) -> None:
        """Grant at once what many rounds would in which everybody's turn passes, as where prices dwarf the quantum."""
        rounds = [(account, self._rounds_without_end(account)) for account in self._turns]
        until_somebody_is_next = [number for account, number in rounds if account.queue]
        most = (
            min(until_somebody_is_next) if until_somebody_is_next else max([number for _, number in rounds], default=0)
        )
        if most >= MANY_ROUNDS:
            for account, number in rounds:
                account.balance -= min(most, number) * self._quantum

    def _rounds_without_end(self, account: Account) -> int:
        """In which it is granted a quantum and neither is next after that nor has nothing more to pay off."""
        quanta = self._debt(account) / self._quantum
        return max(0, math.floor(quanta) if account.queue else math.ceil(quanta) - 1)

    def _end_turn(self, account: Account) -> None:
        if account.queue or self._debt(account) > 0:
            self._turns.append(account)
        self._current = None

    def _debt(self, account: Account) -> float:
        self._settle(account)
        return account.balance
