"""Who is preempted when KV runs out, and where they wait: whole logs that can be checked by hand."""

import itertools

import numpy as np
import pytest

from sim.policies.grid.victims import Standing, choose
from tests.laws import test_laws as laws
from tests.unit.grid.stepwise import engine, log, request


def three():
    """They come one step after the other; b is the latest arrival, and has the largest priority.

    On blocks of 4 a needs its third block in step 4, b and c their second ones in steps 2 and 3, b its third one
    in step 6, when a has 6 answers, b 5 and c 4.
    """
    a = request("a", 5, 9, queued_ns=0, priority=1)
    b = request("b", 4, 8, queued_ns=2, priority=2)
    c = request("c", 4, 7, queued_ns=1)
    return {0: [a], 1: [b], 2: [c]}


BEFORE = [
    ("a5", "", "", 2, 2),
    ("a1 b4", "", "", 1, 3),
    ("a1 b1 c4", "", "", 2, 5),
    ("a1 b1 c1", "", "", 1, 6),
    ("a1 b1 c1", "", "", 1, 7),
    ("a1 b1 c1", "", "", 0, 7),
]
V1 = {"async_scheduling": False, "enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("victim", "step_6"),
    [
        ("own", ("a1 b1", "c for b", "c", 1, 6)),
        # a has its token and its turn already: it loses both, and c has its own turn still
        ("oldest", ("b1 c1", "a for b", "a", 1, 5)),
        ("fewest_outputs", ("a1 b1", "c for b", "c", 1, 6)),
        ("most_blocks", ("b1 c1", "a for b", "a", 1, 5)),
        # b gives itself up, and c behind it has its turn
        ("newest", ("a1 c1", "b for b", "b", 0, 5)),
        ("lowest_priority", ("a1 c1", "b for b", "b", 0, 5)),
        ("itself", ("a1 c1", "b for b", "b", 0, 5)),
    ],
)
def test_vllm_v1_preempts_whom_the_rule_names(victim, step_6):
    core = engine("vllm-v1", 8, victim=victim, **V1)  # of 8 blocks one is the null block
    assert log(core, three(), num_steps=7) == [*BEFORE, step_6]


TWO_AFTER_ONE = [
    ("own", ("a1 b1", "c for c", "c", 1, 5)),
    ("fewest_outputs", ("a1 b1", "c for c", "c", 1, 5)),
    ("itself", ("a1 b1", "c for c", "c", 1, 5)),
    # b loses the token and the third block that this very step gave it
    ("newest", ("a1 c1", "b for c", "b", 1, 5)),
    ("lowest_priority", ("a1 c1", "b for c", "b", 1, 5)),
    ("most_blocks", ("a1 c1", "b for c", "b", 1, 5)),
    ("oldest", ("b1 c1", "a for c", "a", 2, 6)),
]


@pytest.mark.parametrize(("victim", "step_2"), TWO_AFTER_ONE)
def test_a_victim_that_was_served_is_taken_out_of_the_step(victim, step_2):
    """In step 2 b needs a third block and finds the last one, then c needs one and stands last."""
    core = engine("vllm-v0", 7, victim=victim, watermark=0.0, enable_chunked_prefill=True)
    a = request("a", 5, 9, queued_ns=0, priority=1)
    b = request("b", 8, 8, queued_ns=2, priority=2)
    c = request("c", 8, 7, queued_ns=1)
    before = [("a5", "", "", 2, 2), ("b8 c8 a1", "", "", 4, 6)]
    assert log(core, {0: [a], 1: [b, c]}, num_steps=3) == [*before, step_2]


def test_sarathi_orders_those_who_run_by_arrival_and_asks_the_rule_all_the_same():
    core = engine("sarathi", 7, victim="oldest", watermark=0.0)
    a, b, c = request("a", 5, 4, queued_ns=0), request("b", 8, 3, queued_ns=1), request("c", 8, 3, queued_ns=2)
    assert log(core, {0: [a], 1: [b, c]}) == [
        ("a5", "", "", 2, 2),
        ("b8 c8 a1", "", "", 4, 6),
        # b takes the last block; c needs one, and a has had its turn
        ("b1 c1", "a for c", "a", 2, 6),
        ("b1 c1", "", "a", 0, 6),
        # 5 of its prompt and 2 of its answer
        ("a7", "", "", 2, 2),
        ("a1", "", "", 0, 2),
    ]


