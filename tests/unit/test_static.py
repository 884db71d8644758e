"""Request-level batching by whole logs: one line a step, small enough to check by hand."""

import pytest
from pydantic import ValidationError

from sim.clock import NS_PER_MS
from sim.core import EngineCore
from sim.policies.base import EngineLimits
from sim.policies.static import StaticBatching, StaticOptions
from sim.request import Request, Status
from sim.step import BlockedBy, StepShape


def make(num_gpu_blocks=1000, block_size=1, max_model_len=1000, **options):
    return StaticBatching.build(
        StaticOptions(policy="static", **options),
        EngineLimits(max_model_len=max_model_len, block_size=block_size, num_gpu_blocks=num_gpu_blocks),
    )


def names(requests):
    return "".join(f"{request.id}" for request in requests)


def run(policy, arrivals, cancels=None, num_steps=100):
    """One line a step: members with their tokens, rows for nobody, why the head waits, who finishes, is released."""
    core = EngineCore(policy)
    log = []
    for step_index in range(num_steps):
        assert core.admit((cancels or {}).get(step_index, ()), arrivals.get(step_index, ())) == []
        if not core.num_to_plan():
            break
        step = core.plan(0)
        policy.check_integrity()
        members = " ".join(f"{r.id}:{n}" for r, n in policy.batch(step))
        padding = step.shape.num_padding_tokens
        _, finished = core.complete()
        policy.check_integrity()
        log.append((members, padding, step.blocked_by.name, names(finished.finished), names(finished.released)))
    assert policy.free_blocks == policy.usable_blocks
    return log


def two_groups():
    """Outputs 10, 1, 1, 1 in four places, and four more of one token behind them."""
    return [Request(i, 4, 10 if i == 0 else 1) for i in range(8)]


@pytest.mark.parametrize(("compute", "idle_rows"), [("padded", 3), ("early_exit", 0)])
def test_second_group_starts_when_the_first_is_over(compute, idle_rows):
    assert run(make(max_batch_size=4, compute=compute), {0: two_groups()}) == [
        ("0:4 1:4 2:4 3:4", 0, "SLOTS", "123", ""),
        *[("0:1", idle_rows, "ADMISSION", "", "")] * 8,
        ("0:1", idle_rows, "ADMISSION", "0", "0123"),
        ("4:4 5:4 6:4 7:4", 0, "NOTHING", "4567", "4567"),
    ]


def test_batch_of_one_is_no_batching():
    requests = [Request(0, 4, 2), Request(1, 6, 1)]
    assert run(make(max_batch_size=1), {0: requests}) == [
        ("0:4", 0, "SLOTS", "", ""),
        ("0:1", 0, "ADMISSION", "0", "0"),
        ("1:6", 0, "NOTHING", "1", "1"),
    ]


def test_who_comes_while_the_batch_runs_waits_for_its_end():
    assert run(make(), {0: [Request(0, 4, 3)], 1: [Request(1, 4, 1)]}) == [
        ("0:4", 0, "NOTHING", "", ""),
        ("0:1", 0, "ADMISSION", "", ""),
        ("0:1", 0, "ADMISSION", "0", "0"),
        ("1:4", 0, "NOTHING", "1", "1"),
    ]


def steps_of(policy, requests):
    """All steps of a policy that is given everything at once."""
    for request in requests:
        policy.add(request)
    steps = []
    while policy.num_unfinished:
        steps.append(policy.plan(0))
        policy.update(steps[-1])
    return steps


