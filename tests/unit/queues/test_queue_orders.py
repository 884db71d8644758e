"""Queue orders: who is next, and what leaving and coming back do to the others."""

import math
import random
import statistics
from collections import Counter

import pytest
from pydantic import ValidationError

from sim.errors import ScenarioError
from sim.policies.base import EngineLimits
from sim.policies.vtc import Vtc
from sim.queues.base import QUEUE_ORDERS, Setting
from sim.queues.prediction import PREDICTIONS
from sim.request import Request

ONE_CLASS = Setting(("all",))
NEEDED = {"priority_aging": {"age_s": 1e-6}}
"""Options without a default."""


def queue(kind, setting=ONE_CLASS, **options):
    cls = QUEUE_ORDERS.load(kind)
    return cls.build(cls.Options.model_validate({"kind": kind, **NEEDED.get(kind, {}), **options}), setting)


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
            assert head is order.head(now_ns) is next(iter(order))
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


def overtakings(order, seed):
    """Pairs (passed, passing) of random arrivals in a queue that is served more slowly than they come."""
    rng = random.Random(seed)
    now_ns, pairs, waiting, num_served = 0, [], set(), 0
    for index in range(400):
        now_ns += rng.randrange(1000)
        new = request(index, priority=rng.randint(0, 3), arrival_ns=now_ns)
        order.add(new, now_ns)
        waiting.add(new)
        if rng.random() < 0.8:
            head = order.head(now_ns)
            order.take(head, now_ns)
            waiting.remove(head)
            pairs += [(other, head) for other in waiting if other.index < head.index]
            num_served += 1
    assert num_served > 200
    return pairs


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("age_ns", [100, 5000])
def test_with_aging_nobody_is_passed_by_one_who_comes_later_than_the_age_of_their_priorities(seed, age_ns):
    """The bound on the wait: all that may be served before a request has arrived by then."""
    pairs = overtakings(queue("priority_aging", age_s=age_ns / 1e9), seed)
    assert pairs
    for passed, passing in pairs:
        assert passing.arrival_ns - passed.arrival_ns <= age_ns * (passed.priority - passing.priority)


def test_without_aging_there_is_no_such_bound():
    pairs = overtakings(queue("priority"), 1)
    assert max(passing.arrival_ns - passed.arrival_ns for passed, passing in pairs) > 50_000


def answers(lengths, order):
    for index, (prompt, output) in enumerate(lengths):
        order.add(request(index, prompt=prompt, output=output, arrival_ns=index), index)
    return order


def test_shortest_first_goes_by_the_answer_and_not_by_max_tokens():
    order = queue("sjf")
    order.add(Request(0, 10, 30, max_tokens=30), 0)
    order.add(Request(1, 10, 20, max_tokens=50), 0)
    order.add(Request(2, 10, 99, max_tokens=10), 0)
    assert served(order) == [2, 1, 0]


@pytest.mark.parametrize(("kind", "expected"), [("sjf", [1, 0]), ("srpt", [0, 1])])
def test_what_a_preempted_request_has_already_got_counts_for_the_rest(kind, expected):
    order = answers([(1, 30), (1, 20)], queue(kind))
    preempted = next(r for r in order if r.index == 0)
    order.take(preempted, 5)
    preempted.num_output_tokens = 15
    order.put_back(preempted, 6)
    assert served(order) == expected


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ({"kind": "oracle"}, [5, 64, 65, 1024, 2000]),
        ({"kind": "bucket", "edges": [64, 1024]}, [64, 64, 1024, 1024, 2048]),
    ],
)
def test_predictions_without_error(prediction, expected):
    cls = PREDICTIONS.load(prediction["kind"])
    predictor = cls.build(cls.Options(**prediction))
    assert [predictor.outputs(request(0, output=n)) for n in (5, 64, 65, 1024, 2000)] == expected