def test_the_token_of_a_victim_goes_back_to_the_budget():
    core = engine("sarathi", 17, victim="oldest", watermark=0.0, chunk_size=20)
    a, b, c = request("a", 5, 4, queued_ns=0), request("b", 8, 3, queued_ns=1), request("c", 8, 3, queued_ns=2)
    d = request("d", 40, 1, queued_ns=3)
    assert log(core, {0: [a], 1: [b, c, d]}, num_steps=3) == [
        ("a5", "", "", 2, 2),
        ("b8 c8 d3 a1", "", "", 14, 16),
        # two decode, 18 tokens are left
        ("d18 b1 c1", "a for c", "a", 2, 16),
    ]


def standing(name, num_output_tokens, num_blocks, **given):
    facts = {"prompt_tokens": 4, "queued_ns": 0, "priority": 0, "has_yielded": True, "is_requester": False} | given
    made = request(name, facts["prompt_tokens"], 99, queued_ns=facts["queued_ns"], priority=facts["priority"])
    return Standing(made, num_output_tokens, num_blocks, facts["has_yielded"], facts["is_requester"])


@pytest.mark.parametrize(
    ("rule", "running", "victim"),
    [
        # (outputs, prompt) = (50, 10), (5, 100), (5, 900): SGLang retracts the third
        (
            "fewest_outputs",
            [
                standing("a", 50, 4, prompt_tokens=10),
                standing("b", 5, 7, prompt_tokens=100),
                standing("c", 5, 57, prompt_tokens=900),
                standing("d", 6, 99, prompt_tokens=1500),
            ],
            "c",
        ),
        ("fewest_outputs", [standing("a", 5, 3), standing("b", 5, 2), standing("c", 6, 9)], "b"),
        ("newest", [standing("b", 9, 9, queued_ns=7), standing("a", 9, 9, queued_ns=7), standing("c", 0, 1)], "b"),
        ("oldest", [standing("b", 0, 1), standing("a", 0, 1), standing("c", 0, 1, queued_ns=7)], "a"),
        (
            "lowest_priority",
            [
                standing("a", 1, 1, priority=3, queued_ns=1),
                standing("b", 1, 1, priority=3),
                standing("c", 9, 9, priority=2, queued_ns=9),
            ],
            "a",
        ),
        # what would be lost for nothing: a piece of a prompt that has yielded no token
        ("most_blocks", [standing("a", 1, 3), standing("b", 0, 9, has_yielded=False), standing("c", 1, 2)], "a"),
        ("most_blocks", [standing(name, 0, 9 - i, has_yielded=False) for i, name in enumerate("abc")], "c"),
        ("itself", [standing("a", 1, 1), standing("b", 1, 1, is_requester=True), standing("c", 1, 1)], "b"),
        ("itself", [standing("a", 0, 1, is_requester=True, has_yielded=False), standing("b", 1, 1)], "b"),
    ],
)
def test_whom_each_rule_chooses(rule, running, victim):
    assert choose(rule, running).id == victim


@pytest.mark.parametrize("traffic", ["poisson", "closed loop", "leaves after a time"])
def test_lowest_priority_with_that_queue_order_is_vllms_priority_scheduling(traffic):
    common = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "enable_prefix_caching": False}
    moved = {"queue_order": {"kind": "priority"}, "victim": "lowest_priority"}
    given = (laws.POOLS["tight"], laws.TRAFFIC[traffic])
    own = laws.simulate("vllm-v1", common | {"scheduling_policy": "priority"}, *given).tables
    by_axes = laws.simulate("vllm-v1", common | moved, *given).tables
    assert own.requests["num_preemptions"].sum() > 5
    for name in ("iterations", "chunks", "requests", "segments"):
        one, other = getattr(own, name), getattr(by_axes, name)
        differing = [column for column in one if one[column].tolist() != other[column].tolist()]
        assert differing == []


def four():
    """Three at once, and one that finds no slot."""
    a, b, c = request("a", 4, 10, queued_ns=0), request("b", 4, 10, queued_ns=1), request("c", 4, 12, queued_ns=2)
    return {0: [a, b, c], 1: [request("d", 4, 2, queued_ns=3)]}


TWO_VICTIMS = [
    ("a4 b4 c4", "", "", 3, 3),
    ("a1 b1 c1", "", "d", 3, 6),
    *[("a1 b1 c1", "", "d", 0, 6)] * 3,
]
"""Six blocks of 4, three slots: a, b and c outgrow two blocks each in step 5, while d waits."""


