"""Common prefixes and conversations: how they are drawn, sent, and found again by a prefix cache."""

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from sim.clients import Clients
from sim.clock import NS_PER_MS, NS_PER_S, Clock
from sim.core import EngineCore
from sim.cost.linear import Linear, LinearOptions
from sim.engine import Engine
from sim.errors import ScenarioError
from sim.policies.base import POLICIES, EngineLimits
from sim.record import Recorder
from sim.request import NEVER, Outcome
from sim.tokens import BlockKeys, Run
from sim.workload.draw import draw_traffic
from sim.workload.traffic import TrafficClass

EVERY_SECOND = {"kind": "constant", "rate_per_s": 1}
POISSON = {"kind": "poisson", "rate_per_s": 5.0}
RANDOM = {
    "prompt_tokens": {"kind": "uniform", "low": 1, "high": 10**6},
    "output_tokens": {"kind": "uniform", "low": 1, "high": 10**6},
}
SOME_TURNS = {"turns": {"kind": "uniform", "low": 1, "high": 5}, "think_time_s": {"kind": "exponential", "mean_s": 2}}
COLUMNS = (
    *("class_index", "arrival_ns", "think_ns", "prompt_tokens", "output_tokens", "max_tokens", "priority"),
    *("cancel_after_ns", "cancel_after_tokens", "leaves_at_deadline"),
)


def a_class(**fields):
    return {"name": "c", "arrivals": EVERY_SECOND, "prompt_tokens": 10, "output_tokens": 5, **fields}


def draw(*classes, arrivals=None, num=None, duration_s=None, seed=1):
    models = [TrafficClass.model_validate(fields) for fields in classes]
    if arrivals is not None:
        arrivals = TrafficClass.model_validate(a_class(arrivals=arrivals)).arrivals
    duration_ns = None if duration_s is None else round(duration_s * NS_PER_S)
    return draw_traffic(models, arrivals=arrivals, num_requests=num, duration_ns=duration_ns, seed=seed, folder=Path())


def table(traffic, *names):
    return list(zip(*(getattr(traffic, name).tolist() for name in names), strict=True))


def prefix_of(traffic, row):
    return traffic.request(row).tokens.prefix


# --- common prefixes --------------------------------------------------------------------------------


def test_prefixes_come_on_top_of_the_prompts():
    traffic = draw(a_class(prefix={"kind": "shared", "groups": 1, "tokens": 100}), num=2)
    assert traffic.prompt_tokens.tolist() == [110, 110]
    tokens = traffic.request(1).tokens
    assert (tokens.prefix, tokens.output_stream) == ((Run(("prefix", "c", 0), 100),), None)
    assert traffic.has_next_turn is None


def test_a_group_has_one_prefix_length_and_groups_are_equally_likely():
    lengths = {"kind": "uniform", "low": 1, "high": 10**6}
    traffic = draw(a_class(prefix={"groups": 4, "tokens": lengths}, arrivals=POISSON), num=8000)
    prefixes = [prefix_of(traffic, row)[0] for row in range(8000)]
    assert [prefix.length + 10 for prefix in prefixes] == traffic.prompt_tokens.tolist()
    assert len(set(prefixes)) == 4
    counts = np.bincount([prefix.stream[2] for prefix in prefixes])
    assert (abs(counts - 2000) < 4 * np.sqrt(1500)).all()


def test_skew_prefers_the_first_groups():
    traffic = draw(a_class(prefix={"groups": 3, "tokens": 1, "skew": 1}), num=11_000)
    counts = np.bincount([prefix_of(traffic, row)[0].stream[2] for row in range(11_000)])
    assert counts.tolist() == pytest.approx([6000, 3000, 2000], rel=0.05)


def test_classes_and_those_without_a_prefix_share_nothing():
    a, b = (a_class(prefix={"groups": 1, "tokens": 8}) | {"name": name} for name in "ab")
    traffic = draw(a, b, a_class(), num=3)
    assert [prefix_of(traffic, row) for row in range(3)] == [
        (Run(("prefix", "a", 0), 8),),
        (Run(("prefix", "b", 0), 8),),
        (),
    ]


def test_a_prefix_moves_nothing_else():
    before, after = draw(a_class(**RANDOM), num=50), draw(a_class(prefix={"groups": 9, "tokens": 7}, **RANDOM), num=50)
    assert (after.prompt_tokens - before.prompt_tokens).tolist() == [7] * 50
    unchanged = [name for name in COLUMNS if name != "prompt_tokens"]
    assert table(after, *unchanged) == table(before, *unchanged)


