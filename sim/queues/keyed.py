"""Orders that are one key per request: the least key is next, and no key changes while its request waits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

from sim.queues.base import QueueOrder
from sim.request import Request


class KeyedOrder(QueueOrder):
    """A heap of keys. Who leaves from the middle stays in it as an entry that no longer counts."""

    def __init__(self) -> None:
        self._key_of: dict[Request, tuple[Any, ...]] = {}
        self._heap: list[tuple[tuple[Any, ...], Request]] = []
        self._num_entered = 0

    @abstractmethod
    def key(self, request: Request, now_ns: int) -> tuple[Any, ...]:
        """The request's key if it enters the queue now; equal keys are served in the order in which they enter."""

    def add(self, request: Request, now_ns: int) -> None:
        key = self._key_of[request] = (*self.key(request, now_ns), self._num_entered)
        heappush(self._heap, (key, request))
        self._num_entered += 1

    def put_back(self, request: Request, now_ns: int) -> None:
        """Where its key now places it."""
        self.add(request, now_ns)

    def head(self, now_ns: int) -> Request | None:
        heap = self._heap
        while heap:
            key, request = heap[0]
            if self._key_of.get(request) is key:
                return request
            heappop(heap)
        return None

    def take(self, request: Request, now_ns: int) -> None:
        del self._key_of[request]

    def remove(self, request: Request) -> None:
        del self._key_of[request]

    def __len__(self) -> int:
        return len(self._key_of)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._key_of, key=self._key_of.__getitem__))