@pytest.mark.parametrize(
    ("place", "rest"),
    [
        (
            "front",
            [
                ("b1 c1", "a for a", "ad", 2, 6),
                *[("b1 c1", "", "ad", 0, 6)] * 3,
                # b, who came after a, stands before it, and is taken back with its 4 blocks first
                ("c1", "b for b", "bad", 1, 4),
                *[("c1", "", "bad", 0, 4)] * 2,
                ("b13", "", "ad", 4, 4),
                ("a9 d4", "", "", 4, 4),
                ("a1 d1", "", "", 1, 5),
                *[("a1", "", "", 0, 3)] * 2,
                ("a1", "", "", 1, 4),
            ],
        ),
        (
            "tail",
            [
                ("b1 c1", "a for a", "da", 2, 6),
                *[("b1 c1", "", "da", 0, 6)] * 3,
                ("c1", "b for b", "dab", 1, 4),
                # the block that d needs is free, the 3 of a are not
                ("c1 d4", "", "ab", 1, 5),
                ("c1 d1", "", "ab", 1, 6),
                ("a9", "", "b", 3, 3),
                *[("a1", "", "b", 0, 3)] * 3,
                ("a1", "", "b", 1, 4),
                ("b13", "", "", 4, 4),
            ],
        ),
        (
            "arrival_order",
            [
                ("b1 c1", "a for a", "ad", 2, 6),
                *[("b1 c1", "", "ad", 0, 6)] * 3,
                ("c1", "b for b", "abd", 1, 4),
                *[("c1", "", "abd", 0, 4)] * 2,
                ("a9", "", "bd", 3, 3),
                *[("a1", "", "bd", 0, 3)] * 3,
                ("a1", "", "bd", 1, 4),
                ("b13 d4", "", "", 5, 5),
                ("d1", "", "", 1, 2),
            ],
        ),
    ],
)
def test_where_victims_wait(place, rest):
    core = engine("vllm-v1", 7, victim="oldest", victim_goes_to=place, max_num_seqs=3, **V1)
    assert log(core, four()) == [*TWO_VICTIMS, *rest]


@pytest.mark.parametrize(
    ("place", "rest"),
    [
        ("front", [*[("b1 c1", "", "ad", 0, 6)] * 3, ("c1", "b for c", "bad", 1, 4), ("c1", "", "bad", 0, 4)]),
        # a's 9 tokens find their 3 blocks, b's 13 tokens their 4 not
        ("arrival_order", [*[("b1 c1", "", "ad", 0, 6)] * 3, ("c1", "b for c", "abd", 1, 4), ("a9", "", "bd", 3, 7)]),
        (
            "tail",
            [
                ("d4", "", "a", 1, 7),
                ("c1 d1", "b for b", "ab", 1, 5),
                ("a9", "", "b", 3, 6),
                *[("c1 a1", "", "b", 0, 6)] * 2,
            ],
        ),
    ],
)
def test_where_victims_wait_in_engines_of_the_grid(place, rest):
    """The same on 7 blocks: vllm-v0 wants a free block for every decode, and prefills in steps of their own."""
    core = engine("vllm-v0", 7, victim="oldest", victim_goes_to=place, max_num_seqs=3, watermark=0.0)
    step_5 = ("b1 c1", "a for b", "da" if place == "tail" else "ad", 2, 6)
    assert log(core, four(), num_steps=11) == [*TWO_VICTIMS, step_5, *rest]


@pytest.mark.parametrize("victim", ["own", "oldest", "most_blocks"])
def test_what_is_in_flight_for_a_victim_is_nobodys_token(victim):
    """A request goes from lane to lane of the pipeline, and may be back in its own when it is preempted."""
    num_preemptions = 0
    for seed, num_stages in itertools.product(range(20, 27), (2, 4)):
        answers = np.random.default_rng(seed).integers(1, 13, laws.NUM_REQUESTS)
        traffic = laws.traffic_of(**laws.AFTER_THINKING, output_tokens=answers)
        options = {"max_num_seqs": 4, "pipeline_parallel_size": num_stages, "victim": victim}
        run = laws.simulate("sarathi-vllm", options, laws.POOLS["tight"], traffic)
        assert run.tables.requests["output_tokens"].tolist() == run.asked.tolist()
        num_preemptions += run.tables.requests["num_preemptions"].sum()
    assert num_preemptions > 100
