"""Accounts of clients under preemption, cancellation and extreme prices."""

import numpy as np
import pytest

from sim.clock import NS_PER_MS
from sim.queues.base import QUEUE_ORDERS, Setting
from sim.request import Request, Status
from tests.unit.queues.small import simulate

CLASSES = ("a", "b")
INPUT_PRICE, OUTPUT_PRICE = 1.0, 2.0


def queue(kind, **options):
    cls = QUEUE_ORDERS.load(kind)
    return cls.build(cls.Options(kind=kind, **options), Setting(CLASSES))


def preempt(order, victim, num_outputs):
    """It has got so many outputs since it was admitted, the first of them from its prefill."""
    order.served(victim, 1)
    order.start_decoding(victim, 2)
    order.advance(num_outputs - 1)
    order.stop_decoding(victim)
    victim.num_output_tokens += num_outputs
    victim.status = Status.PREEMPTED
    order.put_back(victim, 1)


KINDS = ["vtc", "vtc_fair", "lcf_fair", "vtc_max_fair", "vtc_oracle", "mdrr_fair"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_preempted_request_got_is_charged_once_and_not_lost_when_its_client_leaves(kind):
    """A prompt of 10 and an answer of 20, of which 5 tokens exist at the preemption: 10 and 2 × 5, or 2 × 20 later."""
    order, victim = queue(kind), Request(0, 10, 20)
    order.add(victim, 0)
    order.take(order.head(0), 0)
    granted = order.balance(0) - (10 + 2 * 20 if kind == "vtc_oracle" else 10)  # round robin's quantum
    preempt(order, victim, 5)
    assert order.balance(0) - granted == OUTPUT_PRICE * 5
    twin = queue(kind)
    order.remove(victim)
    assert order.balance(0) - granted == INPUT_PRICE * 10 + OUTPUT_PRICE * 5

    again = Request(1, 10, 20)
    twin.add(again, 0)
    twin.take(twin.head(0), 0)
    preempt(twin, again, 5)
    twin.take(again, 2)
    twin.start_decoding(again, 6)
    twin.advance(15)
    twin.stop_decoding(again)
    twin.released(again, 20)
    assert twin.balance(0) - granted == INPUT_PRICE * 10 + OUTPUT_PRICE * 20


@pytest.mark.parametrize("kind", ["vtc_oracle", "vtc_len_predict"])
def test_a_prediction_is_forgotten_with_its_request(kind):
    order, requests = queue(kind), [Request(i, 10, 20) for i in range(2)]
    for request in requests:
        order.add(request, 0)
        order.take(request, 0)
        preempt(order, request, 5)
    order.remove(requests[0])
    order.take(requests[1], 2)
    order.released(requests[1], 5)
    assert (order._predicted, order._num_charged) == ({}, {})


def test_a_request_that_leaves_before_its_first_admission_costs_nothing():
    order, request = queue("vtc"), Request(0, 10, 20)
    order.add(request, 0)
    order.remove(request)
    assert order.balances() == {0: 0.0}


@pytest.mark.parametrize("price", [1.0, 1e6, 1e14])
def test_round_robin_pays_off_any_debt_at_once(price):
    """Client a owes twice as much as b, so b has its turn first, after as many rounds as its debt has quanta."""
    order = queue("mdrr_fair", input_price=price, quantum=1.0)
    for index, (client, prompt) in enumerate([(0, 2048), (1, 1024), (0, 1), (1, 1)]):
        order.add(Request(index, prompt, 1, class_index=client), 0)
    served = []
    while (head := order.head(0)) is not None:
        order.take(head, 0)
        served.append(head.index)
    assert served == [0, 1, 3, 2]


def test_rounds_that_are_skipped_are_those_that_would_be_played(monkeypatch):
    def log():
        order, rows = queue("mdrr_fair", quantum=0.25), []
        for index in range(40):
            order.add(Request(index, 7 * index % 31 + 1, 1, class_index=index % 3 % 2), 0)
        while (head := order.head(0)) is not None:
            order.take(head, 0)
            rows.append((head.index, order.balances(), order.turns()))
        return rows

    skipped = log()
    monkeypatch.setattr("sim.queues.mdrr.MANY_ROUNDS", 10**9)
    assert log() == skipped


@pytest.mark.parametrize("policy", ["sarathi", "vllm-v0", "orca", "vtc"])
@pytest.mark.parametrize("kind", ["vtc", "vtc_max_fair", "mdrr_fair"])
def test_what_clients_owe_is_the_same_when_many_steps_are_taken_at_once(policy, kind):
    """Where an attempt to admit changes accounts, or is not made as nobody waits."""
    slots = {"orca": "max_batch_size", "vtc": "running_max_req_size"}.get(policy, "max_num_seqs")
    options = {slots: 1, "queue_order": {"kind": kind} | ({"quantum": 20.0} if kind == "mdrr_fair" else {})}
    for seed in range(5):
        rng = np.random.default_rng(seed)
        columns = [rng.integers(1, 6, 40), rng.integers(1, 15, 40), rng.integers(0, 2, 40)]
        arrival_ns = rng.exponential(NS_PER_MS * 10, 40).cumsum().astype(int)
        tables = []
        for macro_steps in (True, False):
            requests = [
                Request(i, *lengths, class_index=client, arrival_ns=at_ns)
                for i, (*lengths, client, at_ns) in enumerate(
                    zip(*[c.tolist() for c in [*columns, arrival_ns]], strict=True)
                )
            ]
            tables.append(simulate(policy, requests, 60, macro_steps, **options).requests)
        assert all(np.array_equal(tables[0][name], tables[1][name]) for name in tables[0])
