"""Whether those behind a request that does not fit are tried: whole logs that can be checked by hand."""

import pytest

from tests.unit.grid.stepwise import engine, log, request

V1 = {"async_scheduling": False, "enable_prefix_caching": False}
WHOLE = {"watermark": 0.0}


def line():
    """On blocks of 4, a runs with 3; behind it wait b and d, who need 4 each, and c and e, who need 1 each."""
    prompts = {"b": 14, "c": 3, "d": 14, "e": 2}
    waiting = [request(name, num_tokens, 2, queued_ns=i) for i, (name, num_tokens) in enumerate(prompts.items(), 1)]
    return {0: [request("a", 10, 4, queued_ns=0)], 1: waiting}


STOPS = [
    ("a10", "", "", 3, 3),
    *[("a1", "", "bcde", 0, 3)] * 2,
    ("a1", "", "bcde", 1, 4),
    ("b14 c3", "", "de", 5, 5),
    ("b1 c1", "", "de", 0, 5),
    ("d14 e2", "", "", 5, 5),
    ("d1 e1", "", "", 0, 5),
]
PASSED = [("b14", "", "d", 4, 4), ("b1", "", "d", 0, 4), ("d14", "", "", 4, 4), ("d1", "", "", 0, 4)]


@pytest.mark.parametrize(
    ("policy", "num_gpu_blocks", "options", "skips"),
    [
        (
            "vllm-v1",  # of 7 blocks one is the null block
            7,
            V1,
            [("a1 c3 e2", "", "bd", 2, 5), ("a1 c1 e1", "", "bd", 0, 5), ("a1", "", "bd", 1, 4)],
        ),
        (
            "vllm-v0",  # prefills in a step of their own
            6,
            WHOLE,
            [("c3 e2", "", "bd", 2, 5), ("a1 c1 e1", "", "bd", 0, 5), ("a1", "", "bd", 0, 3), ("a1", "", "bd", 1, 4)],
        ),
    ],
    ids=["vllm-v1", "vllm-v0"],
)
def test_small_requests_pass_a_large_one_that_finds_no_room(policy, num_gpu_blocks, options, skips):
    assert log(engine(policy, num_gpu_blocks, **options), line()) == STOPS
    skipping = engine(policy, num_gpu_blocks, head_of_line="skip", **options)
    assert log(skipping, line()) == [STOPS[0], *skips, *PASSED]


def test_who_passes_holds_up_the_large_one_where_all_of_a_request_is_reserved():
    """a reserves 4 of 6 blocks, b and d as many, c 2, e 1: c takes the room in which e would have fitted."""
    options = {"kv_admission": "max_tokens"}
    assert log(engine("sarathi-orca", 6, head_of_line="skip", **options), line()) == [
        ("a10", "", "", 4, 4),
        ("c3 a1", "", "bde", 2, 6),
        ("a1 c1", "", "bde", 0, 6),
        ("e2 a1", "", "bd", 1, 5),
        ("b14 e1", "", "d", 4, 5),
        ("b1", "", "d", 0, 4),
        ("d14", "", "", 4, 4),
        ("d1", "", "", 0, 4),
    ]


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("vllm-v1", V1 | {"max_num_batched_tokens": 16, "enable_chunked_prefill": False, "max_model_len": 16}),
        ("sarathi-vllm", {"max_batched_tokens": 16}),
    ],
)
def test_a_short_prompt_passes_one_that_exceeds_the_rest_of_the_budget(policy, options):
    def first_step(head_of_line):
        core = engine(policy, 100, head_of_line=head_of_line, **options)
        prompts = {"a": 10, "b": 14, "c": 3, "d": 4, "e": 3}
        return log(core, {0: [request(name, n, 2, queued_ns=i) for i, (name, n) in enumerate(prompts.items())]}, 1)

    assert first_step("stop") == [("a10", "", "bcde", 3, 3)]
    # 6 tokens are left: 3 for c, none for d's 4, 3 for e
    assert first_step("skip") == [("a10 c3 e3", "", "bd", 5, 5)]


@pytest.mark.parametrize(("policy", "num_gpu_blocks", "options"), [("vllm-v1", 4, V1), ("sarathi", 3, WHOLE)])
def test_a_large_request_starves_while_small_ones_keep_coming(policy, num_gpu_blocks, options):
    """b needs all 3 blocks; every step brings a small one, and each runs for two steps."""

    def admitted(head_of_line):
        core = engine(policy, num_gpu_blocks, head_of_line=head_of_line, **options)
        arrivals = {i: [request("a", 2, 2, queued_ns=2 * i)] for i in range(20)}
        for i, requests in arrivals.items():
            requests[0].index = 10 + i
        arrivals[0].append(request("b", 12, 1, queued_ns=1))
        return [index for index, row in enumerate(log(core, arrivals, 20)) if "b" not in row[2]]

    assert admitted("stop")[0] == 2
    assert admitted("skip") == []


def test_nobody_passes_a_victim_in_the_step_that_preempts_it():
    """In step 2 b gives up 2 blocks, of which c could take one; b is first in step 3, and takes both."""
    core = engine("sarathi", 4, head_of_line="skip", watermark=0.0)
    a, b, c = request("a", 4, 9, queued_ns=0), request("b", 4, 9, queued_ns=1), request("c", 1, 2, queued_ns=2)
    assert log(core, {0: [a, b], 1: [c]}, num_steps=4) == [
        ("a4 b4", "", "", 2, 2),
        ("a1 b1", "", "c", 2, 4),
        ("a1", "b for a", "bc", 0, 2),
        ("b6 a1", "", "c", 2, 4),
    ]