# --- conversations as rows ----------------------------------------------------------------------------


def test_a_conversation_in_full():
    chat = a_class(conversation={"turns": 3, "think_time_s": 2.5}, prefix={"groups": 1, "tokens": 4}, max_tokens=3)
    traffic = draw(chat, num=5)
    names = ("arrival_ns", "think_ns", "prompt_tokens", "output_tokens", "max_tokens", "has_next_turn")
    think_ns = 2_500_000_000
    assert table(traffic, *names) == [
        (NS_PER_S, 0, 14, 5, 3, True),
        (NEVER, think_ns, 27, 5, 3, True),
        (NEVER, think_ns, 40, 5, 3, False),
        (2 * NS_PER_S, 0, 14, 5, 3, True),
        (NEVER, think_ns, 27, 5, 3, False),
    ]
    common = Run(("prefix", "c", 0), 4)
    assert prefix_of(traffic, 2) == (
        common,
        Run(("question", "c", 0), 10),
        Run(("answer", "c", 0), 3),
        Run(("question", "c", 1), 10),
        Run(("answer", "c", 1), 3),
        Run(("question", "c", 2), 10),
    )
    assert prefix_of(traffic, 3) == (common, Run(("question", "c", 3), 10))
    assert [traffic.request(row).tokens.output_stream for row in (2, 3)] == [("answer", "c", 2), ("answer", "c", 3)]


def test_runs_cover_the_prompt_exactly():
    conversation = {**SOME_TURNS, "turns": {"kind": "uniform", "low": 1, "high": 9}}
    chat = a_class(**RANDOM, conversation=conversation, prefix={"groups": 3, "tokens": 50}, max_tokens=500_000)
    traffic = draw(a_class() | {"name": "single"}, chat, num=400)
    for row in np.flatnonzero(traffic.class_index == 1).tolist():
        request = traffic.request(row)
        assert request.tokens.shared_tokens == request.prompt_tokens
        if traffic.has_next_turn[row]:
            answer = Run(request.tokens.output_stream, request.num_target_tokens)
            assert prefix_of(traffic, row + 1)[:-1] == (*request.tokens.prefix, answer)


def test_turns_are_distributed_and_cut_to_the_number_of_requests():
    traffic = draw(a_class(conversation=SOME_TURNS, arrivals=POISSON), num=9001)
    assert len(traffic) == 9001
    firsts = np.flatnonzero(traffic.arrival_ns != NEVER)
    assert (np.diff(traffic.arrival_ns[firsts]) >= 0).all()
    turns = np.diff(firsts)
    assert np.bincount(turns)[1:].tolist() == pytest.approx([600] * 5, rel=0.15)
    think_ns = traffic.think_ns[traffic.arrival_ns == NEVER]
    assert think_ns.mean() == pytest.approx(2e9, rel=0.05)


def test_a_class_has_its_own_number_of_requests_and_a_duration_limits_the_starts():
    chat = a_class(conversation={"turns": 4, "think_time_s": 0})
    capped = draw(chat | {"num_requests": 6}, a_class() | {"name": "single"}, num=9)
    assert capped.class_index.tolist() == [0, 0, 0, 0, 1, 0, 0, 1, 1]
    assert len(draw(chat, duration_s=2.5)) == 8


def test_a_shorter_run_is_the_beginning_of_a_longer_one():
    a, b = (a_class(arrivals=POISSON, conversation=SOME_TURNS, **RANDOM) | {"name": name} for name in "ab")
    assert table(draw(a, b, num=50), *COLUMNS) == table(draw(a, b, num=500), *COLUMNS)[:50]


def test_classes_with_and_without_conversations_share_arrivals():
    chat, single = ({**a_class(), "arrivals": None, "share": 0.5, "name": name} for name in ("chat", "single"))
    traffic = draw(chat | {"conversation": {"turns": 3, "think_time_s": 0}}, single, arrivals=POISSON, num=3000)
    assert len(traffic) == 3000
    firsts = traffic.arrival_ns != NEVER
    alone = draw({**single, "share": 1}, arrivals=POISSON, num=3000)
    assert traffic.arrival_ns[firsts].tolist() == alone.arrival_ns[: firsts.sum()].tolist()
    num_chat, num_single = (int((traffic.class_index == index).sum()) for index in (0, 1))
    assert num_chat / num_single == pytest.approx(3, rel=0.1)
    assert not traffic.has_next_turn[traffic.class_index == 1].any()