def test_padded_rows_are_as_long_as_the_longest_prompt_and_stay():
    steps = steps_of(make(compute="padded"), [Request(0, 10, 3), Request(1, 4, 2), Request(2, 7, 1)])
    assert [s.shape for s in steps] == [
        StepShape(prefills=((10, 0),) * 3, num_sampled=3, num_padding_tokens=6 + 3, num_new_requests=3),
        StepShape(3, 30, 300, 10, num_sampled=3, num_padding_tokens=1),
        StepShape(3, 33, 363, 11, num_sampled=3, num_padding_tokens=2),
    ]
    assert [names(s.joined) for s in steps] == ["", "01", ""]
    assert [[(c.num_tokens, c.context, c.is_last) for c in s.chunks] for s in steps] == [
        [(10, 0, True), (4, 0, True), (7, 0, True)],
        [],
        [],
    ]
    # Three rows of 10 + 3 tokens; in them only what the answers still need is live.
    assert [(s.used_blocks, s.num_new_blocks, s.live_tokens) for s in steps] == [
        (39, 39, 21),
        (39, 0, 11 + 5),
        (39, 0, 12),
    ]
    assert [s.num_running for s in steps] == [3, 3, 3]


def test_early_exit_rows_have_their_own_length_and_end():
    steps = steps_of(make(compute="early_exit"), [Request(0, 10, 3), Request(1, 4, 2), Request(2, 7, 1)])
    assert [s.shape for s in steps] == [
        StepShape(prefills=((10, 0), (4, 0), (7, 0)), num_sampled=3, num_new_requests=3),
        StepShape(2, 14, 116, 10, num_sampled=2),
        StepShape(1, 11, 121, 11, num_sampled=1),
    ]
    assert [(s.used_blocks, s.num_new_blocks, s.live_tokens) for s in steps] == [
        (13 + 6 + 8, 27, 21),
        (27, 0, 11 + 5),
        (27, 0, 12),
    ]
    assert [s.num_running for s in steps] == [3, 3, 3]


def test_padded_rows_end_at_the_longest_request():
    steps = steps_of(make(max_model_len=12), [Request(0, 10, 2), Request(1, 4, 8)])
    assert [s.shape.decode_context_max for s in steps] == [0, 10, 11, 12, 12, 12, 12, 12]
    assert {s.used_blocks for s in steps} == {24}


@pytest.mark.parametrize(
    ("options", "first_batch", "used_blocks"),
    [
        ({"compute": "early_exit"}, "0:10 1:2 2:10", 12 + 12 + 12),
        ({"compute": "padded"}, "0:10 1:2", 40),  # rows of 10 + 10 tokens
        ({"compute": "padded", "reserve": "max_model_len"}, "0:10", 40),
    ],
)
def test_batch_takes_the_queue_until_one_does_not_fit(options, first_batch, used_blocks):
    requests = [Request(0, 10, 2), Request(1, 2, 10), Request(2, 10, 2), Request(3, 12, 2), Request(4, 1, 1)]
    policy = make(num_gpu_blocks=40, max_model_len=40, **options)
    for request in requests:
        policy.add(request)
    step = policy.plan(0)
    assert " ".join(f"{r.id}:{n}" for r, n in policy.batch(step)) == first_batch
    assert (step.blocked_by, step.used_blocks, step.num_waiting) == (BlockedBy.KV, used_blocks, 5 - len(step.chunks))


def test_window_waits_for_company_until_the_oldest_has_waited_enough():
    policy = make(max_batch_size=3, max_queue_delay_ms=5)
    first, second = Request(0, 4, 1), Request(1, 4, 1)
    assert policy.wake_ns() is None
    first.queued_ns = 2 * NS_PER_MS
    policy.add(first)
    step = policy.plan(2 * NS_PER_MS)
    assert (step.is_empty, step.blocked_by, step.num_waiting) == (True, BlockedBy.ADMISSION, 1)
    assert policy.update(step) == ([], [], [])
    assert policy.wake_ns() == 7 * NS_PER_MS
    second.queued_ns = 4 * NS_PER_MS
    policy.add(second)
    assert policy.plan(7 * NS_PER_MS - 1).is_empty
    assert policy.wake_ns() == 7 * NS_PER_MS
    step = policy.plan(7 * NS_PER_MS)
    assert [c.request for c in step.chunks] == [first, second]
    assert policy.wake_ns() is None


