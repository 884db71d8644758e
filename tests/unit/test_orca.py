"""Orca by whole logs: one line a step, small enough to check by hand."""

from sim.core import EngineCore
from sim.policies.base import EngineLimits
from sim.policies.orca import Orca, OrcaOptions
from sim.request import Request, Status
from sim.step import BlockedBy, StepShape


def make(max_batch_size=8, num_gpu_blocks=1000, block_size=1, max_model_len=1000, reserve="max_tokens"):
    return Orca.build(
        OrcaOptions(policy="orca", max_batch_size=max_batch_size, reserve=reserve),
        EngineLimits(max_model_len=max_model_len, block_size=block_size, num_gpu_blocks=num_gpu_blocks),
    )


def names(requests):
    return "".join(f"{request.id}" for request in requests)


def run(policy, arrivals, cancels=None, num_steps=100):
    """One line a step: members with their tokens, why the head waits, blocks held, who finishes or departs."""
    core = EngineCore(policy)
    log = []
    for step_index in range(num_steps):
        core.admit((cancels or {}).get(step_index, ()), arrivals.get(step_index, ()))
        if not core.num_to_plan():
            break
        step = core.plan(0)
        policy.check_integrity()
        members = " ".join(f"{r.id}:{n}" for r, n in policy.batch(step))
        used_blocks = step.used_blocks
        _, finished = core.complete()
        policy.check_integrity()
        assert finished.finished == finished.released
        log.append((members, step.blocked_by.name, used_blocks, names(finished.finished), names(finished.departed)))
    return log


def test_reserved_slots_stop_the_head_and_nobody_passes_it():
    # 100 token slots; 60 + 50 do not fit, and the 30 of c must not overtake b.
    a = Request(0, 57, 3, id="a")
    b = Request(1, 48, 2, id="b")
    c = Request(2, 29, 1, id="c")
    assert run(make(num_gpu_blocks=100), {0: [a, b, c]}) == [
        ("a:57", "KV", 60, "", ""),
        ("a:1", "KV", 60, "", ""),
        ("a:1", "KV", 60, "a", ""),
        ("b:48 c:29", "NOTHING", 80, "c", ""),
        ("b:1", "NOTHING", 50, "b", ""),
    ]


def test_place_of_a_finished_request_is_taken_in_the_next_iteration():
    # Outputs 10, 1, 1, 1 in four places and four more of one token: the second group starts at step 2.
    first = [Request(i, 4, 10 if i == 0 else 1) for i in range(4)]
    second = [Request(i, 4, 1) for i in range(4, 8)]
    assert run(make(max_batch_size=4), {0: first + second}) == [
        ("0:4 1:4 2:4 3:4", "SLOTS", 14 + 3 * 5, "123", ""),
        ("0:1 4:4 5:4 6:4", "SLOTS", 14 + 3 * 5, "456", ""),
        ("0:1 7:4", "NOTHING", 14 + 5, "7", ""),
        *[("0:1", "NOTHING", 14, "", "")] * 6,
        ("0:1", "NOTHING", 14, "0", ""),
    ]


def test_reserving_the_longest_request_holds_back_what_would_fit():
    requests = [Request(0, 4, 2), Request(1, 4, 2)]
    policy = make(reserve="max_model_len", max_model_len=60, num_gpu_blocks=100)
    assert [line[:3] for line in run(policy, {0: requests})] == [
        ("0:4", "KV", 60),
        ("0:1", "KV", 60),
        ("1:4", "NOTHING", 60),
        ("1:1", "NOTHING", 60),
    ]


def test_step_names_its_changes_and_prices_its_rows():
    policy = make(block_size=16, num_gpu_blocks=10)
    a, b = Request(0, 20, 3, id="a"), Request(1, 33, 2, id="b")
    policy.add(a)
    steps = [policy.plan(0)]
    policy.update(steps[-1])
    policy.add(b)
    for _ in range(2):
        steps.append(policy.plan(0))
        policy.update(steps[-1])
    assert [s.shape for s in steps] == [
        StepShape(prefills=((20, 0),), num_sampled=1, num_new_requests=1),
        StepShape(1, 20, 400, 20, prefills=((33, 0),), num_sampled=2, num_new_requests=1),
        StepShape(2, 21 + 33, 441 + 1089, 33, num_sampled=2),
    ]
    assert [(list(s.joined), list(s.left), [x.request for x in s.admitted]) for s in steps] == [
        ([], [], [a]),
        ([a], [], [b]),
        ([b], [], []),
    ]
    assert [(s.live_tokens, s.used_blocks, s.num_new_blocks) for s in steps] == [(20, 2, 2), (54, 5, 3), (56, 5, 0)]
    assert [(s.num_running, s.num_waiting, s.tick) for s in steps] == [(1, 0, 0), (2, 0, 1), (2, 0, 2)]
    assert (a.num_computed_tokens, a.num_output_tokens, b.num_computed_tokens, b.num_output_tokens) == (22, 3, 34, 2)
    assert policy.free_blocks == policy.usable_blocks == 10