# --- contradictions -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["prefix", "conversation"])
def test_traces_have_whole_prompts(key):
    fields = {"prefix": {"groups": 2, "tokens": 3}, "conversation": {"turns": 2, "think_time_s": 1}}
    replay = {"name": "c", "trace": {"kind": "azure", "path": "x"}, key: fields[key]}
    with pytest.raises(ScenarioError) as caught:
        draw(replay)
    assert str(caught.value) == (f"traffic[0].{key}: the trace gives whole prompts already. Drop {key} or the trace.")


def test_endless_conversations_are_refused():
    with pytest.raises(ScenarioError) as caught:
        draw(a_class(conversation={"turns": 20_000, "think_time_s": 1}), num=5)
    assert str(caught.value) == (
        "traffic[0].conversation.turns: a conversation of 20000 turns; it may have 1 to 10000."
    )


def test_more_requests_than_a_run_holds_are_refused():
    with pytest.raises(ScenarioError) as caught:
        draw(a_class(conversation={"turns": 10_000, "think_time_s": 1}), duration_s=20_000)
    assert str(caught.value) == (
        "traffic: this makes 2e+08 requests; a run holds at most 1e+08. "
        "Lower the rate, the duration or the number of requests."
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conversation": {"turns": 0, "think_time_s": 1}}, "Input should be greater than or equal to 1"),
        ({"conversation": {"turns": 2, "think_time_s": -1}}, "Input should be greater than or equal to 0"),
        ({"conversation": {"turns": 2}}, "Field required"),
        ({"prefix": {"groups": 0, "tokens": 2}}, "Input should be greater than or equal to 1"),
        ({"prefix": {"groups": 2, "tokens": 2, "skew": -0.5}}, "Input should be greater than or equal to 0"),
        ({"prefix": {"kind": "radix", "groups": 2, "tokens": 2}}, "Input should be 'shared'"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValidationError) as caught:
        TrafficClass.model_validate(a_class(**fields))
    assert caught.value.errors()[0]["msg"] == message


def test_a_class_survives_a_round_trip_through_json():
    lengths = {"kind": "lognormal", "mean": 2000, "cv": 0.5}
    before = TrafficClass.model_validate(
        a_class(prefix={"groups": 3, "tokens": lengths, "skew": 0.5}, conversation=SOME_TURNS)
    )
    assert TrafficClass.model_validate(json.loads(before.model_dump_json())) == before


# --- in a run -------------------------------------------------------------------------------------

BLOCK_SIZE = 16
STEP_MS = 10


def run(traffic, *, max_model_len=4096, num_gpu_blocks=1000, **options):
    """The requests table of a run in which every step takes 10 ms."""
    cls = POLICIES.load("vllm-v1")
    limits = EngineLimits(max_model_len=max_model_len, block_size=BLOCK_SIZE, num_gpu_blocks=num_gpu_blocks)
    policy = cls.build(cls.Options(policy="vllm-v1", max_num_batched_tokens=4096, **options), limits)
    clock, recorder = Clock(), Recorder()
    cost = Linear(LinearOptions(kind="linear", base_ms=STEP_MS, host_us=0.0))
    clients = Clients(clock, Engine(clock, EngineCore(policy), cost, recorder, aborts=True), recorder, traffic)
    clients.start()
    clock.run()
    clients.stop()
    policy.check_integrity()
    return recorder.tables().requests


def rows_of(requests, *names):
    return list(zip(*(requests[name].tolist() for name in names), strict=True))


def test_a_turn_is_sent_after_the_answer_and_finds_what_was_said():
    chat = a_class(prompt_tokens=100, output_tokens=50, conversation={"turns": 3, "think_time_s": 0.25})
    requests = run(draw(chat, num=3))
    answer_ns = 50 * STEP_MS * NS_PER_MS
    starts_ns = [NS_PER_S + turn * (answer_ns + 250 * NS_PER_MS) for turn in range(3)]
    # The last token of an answer has never been computed, so it is in no block.
    cached = [0, (150 - 1) // BLOCK_SIZE * BLOCK_SIZE, (300 - 1) // BLOCK_SIZE * BLOCK_SIZE]
    assert rows_of(requests, "arrival_ns", "finished_ns", "prompt_tokens", "cached_prompt_tokens") == [
        (start_ns, start_ns + answer_ns, prompt_tokens, hits)
        for start_ns, prompt_tokens, hits in zip(starts_ns, (100, 250, 400), cached, strict=True)
    ]


@pytest.mark.parametrize("new_tokens", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("answer_tokens", [1, 12, 13, 14, 40])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_hits_are_the_full_blocks_that_were_computed(new_tokens, answer_tokens, async_scheduling):
    chat = a_class(
        prompt_tokens=new_tokens, output_tokens=answer_tokens, conversation={"turns": 4, "think_time_s": 0.1}
    )
    requests = run(draw(chat, num=8), async_scheduling=async_scheduling)
    said = np.tile(np.arange(4), 2) * (new_tokens + answer_tokens)
    assert requests["cached_prompt_tokens"].tolist() == (np.maximum(said - 1, 0) // BLOCK_SIZE * BLOCK_SIZE).tolist()


def test_requests_of_a_group_find_its_prefix():
    arrivals = {"kind": "constant", "rate_per_s": 1}
    traffic = draw(a_class(arrivals=arrivals, prefix={"groups": 2, "tokens": 40}), num=12)
    groups = [prefix_of(traffic, row)[0].stream for row in range(12)]
    requests = run(traffic)
    assert requests["cached_prompt_tokens"].tolist() == [
        32 if group in groups[:row] else 0 for row, group in enumerate(groups)
    ]
    assert run(traffic, enable_prefix_caching=False)["cached_prompt_tokens"].tolist() == [0] * 12


def test_conversations_share_their_prefix_but_not_their_turns():
    keys = BlockKeys(block_size=4)
    chat = a_class(prefix={"groups": 1, "tokens": 10}, conversation={"turns": 2, "think_time_s": 1})
    traffic = draw(chat, num=4)
    blocks = []
    for row in range(4):
        request = traffic.request(row)
        num_blocks = (request.prompt_tokens + 5) // 4
        blocks.append(keys.of(request.tokens, request.prompt_tokens).first(num_blocks)[:num_blocks])
    first, second, other = blocks[0], blocks[1], blocks[2]
    assert second[: len(first)] == first
    assert [one == two for one, two in zip(first, other, strict=True)] == [True] * 2 + [False] * 4


def test_a_conversation_ends_when_its_client_leaves():
    leaving = {"kind": "after_tokens", "tokens": {"kind": "empirical", "values": [2, 99]}}
    traffic = draw(a_class(conversation={"turns": 3, "think_time_s": 0.1}, cancel=leaving), num=90)
    requests = run(traffic)
    expected, is_going_on = [], True
    for row in range(90):
        is_going_on = traffic.arrival_ns[row] != NEVER or is_going_on
        if is_going_on:
            is_going_on = traffic.cancel_after_tokens[row] == 99
            expected.append((row, Outcome.FINISHED if is_going_on else Outcome.CANCELLED))
    assert 30 < len(expected) < 90
    assert rows_of(requests, "request", "outcome") == expected


def test_a_conversation_ends_with_a_turn_that_is_refused_or_cut():
    chat = a_class(conversation={"turns": 9, "think_time_s": 0.1}, arrivals={"kind": "burst", "num_requests": 1})
    refused = run(draw(chat, num=9), max_model_len=40)  # prompts of 10, 25, 40
    assert rows_of(refused, "request", "output_tokens", "outcome") == [
        (0, 5, Outcome.FINISHED),
        (1, 5, Outcome.FINISHED),
        (2, 0, Outcome.REJECTED),
    ]
    cut = run(draw(chat, num=9), max_model_len=28)
    assert rows_of(cut, "request", "output_tokens", "outcome") == [
        (0, 5, Outcome.FINISHED),
        (1, 3, Outcome.FINISHED),
    ]


def test_closed_loop_clients_hold_one_conversation_after_the_other():
    loop = {"kind": "closed_loop", "num_clients": 1, "think_time_s": 1.0}
    chat = a_class(arrivals=loop, conversation={"turns": 2, "think_time_s": 0.1})
    traffic = draw(chat, num=5)
    assert traffic.think_ns.tolist() == [NS_PER_S, NS_PER_S // 10, NS_PER_S, NS_PER_S // 10, NS_PER_S]
    requests = run(traffic)
    arrivals_s = (requests["arrival_ns"] / 1e9).tolist()
    assert arrivals_s == pytest.approx([1.0, 1.15, 2.2, 2.35, 3.4])
    assert requests["request"].tolist() == list(range(5))