@pytest.mark.parametrize(("num_gpu_blocks", "expected"), [(1000, "SLOTS"), (9, "KV")])
def test_window_closes_when_the_batch_is_full(num_gpu_blocks, expected):
    policy = make(max_batch_size=2, max_queue_delay_ms=5, num_gpu_blocks=num_gpu_blocks)
    for i in range(3):
        request = Request(i, 4, 1)
        request.queued_ns = 0
        policy.add(request)
    step = policy.plan(0)
    assert (step.is_empty, step.blocked_by.name) == (False, expected)


def test_window_is_past_for_those_who_waited_for_the_last_batch():
    policy = make(max_queue_delay_ms=5)
    for i, queued_ns in enumerate([0, 1]):
        request = Request(i, 4, 1)
        request.queued_ns = queued_ns
        policy.add(request)
        if i == 0:
            first = policy.plan(5 * NS_PER_MS)
    assert (policy.wake_ns(), policy.num_waiting) == (None, 1)
    policy.update(first)
    assert policy.wake_ns() == 5 * NS_PER_MS + 1
    assert len(policy.plan(50 * NS_PER_MS).chunks) == 1


def test_window_moves_on_when_the_oldest_leaves():
    policy = make(max_queue_delay_ms=5)
    requests = [Request(i, 4, 1) for i in range(2)]
    for request in requests:
        request.queued_ns = request.index
        policy.add(request)
    assert policy.cancel(requests[0])
    assert policy.wake_ns() == 5 * NS_PER_MS + 1
    assert policy.cancel(requests[1])
    assert policy.wake_ns() is None
    assert [r.status for r in requests] == [Status.OVER] * 2


def test_streamed_answer_is_over_for_its_client_before_its_kv_is_free():
    policy = make(release="streaming")
    short, long = Request(0, 4, 1), Request(1, 4, 2)
    policy.add(short)
    policy.add(long)
    assert policy.update(policy.plan(0)) == ([short], [], [])
    assert (short.status, short.num_blocks, policy.num_unfinished) == (Status.OVER, 6, 2)
    assert policy.update(policy.plan(0)) == ([long], [short, long], [])
    assert (short.num_blocks, policy.num_unfinished) == (0, 0)
    assert (policy.streams_answers, make().streams_answers) == (True, False)


def test_padded_member_generates_to_its_end_for_nobody():
    requests = [Request(0, 4, 3), Request(1, 4, 2)]
    assert run(make(compute="padded"), {0: requests}, {1: requests[:1]}) == [
        ("0:4 1:4", 0, "NOTHING", "", ""),
        ("0:1 1:1", 0, "NOTHING", "1", ""),
        ("0:1", 1, "NOTHING", "0", "01"),
    ]
    assert requests[0].num_output_tokens == 3


def test_early_exit_member_drops_out_with_the_next_results_and_keeps_its_kv():
    policy = make(compute="early_exit")
    leaver, stayer = Request(0, 4, 9), Request(1, 4, 5)
    policy.add(leaver)
    policy.add(stayer)
    policy.update(policy.plan(0))
    policy.update(policy.plan(0))
    assert policy.cancel(leaver) is False
    step = policy.plan(0)
    assert (step.shape.num_decode, step.left) == (2, [])
    assert policy.update(step) == ([], [], [])
    step = policy.plan(0)
    assert (step.shape.num_decode, step.left, step.used_blocks, step.live_tokens) == (1, [leaver], 13 + 9, 7)
    assert leaver.num_output_tokens == 3
    policy.update(step)
    step = policy.plan(0)
    assert step.left == []
    assert policy.update(step) == ([stayer], [leaver, stayer], [])


def test_early_exit_batch_ends_when_its_last_member_has_left():
    requests = [Request(0, 4, 9), Request(1, 4, 1)]
    assert run(make(compute="early_exit"), {0: requests}, {1: requests[:1]}) == [
        ("0:4 1:4", 0, "NOTHING", "1", ""),
        ("0:1", 0, "NOTHING", "", "01"),
    ]