def test_errors_of_predictions_are_as_large_as_they_say_and_the_same_every_time():
    cls = PREDICTIONS.load("lognormal")
    predictor, again = (cls.build(cls.Options(kind="lognormal", sigma=0.4)) for _ in range(2))
    errors = [math.log(predictor.outputs(request(i, output=100)) / 100) for i in range(1000)]
    assert errors == [math.log(again.outputs(request(i, output=100)) / 100) for i in range(1000)]
    assert abs(statistics.mean(errors)) < 0.05
    assert 0.37 < statistics.stdev(errors) < 0.43

    cls = PREDICTIONS.load("bucket")
    predictor = cls.build(cls.Options(kind="bucket", edges=(10, 100), accuracy=0.7))
    named = Counter(predictor.outputs(request(i, output=50)) for i in range(1000))
    assert named.keys() == {10, 100, 200}
    assert 650 < named[100] < 750


CLASSES = ("chat", "batch")


def quotas(num_slots=10, kv_tokens=1000, **options):
    return queue("quotas", Setting(CLASSES, num_slots, kv_tokens), **options)


def flood(order, num_chat=20, num_batch=20, size=10):
    """Batch comes first, then chat; each request may come to hold `2 * size` tokens."""
    for index in range(num_chat + num_batch):
        class_index = int(index < num_batch)
        order.add(request(index, prompt=size, output=size, class_index=class_index, arrival_ns=index), index)


def admit(order, num_slots=10):
    """Class of each request that is admitted while there are slots."""
    admitted = []
    while len(admitted) < num_slots and (head := order.head(0)) is not None:
        order.take(head, 0)
        admitted.append(head)
    return admitted


def by_class(admitted):
    return Counter(CLASSES[r.class_index] for r in admitted)


def test_without_quotas_the_first_who_come_have_everything():
    order = quotas()
    flood(order)
    assert by_class(admit(order)) == {"batch": 10}


def test_a_floor_is_kept_for_its_class_and_a_ceiling_is_not_exceeded():
    order = quotas(classes={"chat": {"slots": {"floor": 0.3}}})
    flood(order)
    assert by_class(admit(order)) == {"chat": 3, "batch": 7}
    order = quotas(classes={"batch": {"slots": {"ceiling": 0.4}}})
    flood(order, num_chat=2)
    assert by_class(admit(order)) == {"chat": 2, "batch": 4}


@pytest.mark.parametrize(("share", "part"), [(0.29, 29), (0.57, 57), (0.299, 29), (0.0, 0), (1.0, 100)])
def test_a_floor_is_the_part_that_its_decimal_fraction_says(share, part):
    order = quotas(num_slots=100, kv_tokens=10**6, classes={"chat": {"slots": {"floor": share}}})
    flood(order, num_chat=100, num_batch=100)
    expected = {"chat": part, "batch": 100 - part}
    assert by_class(admit(order, 100)) == {name: number for name, number in expected.items() if number}


def test_kv_has_quotas_of_its_own():
    order = quotas(kv_tokens=100, classes={"chat": {"kv": {"floor": 0.4}}})
    flood(order)
    assert by_class(admit(order)) == {"chat": 2, "batch": 3}


@pytest.mark.parametrize(("borrow", "num_batch"), [(True, 10), (False, 7)])
def test_an_idle_floor_is_lent_or_held_back(borrow, num_batch):
    order = quotas(classes={"chat": {"slots": {"floor": 0.3}}}, borrow=borrow)
    flood(order, num_chat=0)
    assert by_class(admit(order)) == {"batch": num_batch}


def test_what_was_lent_comes_back_as_requests_end():
    order = quotas(classes={"chat": {"slots": {"floor": 0.3}}})
    flood(order, num_chat=0)
    running = admit(order)
    order.add(request(99, arrival_ns=99), 99)
    order.released(running[0], 10)
    head = order.head(100)
    assert (head.index, CLASSES[head.class_index]) == (99, "chat")


