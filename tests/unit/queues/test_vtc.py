"""Virtual token counters: who is next, who is lifted, and the paper's bound on the difference in service."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import ScenarioError
from sim.policies.base import EngineLimits
from sim.policies.vtc import Vtc
from sim.queues.base import QUEUE_ORDERS
from sim.request import Request, Status

ACCOUNTS = ["vtc", "vtc_fair", "lcf_fair", "vtc_max_fair", "vtc_oracle", "vtc_len_predict", "mdrr_fair"]
CLASSES = ("a", "b", "c")


def queue(kind, **options):
    cls = QUEUE_ORDERS.load(kind)
    return cls.build(cls.Options(kind=kind, **options), CLASSES)


def request(index, client, prompt=10, output=10):
    return Request(index, prompt, output, class_index=CLASSES.index(client))


def test_a_client_that_comes_late_is_lifted_and_cannot_monopolise_the_engine():
    """Whole log: a has been served 100 when b comes with nothing on its account, so b starts at 100."""
    order = queue("vtc")
    log = []
    backlog = [request(i, "a", prompt=50) for i in range(4)]
    for r in backlog:
        order.add(r, 0)
    for _ in range(2):
        head = order.head(0)
        order.take(head, 0)
        log.append((head.index, order.balances()))
    for r in [request(4, "b", prompt=30), request(5, "b", prompt=30)]:
        order.add(r, 1)
    log.append(("b comes", order.balances()))
    while (head := order.head(1)) is not None:
        order.take(head, 1)
        log.append((head.index, order.balances()))
    assert log == [
        (0, {0: 50.0}),
        (1, {0: 100.0}),
        ("b comes", {0: 100.0, 1: 100.0}),
        (2, {0: 150.0, 1: 100.0}),
        (4, {0: 150.0, 1: 130.0}),
        (5, {0: 150.0, 1: 160.0}),
        (3, {0: 200.0, 1: 160.0}),
    ]


def test_without_the_lift_it_monopolises_the_engine():
    order = queue("lcf_fair")
    for i in range(4):
        order.add(request(i, "a", prompt=50), 0)
    for _ in range(2):
        order.take(order.head(0), 0)
    for i in range(4, 7):
        order.add(request(i, "b", prompt=30), 1)
    assert [r.index for r in order] == [4, 5, 6, 2, 3]


@pytest.mark.parametrize(("kind", "lifted_to"), [("vtc", 10.0), ("vtc_fair", 0.0)])
def test_whom_a_client_is_lifted_to_when_nobody_waits(kind, lifted_to):
    """The paper: to the one that left the queue last; the artifact: to nobody."""
    order = queue(kind)
    for r in [request(0, "a", prompt=3), request(1, "c", prompt=7)]:
        order.add(r, 0)
        order.take(r, 0)
    order.add(request(2, "b"), 0)
    assert order.balance(1) == lifted_to


def test_weights_divide_prices_and_tokens_are_charged_as_they_come():
    order = queue("lcf_fair", weights={"b": 4}, input_price=1, output_price=2)
    rows = [request(0, "a", prompt=8), request(1, "b", prompt=8)]
    for r in rows:
        order.add(r, 0)
        order.take(r, 0)
        order.served(r, 1)
        order.start_decoding(r, 2)
    assert order.balances() == {0: 10.0, 1: 2.5}
    order.advance(3)
    assert order.balances() == {0: 16.0, 1: 4.0}
    order.stop_decoding(rows[0])
    order.advance()
    assert order.balances() == {0: 16.0, 1: 4.5}


def test_a_preempted_request_goes_first_within_its_client_and_pays_its_prompt_once():
    order = queue("vtc")
    for i in range(2):
        order.add(request(i, "a", prompt=5), 0)
    first = order.head(0)
    order.take(first, 0)
    order.put_back(first, 0)
    assert ([r.index for r in order], order.balances()) == ([0, 1], {0: 0.0})
    order.take(first, 0)
    assert order.balances() == {0: 5.0}


def test_foresight_charges_for_the_whole_answer_and_pays_back_what_did_not_come():
    order = queue("vtc_oracle")
    r = Request(0, 10, 3, max_tokens=5)
    order.add(r, 0)
    order.take(r, 0)
    assert order.balance(0) == 10 + 2 * 5
    order.start_decoding(r, 1)
    order.advance(3)
    assert order.balance(0) == 20
    order.stop_decoding(r)
    order.released(r, 3)
    assert order.balance(0) == 10 + 2 * 3


def test_the_usual_answer_is_a_mean_that_starts_at_the_first_one():
    order = queue("vtc_len_predict")
    for index, num_outputs in enumerate([10, 20, 5]):
        r = request(index, "a")
        order.add(r, 0)
        order.take(r, 0)
        order.released(r, num_outputs)
    assert order.usual_outputs == {0: ((10 * 4 + 20) / 5 * 4 + 5) / 5}


@pytest.mark.parametrize("kind", ACCOUNTS)
@pytest.mark.parametrize("weights", [{}, {"a": 3, "b": 0.7}])
def test_accounts_kept_by_changes_equal_accounts_kept_token_by_token(kind, weights):
    """Asking for every balance after every tick must change nothing, to the last bit."""
    rng = random.Random(5)
    lazy, asked = queue(kind, weights=weights), queue(kind, weights=weights)
    waiting, decoding = [], []
    for index in range(200):
        r = request(index, rng.choice("abc"), prompt=rng.randint(1, 40), output=rng.randint(1, 40))
        calls = [("add", r, index)]
        waiting.append(r)
        if rng.random() < 0.6:
            head = lazy.head(index)
            assert head is asked.head(index)
            if head is not None:
                waiting.remove(head)
                decoding.append(head)
                calls += [("take", head, index), ("start_decoding", head, 1)]
        if len(decoding) > 8:
            gone = decoding.pop(rng.randrange(8))
            calls += [("stop_decoding", gone), ("released", gone, 4)]
        calls.append(("advance", rng.randint(1, 5)))
        for name, *args in calls:
            getattr(lazy, name)(*args)
            if name == "advance":
                for _ in range(args[0]):
                    asked.advance()
                    asked.balances()
            else:
                getattr(asked, name)(*args)
    assert lazy.balances() == asked.balances()
    assert len({*lazy.balances().values()}) == 3


class Server:
    """As little of an engine as the paper assumes: a batch of at most so many tokens, joined whenever there is room."""

    def __init__(self, order, capacity_tokens):
        self.order, self.capacity_tokens = order, capacity_tokens
        self.running = {}
        self.service = dict.fromkeys(range(len(CLASSES)), 0.0)
        self.num_admitted = [0, 0]
        self.paths = []

    def step(self, input_price, output_price):
        held = sum(r.prompt_tokens + r.output_tokens for r in self.running)
        order = self.order
        while (head := order.head(0)) and held + head.prompt_tokens + head.output_tokens <= self.capacity_tokens:
            held += head.prompt_tokens + head.output_tokens
            order.take(head, 0)
            order.start_decoding(head, 1)
            self.running[head] = 0
            self.num_admitted[head.class_index] += 1
            self.service[head.class_index] += input_price * head.prompt_tokens
            self.paths.append(self.service[0] - self.service[1])
        order.advance()
        for r in list(self.running):
            self.running[r] += 1
            self.service[r.class_index] += output_price
            if self.running[r] == r.output_tokens:
                del self.running[r]
                order.stop_decoding(r)
                order.released(r, r.output_tokens)
        self.paths.append(self.service[0] - self.service[1])


def spread(kind, seed, input_price, output_price):
    """The largest difference in service that two clients, who both always wait, get within any interval."""
    rng = random.Random(seed)
    prices = {} if kind == "fcfs" else {"input_price": input_price, "output_price": output_price}
    order = queue(kind, **prices)
    server = Server(order, capacity_tokens=200)
    for index in range(300):
        client = "a" if index < 150 else "b"
        longest = 80 if client == "a" else rng.choice([8, 80])
        order.add(request(index, client, prompt=rng.randint(1, longest), output=rng.randint(1, longest)), 0)
    while max(server.num_admitted) < 149:
        server.step(input_price, output_price)
    return max(server.paths) - min(server.paths)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), input_price=st.sampled_from([0.5, 1, 2]))
def test_two_clients_who_always_wait_get_service_within_the_papers_bound(seed, input_price):
    """2 max(input price × longest prompt, output price × tokens of a batch); input tokens must not cost more."""
    output_price = 2
    bound = 2 * max(input_price * 80, output_price * 200)
    assert spread("vtc", seed, input_price, output_price) <= bound


def test_first_come_first_served_exceeds_the_bound():
    assert spread("fcfs", 1, 1, 2) > 5 * 2 * max(80, 2 * 200)


def test_an_unknown_class_among_the_weights_is_refused():
    options = Vtc.Options(policy="vtc", queue_order={"kind": "vtc_fair", "weights": {"chatt": 2.0}})
    with pytest.raises(ScenarioError) as caught:
        Vtc.build(options, EngineLimits(100, 1, 100, ("chat", "batch")))
    assert str(caught.value) == (
        "engine.queue_order.weights: no request class is called 'chatt'; classes: chat, batch. Did you mean 'chat'?"
    )


def engine(num_tokens=200, **options):
    return Vtc.build(
        Vtc.Options.model_validate({"policy": "vtc", **options}), EngineLimits(10_000, 1, num_tokens, CLASSES)
    )


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (20, 79, None),
        (20, 80, "it takes 100 tokens of the pool, which must stay below 100"),
        (51, 1, "its prompt of 51 tokens exceeds batch_max_tokens 50"),
        (10_000, 1, "its prompt of 10000 tokens leaves no room for an answer within max_model_len 10000"),
    ],
)
def test_what_can_never_run(prompt, output, expected):
    policy = engine(num_tokens=100, batch_max_tokens=50)
    assert policy.never_fits(Request(0, prompt, output)) == expected


def test_the_queue_is_asked_after_so_many_decode_steps_and_mini_batches_run_alone():
    """Whole log of batches: prompt tokens or 1 for each member."""
    policy = engine(max_wait_tokens=2)
    arrivals = {0: [request(0, "a", 10, 8)], 1: [request(1, "a", 20, 2), request(2, "b", 30, 1)]}
    log = []
    for step_number in range(10):
        for r in arrivals.get(step_number, ()):
            policy.add(r)
        step = policy.plan(0)
        log.append([(r.index, num_tokens) for r, num_tokens in policy.batch(step)])
        policy.update(step)
        policy.check_integrity()
    assert log == [
        [(0, 10)],
        [(0, 1)],
        [(0, 1)],
        [(2, 30), (1, 20)],
        [(0, 1), (1, 1)],
        *[[(0, 1)]] * 4,
        [],
    ]


def test_a_client_that_leaves_a_running_request_gets_rid_of_it_after_its_next_pass():
    policy = engine()
    running, waiting = request(0, "a", 10, 8), request(1, "b", 195, 1)
    for r in (running, waiting):
        policy.add(r)
    policy.update(policy.plan(0))
    assert (policy.cancel(running), policy.cancel(waiting)) == (False, True)
    assert (policy.num_unfinished, policy.waiting(), policy.running()) == (1, [], [running])
    finished = policy.update(policy.plan(0))
    assert (finished.finished, finished.released) == ([], [running])
    assert (policy.free_blocks, running.status, waiting.status) == (200, Status.OVER, Status.OVER)
    assert policy.plan(0).is_empty


def test_round_robin_lets_a_client_that_owes_pass_its_turns():
    order = queue("mdrr_fair", quantum=20)
    for index, client in enumerate("aaabb"):
        order.add(request(index, client, prompt=30), 0)
    served = []
    while (head := order.head(0)) is not None:
        order.take(head, 0)
        served.append(head.index)
    assert served == [0, 3, 1, 4, 2]
    assert all(served.index(i) < served.index(j) for i, j in pairwise([0, 1, 2]))
