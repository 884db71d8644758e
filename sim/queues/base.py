"""Contract of the queue orders: who is next in the waiting queue of an engine.

An order holds the waiting requests and nothing else: whether the next one is admitted, and what happens to
those who run, is the policy's. An order that is fair to clients is told what service they get. A client is
a request class of the traffic (`request.class_index`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Self

from pydantic import Field

from sim.errors import InvariantError, ScenarioError
from sim.options import Options
from sim.registry import Registry
from sim.request import Request


class Setting(NamedTuple):
    """What an order may know of the engine that it serves."""

    class_names: Sequence[str] = ()
    """The request classes of the traffic, by `request.class_index`."""
    num_slots: int = 10**12
    """Requests that may run at once."""
    kv_tokens: int = 10**12
    """Tokens that the KV cache holds."""


class QueueOrderOptions(Options):
    """Base of every order's options."""

    kind: str = Field(description="name of a queue order")


class QueueOrder(ABC):
    """The waiting queue of one engine. Times are integer nanoseconds of the run's clock."""

    Options: ClassVar[type[QueueOrderOptions]]
    is_arrival_order: ClassVar[bool] = False
    """Whether an earlier arrival is always ahead of a later one, but for requests that were put back."""
    reads_clock: bool = False
    """Whether who is next, or is turned away, depends on how long steps take."""

    drops_late: bool = False
    """Whether who has not been admitted at its `due_ns` is turned away then, which is the engine's matter."""

    @property
    def leaves_no_trace(self) -> bool:
        """Whether an admission that admits nobody changes nothing."""
        own = type(self)
        return own.begin_admission is QueueOrder.begin_admission and own.refused is QueueOrder.refused

    @property
    def is_fixed(self) -> bool:
        """Whether ticks leave the order of those who wait as it is."""
        return type(self).advance is QueueOrder.advance

    @property
    def keeps_accounts(self) -> bool:
        """Whether who is next depends on what the engine does with those who were admitted."""
        return not self.leaves_no_trace or not self.is_fixed or type(self).released is not QueueOrder.released

    @classmethod
    @abstractmethod
    def build(cls, options: QueueOrderOptions, setting: Setting) -> Self:
        """An empty queue. `options` is an instance of `cls.Options`.

        Raises ScenarioError (place: the key within `queue_order`) where options name a class that the traffic
        does not have.
        """

    @abstractmethod
    def add(self, request: Request, now_ns: int) -> None:
        """A new arrival takes its place. `now_ns` is when it reached the engine."""

    @abstractmethod
    def put_back(self, request: Request, now_ns: int) -> None:
        """A preempted request waits again: at the front, or where its key places it."""

    @abstractmethod
    def head(self, now_ns: int) -> Request | None:
        """Who is next; None when nobody waits, or nobody who waits may be admitted now.

        The same until somebody comes, goes or is served, or time passes. Never None for ever while nobody runs.
        """

    @abstractmethod
    def take(self, request: Request, now_ns: int) -> None:
        """A waiting request (not only the head) leaves the queue because it is admitted, and is charged for it."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """A waiting request leaves the queue because it is over."""

    @abstractmethod
    def __len__(self) -> int:
        """How many wait."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be served if nothing else happened. O(n log n), for logs and tests."""

    def begin_admission(self, now_ns: int) -> None:  # noqa: B027  # most orders have nothing to prepare
        """The policy is about to admit from the head until one does not fit. Mutates the accounts."""

    def refused(self, request: Request) -> None:  # noqa: B027  # most orders try the same head again
        """The head did not fit, which ends the admission that was begun. Mutates the accounts."""

    def start_decoding(self, request: Request, next_output: int) -> None:  # noqa: B027  # most orders charge nobody
        """From the next tick on an admitted request gets an output token per tick, `next_output` (1: first) onwards."""

    def stop_decoding(self, request: Request) -> None:  # noqa: B027  # most orders charge nobody
        """It does so no longer: it ended or was preempted. Mutates the accounts."""

    def advance(self, num_ticks: int = 1) -> None:  # noqa: B027  # most orders charge nobody
        """So many ticks: everybody who decodes got as many tokens. O(1) wherever all tokens cost the same."""

    def served(self, request: Request, output: int) -> None:  # noqa: B027  # most orders charge nobody
        """An admitted request got its output token number `output` outside the ticks, as prefills yield it."""

    def served_each(self, requests: Sequence[Request], num_outputs: Callable[[Request], int]) -> None:
        """`served` for each of these, who got the output token of that number."""
        if type(self).served is not QueueOrder.served:
            for request in requests:
                self.served(request, num_outputs(request))

    def released(self, request: Request, num_outputs: int) -> None:  # noqa: B027  # most orders charge nobody
        """An admitted request, which does not decode any more, is over with so many outputs."""

    def due_ns(self, request: Request) -> int:
        """When a request that was not admitted before is turned away, in an order that `drops_late`. Pure."""
        raise InvariantError(f"{type(self).__name__} has no deadlines")

    def next_change_ns(self, now_ns: int) -> int | None:
        """When the head may change although nobody comes, goes or is served; None: never. Pure."""
        return None


QUEUE_ORDERS: Registry[QueueOrder] = Registry(
    "queue order",
    "sim.queues.base:QueueOrder",
    {
        "fcfs": "sim.queues.fcfs:Fcfs",
        "priority": "sim.queues.priority:Priority",
        "priority_aging": "sim.queues.priority:AgingPriority",
        "sjf": "sim.queues.shortest:ShortestFirst",
        "srpt": "sim.queues.shortest:ShortestRemaining",
        "edf": "sim.queues.edf:EarliestDeadline",
        "quotas": "sim.queues.quotas:Quotas",
        "mlfq": "sim.queues.mlfq:Mlfq",
        "triton": "sim.queues.triton:Triton",
        "vtc": "sim.queues.vtc:Vtc",
        "vtc_fair": "sim.queues.vtc:VtcFair",
        "lcf_fair": "sim.queues.vtc:LcfFair",
        "vtc_max_fair": "sim.queues.vtc:VtcMaxFair",
        "vtc_oracle": "sim.queues.vtc_foresight:VtcOracle",
        "vtc_len_predict": "sim.queues.vtc_foresight:VtcLenPredict",
        "mdrr_fair": "sim.queues.mdrr:MdrrFair",
    },
)


def build_order(options: QueueOrderOptions, setting: Setting) -> QueueOrder:
    """The queue of an engine whose `queue_order` says `options`. Raises ScenarioError at `engine.queue_order`."""
    order = QUEUE_ORDERS.load(options.kind, allow_imports=True)
    try:
        return order.build(options, setting)
    except ScenarioError as error:
        place = f"engine.queue_order.{error.place}"
        raise ScenarioError(place, error.found, valid=error.valid, remedy=error.remedy) from error