def test_a_preempted_request_gives_its_quota_back():
    order = quotas(classes={"batch": {"slots": {"ceiling": 0.1}}})
    flood(order, num_chat=0, num_batch=2)
    [running] = admit(order)
    assert order.head(0) is None
    order.put_back(running, 0)
    assert order.head(0) is running


def test_a_request_that_is_larger_than_its_ceiling_runs_alone_in_its_class():
    order = quotas(kv_tokens=100, classes={"batch": {"kv": {"ceiling": 0.1}}})
    flood(order, num_chat=0, num_batch=2)
    assert by_class(admit(order)) == {"batch": 1}


@pytest.mark.parametrize(
    ("queue_order", "message"),
    [
        (
            {"kind": "quotas", "classes": {"a": {"slots": {"floor": 0.7}}, "b": {"slots": {"floor": 0.6}}}},
            "the floors of slots add up to 1.3, which is more than the whole",
        ),
        (
            {"kind": "quotas", "classes": {"a": {"kv": {"floor": 0.7, "ceiling": 0.5}}}},
            "the floor 0.7 is above the ceiling 0.5",
        ),
        ({"kind": "vtc", "weights": {"a": -1.0}}, "Input should be greater than"),
        ({"kind": "vtc", "weights": {"a": 1e-320}}, "Input should be greater than or equal to 0.000001"),
        ({"kind": "mdrr_fair", "quantum": 1e-320}, "Input should be greater than or equal to 0.000001"),
        ({"kind": "triton", "timeout_ms_by_level": {1: 1e14}}, "Input should be less than or equal to 1000000000000"),
        ({"kind": "edf", "by_class": {"a": 1e14}}, "Input should be less than or equal to 1000000000000"),
        ({"kind": "mlfq", "quantum_ms": 1e-6}, "Input should be greater than or equal to 0.001"),
        ({"kind": "sjf", "prediction": {"kind": "bucket", "edges": [9, 5]}}, "the edges [9, 5] do not rise"),
        ({"kind": "priority_aging", "age_s": 0.0}, "Input should be greater than 0"),
        ({"kind": "fifo"}, "unknown queue order 'fifo'; known: fcfs, priority, "),
    ],
)
def test_options_that_make_no_sense_are_refused(queue_order, message):
    with pytest.raises(ValidationError) as caught:
        Vtc.Options.model_validate({"policy": "vtc", "queue_order": queue_order})
    assert next(error["msg"] for error in caught.value.errors()).startswith(message)


def test_the_next_change_of_tritons_levels_is_never_in_the_past():
    order = queue("triton", priority_levels=2, default_timeout_ms=1.0)
    for index, (priority, queued_ns) in enumerate([(1, 0), (2, 400_000), (1, 900_000)]):
        new = request(index, priority=priority)
        new.queued_ns = queued_ns
        order.add(new, queued_ns)
    times_ns = (0, 999_999, 1_000_000, 1_500_000, 1_900_000)
    assert [order.next_change_ns(now_ns) for now_ns in times_ns] == [1_000_000, 1_000_000, 1_400_000, 1_900_000, None]


@pytest.mark.parametrize(
    ("queue_order", "place"),
    [
        ({"kind": "quotas", "classes": {"chta": {}}}, "engine.queue_order.classes"),
        ({"kind": "edf", "by_class": {"chta": 1.0}}, "engine.queue_order.by_class"),
    ],
)
def test_classes_that_the_traffic_does_not_have_are_refused(queue_order, place):
    options = Vtc.Options.model_validate({"policy": "vtc", "queue_order": queue_order})
    with pytest.raises(ScenarioError) as caught:
        Vtc.build(options, EngineLimits(100, 1, 100, CLASSES))
    assert str(caught.value) == (
        f"{place}: no request class is called 'chta'; classes: chat, batch. Did you mean 'chat'?"
    )