def test_early_exit_member_that_left_during_its_prefill_never_decodes():
    policy = make(compute="early_exit")
    leaver, stayer = Request(0, 4, 9), Request(1, 4, 2)
    policy.add(leaver)
    policy.add(stayer)
    step = policy.plan(0)
    assert policy.cancel(leaver) is False
    assert policy.update(step) == ([], [], [])
    step = policy.plan(0)
    assert (step.joined, step.left, step.shape.num_decode) == ([stayer], [], 1)
    assert policy.update(step) == ([stayer], [leaver, stayer], [])


def test_only_who_sees_tokens_can_leave_after_some():
    for release, expected in [("streaming", [[0], [1], []]), ("at_batch_end", [[], [], []])]:
        policy = make(release=release)
        for i in range(3):
            policy.add(Request(i, 4, 3, cancel_after_tokens=i + 1))
        departed = [[r.index for r in policy.update(policy.plan(0)).departed] for _ in range(3)]
        assert departed == expected
        assert policy.num_unfinished == 0


def test_equal_outputs_leave_nothing_idle():
    log = run(make(max_batch_size=2, compute="padded"), {0: [Request(i, 4, 2) for i in range(4)]})
    assert [line[1] for line in log] == [0, 0, 0, 0]
    assert [line[4] for line in log] == ["", "01", "", "23"]


def form(policy, requests, now_us=0):
    """Ids of the batch that an idle engine runs at a time; all answers have one token."""
    for r in requests:
        r.queued_ns = r.arrival_ns
        policy.add(r)
    step = policy.plan(now_us * 1000)
    ids = [r.id for r, _ in policy.batch(step)]
    policy.update(step)
    policy.check_integrity()
    return ids


def test_a_preferred_size_is_sent_at_once_and_the_rest_waits_for_the_delay():
    """Preferred 4 and 8, delay 100 µs: of five the first four leave at once, the fifth at most 100 µs after it came."""
    policy = make(max_batch_size=8, preferred_batch_size=(4, 8), max_queue_delay_ms=0.1)
    assert form(policy, [Request(i, 4, 1) for i in range(5)]) == [0, 1, 2, 3]
    assert policy.wake_ns() == 100_000
    assert form(policy, [], now_us=99) == []
    assert form(policy, [], now_us=100) == [4]


@pytest.mark.parametrize(
    ("num_waiting", "now_us", "expected"),
    [(3, 0, 0), (3, 100, 3), (4, 0, 4), (7, 0, 4), (7, 100, 7), (8, 0, 8), (9, 0, 8), (9, 100, 8)],
)
def test_what_is_sent_of_what_waits(num_waiting, now_us, expected):
    policy = make(max_batch_size=8, preferred_batch_size=(4, 8), max_queue_delay_ms=0.1)
    assert len(form(policy, [Request(i, 4, 1) for i in range(num_waiting)], now_us)) == expected


@pytest.mark.parametrize(("num_waiting", "expected"), [(3, 3), (5, 4), (9, 4)])
def test_without_a_delay_preferred_sizes_still_cut_a_batch(num_waiting, expected):
    policy = make(max_batch_size=8, preferred_batch_size=(4,))
    assert len(form(policy, [Request(i, 4, 1) for i in range(num_waiting)])) == expected


def test_levels_are_served_in_order_and_the_delayed_last_in_theirs():
    order = {"kind": "triton", "priority_levels": 2, "default_priority_level": 2, "timeout_ms_by_level": {2: 1.0}}
    policy = make(max_batch_size=3, queue_order=order)
    rows = [(2, 0), (0, 100), (2, 1500), (1, 1600), (7, 1700)]  # priority, arrival in µs
    requests = [Request(i, 4, 1, priority=p, arrival_ns=us * 1000) for i, (p, us) in enumerate(rows)]
    assert form(policy, requests, now_us=2000) == [3, 2, 4]
    assert form(policy, [], now_us=2000) == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 4, "preferred_batch_size": (8,)}, "a preferred batch size of 8 exceeds max_batch_size 4"),
        ({"queue_order": {"kind": "triton", "default_priority_level": 2}}, "there is no level 2; levels: 1 to 1"),
    ],
)
def test_batcher_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        make(**options)