def test_answer_ends_at_the_stop_token_or_at_the_longest_request():
    stopped, cut = Request(0, 5, 2, max_tokens=9), Request(1, 17, 9)
    log = run(make(max_model_len=20), {0: [stopped, cut]})
    assert [line[2:4] for line in log] == [(14 + 20, ""), (34, "0"), (20, "1")]
    assert (stopped.num_output_tokens, cut.num_output_tokens) == (2, 3)


def test_cancelled_anywhere_its_kv_is_free_at_once():
    running, waiting, prefilling = Request(0, 4, 9), Request(1, 4, 9), Request(2, 4, 9)
    policy = make(max_batch_size=1)
    policy.add(running)
    policy.add(waiting)
    policy.update(policy.plan(0))
    policy.update(policy.plan(0))
    in_flight = policy.plan(0)
    assert policy.cancel(running)
    assert policy.cancel(waiting)
    assert (policy.free_blocks, policy.num_unfinished) == (1000, 0)
    assert policy.update(in_flight) == ([], [], [])
    assert running.num_output_tokens == 2  # the token in flight is nobody's
    policy.add(prefilling)
    in_flight = policy.plan(0)
    assert policy.cancel(prefilling)
    assert policy.update(in_flight) == ([], [], [])
    assert (prefilling.num_output_tokens, prefilling.status, policy.free_blocks) == (0, Status.OVER, 1000)
    policy.check_integrity()


def test_cancelled_before_its_first_decode_it_joins_nothing():
    policy = make()
    request, other = Request(0, 4, 9), Request(1, 4, 9)
    policy.add(request)
    policy.add(other)
    policy.update(policy.plan(0))
    assert policy.cancel(request)
    step = policy.plan(0)
    assert (step.joined, step.shape.num_decode, request.num_output_tokens) == ([other], 1, 1)


def test_client_that_leaves_after_tokens_is_named_once_and_computed_on_unless_cancelled():
    def leavers():
        return [Request(i, 4, 4, cancel_after_tokens=i) for i in range(1, 5)]

    assert [line[3:] for line in run(make(), {0: leavers()})] == [("", "1"), ("", "2"), ("", "3"), ("1423", "")]
    policy, requests = make(), leavers()
    cancels = {i: [requests[i - 1]] for i in range(1, 4)}
    assert [line[0] for line in run(policy, {0: requests}, cancels)] == [
        "1:4 2:4 3:4 4:4",
        "2:1 3:1 4:1",
        "3:1 4:1",
        "4:1",
    ]
    assert [r.num_output_tokens for r in requests] == [1, 2, 3, 4]


def test_empty_engine_plans_an_empty_step():
    policy = make()
    step = policy.plan(0)
    assert step.is_empty
    assert step.blocked_by is BlockedBy.NOTHING
    assert policy.update(step) == ([], [], [])


def test_two_workers_take_turns_and_a_request_stays_with_its_own():
    # a and b are alone in their batches; c joins the batch of whoever is done first, d the one that is left.
    policy = Orca.build(
        OrcaOptions(policy="orca", max_batch_size=1, n_workers=2), EngineLimits(1000, block_size=1, num_gpu_blocks=1000)
    )
    core, log = EngineCore(policy), []
    core.admit((), [Request(i, 4, n, id=name) for i, (name, n) in enumerate({"a": 3, "b": 1, "c": 2, "d": 1}.items())])
    while core.num_in_flight or core.num_to_plan():
        while core.num_to_plan():
            step = core.plan(0)
            policy.check_integrity()
            log.append((step.lane, " ".join(f"{r.id}:{n}" for r, n in policy.batch(step)), step.num_running))
        core.complete()
    assert log == [
        (0, "a:4", 1),
        (1, "b:4", 2),
        (0, "a:1", 2),
        (1, "c:4", 2),
        (0, "a:1", 2),
        (1, "c:1", 2),
        (0, "d:4", 2),
        (1, "", 1),
    ]
    assert policy.free_blocks == policy.usable_blocks


def test_a_client_that_leaves_is_found_in_its_batch():
    policy = Orca.build(
        OrcaOptions(policy="orca", max_batch_size=1, n_workers=2), EngineLimits(1000, block_size=1, num_gpu_blocks=1000)
    )
    core = EngineCore(policy)
    first, second = Request(0, 4, 9), Request(1, 4, 9)
    core.admit((), [first, second])
    core.plan(0)
    core.plan(0)
    core.admit([first], ())
    policy.check_integrity()
    assert policy.running() == [second]
    assert core.complete()[1].finished == []
    assert core.plan(0).is_empty
