"""Queue orders: who is next, and what leaving and coming back do to the others."""

import random

import pytest

from sim.queues.base import QUEUE_ORDERS
from sim.request import Request


def queue(kind, class_names=("all",), **options):
    cls = QUEUE_ORDERS.load(kind)
    return cls.build(cls.Options(kind=kind, **options), class_names)


def request(index, **given):
    return Request(index, given.pop("prompt", 10), given.pop("output", 10), **given)


def served(order, now_ns=0):
    """Indexes in the order in which the queue gives its requests away."""
    out = []
    while (head := order.head(now_ns)) is not None:
        order.take(head, now_ns)
        out.append(head.index)
    assert len(order) == 0
    return out


def test_fcfs_serves_in_the_order_of_arrival_and_the_preempted_first():
    order = queue("fcfs")
    requests = [request(i) for i in range(5)]
    for r in requests[:4]:
        order.add(r, 0)
    order.remove(requests[1])
    order.take(requests[0], 0)
    order.put_back(requests[0], 0)
    order.put_back(requests[4], 0)
    assert [r.index for r in order] == [4, 0, 2, 3]
    assert served(order) == [4, 0, 2, 3]


def test_priority_serves_the_smallest_and_the_earliest_among_equals():
    order = queue("priority")
    rows = [(2, 5), (0, 9), (1, 7), (0, 8), (1, 6)]
    requests = [request(i, priority=p, arrival_ns=t) for i, (p, t) in enumerate(rows)]
    for r in requests:
        order.add(r, r.arrival_ns)
    assert [r.index for r in order] == [3, 1, 4, 2, 0]
    order.take(requests[3], 10)
    order.put_back(requests[3], 20)
    order.remove(requests[4])
    assert served(order) == [3, 1, 2, 0]


@pytest.mark.parametrize("kind", list(QUEUE_ORDERS))
def test_every_order_gives_each_request_once_and_iterates_as_it_serves(kind):
    rng = random.Random(3)
    order = queue(kind)
    waiting, given, now_ns = set(), [], 0
    for index in range(300):
        now_ns += rng.randrange(1000)
        new = request(
            index, prompt=rng.randint(1, 50), output=rng.randint(1, 50), priority=rng.randint(0, 2), arrival_ns=now_ns
        )
        new.queued_ns = now_ns
        order.add(new, now_ns)
        waiting.add(new)
        if rng.random() < 0.3:
            gone = rng.choice(sorted(waiting, key=lambda r: r.index))
            order.remove(gone)
            waiting.remove(gone)
        if waiting and rng.random() < 0.5:
            head = order.head(now_ns)
            assert head is next(iter(order))
            order.take(head, now_ns)
            waiting.remove(head)
            if rng.random() < 0.2:
                order.put_back(head, now_ns)
                waiting.add(head)
            else:
                given.append(head)
        assert len(order) == len(waiting)
        assert set(order) == waiting
    assert len(given) > 50
    assert sorted(served(order, now_ns)) == sorted(r.index for r in waiting)
