"""Quotas: what of the engine's slots and KV each request class is sure of, and what it may have at most.

A class below its floor can count on it: others are admitted only if what it lacks to the floor stays free. With
`borrow` that holds only while somebody of the class waits; otherwise the floor is held back even when it is
idle, so that a burst meets free capacity. Nobody is preempted for a floor: what was lent comes back as requests end. A
class never has more than its ceiling, but for a single request that is larger. A request counts one slot and the
KV that it can come to hold.

Within a class the earliest arrival is first; of several classes that may have somebody admitted, those below
their floor come first, and among them, as among the others, the one whose oldest request waits longest.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sim.options import Options, Share, by_class_index
from sim.queues.base import QueueOrder, QueueOrderOptions, Setting
from sim.request import Request

ROUNDING = 1e-6
"""More than what a share times a whole is off by, and less than what a share could mean."""


class QuotaOptions(Options):
    """One class's part of a resource."""

    floor: Share = Field(default=0.0, description="part of the whole that the class can count on")
    ceiling: Share = Field(default=1.0, gt=0, description="part of the whole that the class has at most")

    @model_validator(mode="after")
    def _floor_below_ceiling(self) -> Self:
        if self.floor > self.ceiling:
            raise PydanticCustomError(
                "floor_above_ceiling", "the floor {floor} is above the ceiling {ceiling}", self.model_dump()
            )
        return self


class ClassQuotaOptions(Options):
    """The quotas of one class."""

    slots: QuotaOptions = Field(default_factory=QuotaOptions, description="of the requests that may run")
    kv: QuotaOptions = Field(default_factory=QuotaOptions, description="of the tokens that the KV cache holds")


class QuotasOptions(QueueOrderOptions):
    """The quotas of all classes."""

    kind: Literal["quotas"] = Field(description="floors and ceilings on slots and KV by request class")
    classes: dict[str, ClassQuotaOptions] = Field(
        default_factory=dict, description="quotas by request class; others have no floor and no ceiling"
    )
    borrow: bool = Field(default=True, description="whether others may use the floor of a class that nobody waits in")

    @model_validator(mode="after")
    def _floors_fit(self) -> Self:
        for resource in ("slots", "kv"):
            total = sum(getattr(quotas, resource).floor for quotas in self.classes.values())
            if total > 1 + 1e-9:
                raise PydanticCustomError(
                    "floors_above_whole",
                    "the floors of {resource} add up to {total}, which is more than the whole",
                    {"resource": resource, "total": f"{total:g}"},
                )
        return self


class Resource:
    """Slots or KV tokens: what each class has, and may have."""

    def __init__(self, whole: int, quotas: dict[int, QuotaOptions]) -> None:
        self.whole = whole
        self.floors = {index: _part(quota.floor, whole) for index, quota in quotas.items()}
        self.ceilings = {index: _part(quota.ceiling, whole) for index, quota in quotas.items()}
        self.used: dict[int, int] = {}

    def lacks_to_floor(self, index: int) -> int:
        """What a class could still count on."""
        return max(0, self.floors.get(index, 0) - self.used.get(index, 0))

    def allows(self, index: int, amount: int, held_back: int) -> bool:
        """Whether a class may have so much more while `held_back` is kept for others."""
        used = self.used.get(index, 0)
        if used and used + amount > self.ceilings.get(index, self.whole):
            return False
        total = sum(self.used.values())
        return total == 0 or amount <= self.lacks_to_floor(index) or total + amount <= self.whole - held_back


class Quotas(QueueOrder):
    """A queue per class, and counts of what each class holds. O(classes) to find the head."""

    Options = QuotasOptions

    def __init__(self, options: QuotasOptions, setting: Setting) -> None:
        quotas = by_class_index(options.classes, setting.class_names, "classes")
        self._slots = Resource(setting.num_slots, {index: quota.slots for index, quota in quotas.items()})
        self._kv = Resource(setting.kv_tokens, {index: quota.kv for index, quota in quotas.items()})
        self._borrow = options.borrow
        self._queues: dict[int, OrderedDict[Request, None]] = {index: OrderedDict() for index in quotas}
        self._size = 0

    @classmethod
    def build(cls, options: QueueOrderOptions, setting: Setting) -> Self:
        assert isinstance(options, QuotasOptions)
        return cls(options, setting)

    def add(self, request: Request, now_ns: int) -> None:
        self._queues.setdefault(request.class_index, OrderedDict())[request] = None
        self._size += 1

    def put_back(self, request: Request, now_ns: int) -> None:
        """At the front of its class, which does not hold anything for it any more."""
        self._count(request, -1)
        self.add(request, now_ns)
        self._queues[request.class_index].move_to_end(request, last=False)

    def head(self, now_ns: int) -> Request | None:
        best: tuple[Any, ...] | None = None
        for index, queue in self._queues.items():
            if not queue:
                continue
            request = next(iter(queue))
            if self._may_have(index, request):
                key = (self._slots.lacks_to_floor(index) == 0, request.arrival_ns, request.index, request)
                best = key if best is None else min(best, key)
        return best[-1] if best else None

    def take(self, request: Request, now_ns: int) -> None:
        self.remove(request)
        self._count(request, +1)

    def remove(self, request: Request) -> None:
        del self._queues[request.class_index][request]
        self._size -= 1

    def released(self, request: Request, num_outputs: int) -> None:
        self._count(request, -1)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """By arrival within what is below a floor and what is not, whether or not anybody may be admitted now."""
        everybody = [(index, request) for index, queue in self._queues.items() for request in queue]
        everybody.sort(key=lambda item: (self._slots.lacks_to_floor(item[0]) == 0, item[1].arrival_ns, item[1].index))
        return iter([request for _, request in everybody])

    def _may_have(self, index: int, request: Request) -> bool:
        """Whether the class may have its request admitted; always when nobody runs."""
        if not any(self._slots.used.values()):
            return True
        return all(
            resource.allows(index, amount, self._held_back(resource, index))
            for resource, amount in ((self._slots, 1), (self._kv, _kv_tokens(request)))
        )

    def _held_back(self, resource: Resource, index: int) -> int:
        """What is kept for other classes."""
        return sum(
            resource.lacks_to_floor(other)
            for other in resource.floors
            if other != index and (self._queues[other] or not self._borrow)
        )

    def _count(self, request: Request, sign: int) -> None:
        for resource, amount in ((self._slots, 1), (self._kv, _kv_tokens(request))):
            resource.used[request.class_index] = resource.used.get(request.class_index, 0) + sign * amount


def _part(share: float, whole: int) -> int:
    """Rounded down, but 0.29 of 100 is 29, although the nearest binary fraction gives less."""
    return math.floor(share * whole + ROUNDING)


def _kv_tokens(request: Request) -> int:
    """The most that it can come to hold."""
    return request.prompt_tokens + request.max_tokens
