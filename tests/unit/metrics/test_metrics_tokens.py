"""Token times and gaps against a walk over all tokens."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from sim.metrics.cancellation import cancellations
from sim.metrics.distribution import STATISTICS, Distribution, each_bucket, percent_of
from sim.metrics.intervals import Coverage, range_max, total_overlap
from sim.metrics.load import gaps_by_batch_size
from sim.metrics.own_gaps import gap_percentile_within
from sim.metrics.tokens import TokenTimes
from sim.request import NEVER

fresh_each = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


def random_run(rng, num_steps, world, num_lanes):
    """Steps over a handful of requests that prefill in chunks, decode, pause, are preempted, leave and finish."""
    ready, needs_prefill = [], [world.request(output=rng.randint(1, 12)) for _ in range(rng.randint(1, 6))]
    for _ in range(num_steps):
        preempt = [r for r in ready if rng.random() < 0.1]
        kept = [r for r in ready if r not in preempt]
        decode = [r for r in kept if rng.random() < 0.8]
        prefill = [(r, rng.randint(1, 9), 0, rng.random() < 0.5) for r in needs_prefill if rng.random() < 0.3]
        if not decode and not prefill:
            continue
        sampled = [r for r, _, _, is_last in prefill if is_last]
        finish = [r for r in decode + sampled if r.num_output_tokens + 1 == r.output_tokens]
        duration_ns = rng.randint(2, 50)
        if kept and rng.random() < 0.2 and kept[0].cancelled_ns == NEVER:
            kept[0].cancelled_ns = world.now_ns - rng.randint(0, 5)  # its client leaves, but it is computed to its end
        stay = [r for r in decode if r not in finish and r.cancelled_ns == NEVER]
        gone = [(r, world.now_ns + rng.randint(1, duration_ns - 1)) for r in stay if rng.random() < 0.06]
        lane = rng.randrange(num_lanes)
        world.step(
            duration_ns,
            prefill=prefill,
            decode=decode,
            finish=finish,
            preempt=preempt,
            lane=lane,
            cancelled_meanwhile=gone,
        )
        ready = [r for r in kept + sampled if r not in world.over]
        needs_prefill = [r for r in needs_prefill + preempt if r not in sampled]
    for request in world.requests:
        if request not in world.over:
            world.end(request)
    return world.tables()


def delivered(world):
    """Request -> the times of the tokens that its client saw, by walking over all of them."""
    return [
        [t for t in world.made_ns[r.index] if r.cancelled_ns == NEVER or t <= r.cancelled_ns] for r in world.requests
    ]


@pytest.mark.parametrize("num_lanes", [1, 3])
@fresh_each
@given(seed=st.integers(0, 10**6), num_steps=st.integers(1, 30))
def test_tokens_and_gaps_equal_the_walk_over_all_tokens(new_world, num_lanes, seed, num_steps):
    rng, world = random.Random(seed), new_world()
    tables = random_run(rng, num_steps, world, num_lanes)
    tokens, walked = TokenTimes(tables), delivered(world)
    assert [tokens.times_ns(row).tolist() for row in range(len(walked))] == walked
    assert tokens.num_delivered.tolist() == [len(times) for times in walked]
    made = [len(world.made_ns[r.index]) for r in world.requests]
    assert sum(tokens.num_delivered + tokens.num_undelivered) == sum(made) - world.num_dropped
    assert tokens.last_token_ns().tolist() == [times[-1] if times else NEVER for times in walked]

    of = np.array([rng.random() < 0.6 for _ in walked])
    gaps_by_row = [np.diff(times) for times in walked]
    expected = sorted(itertools.chain(*(gaps.tolist() for gaps, is_in in zip(gaps_by_row, of, strict=True) if is_in)))
    gaps = tokens.gaps(of)
    assert sorted(np.repeat(gaps.values_ns, gaps.weights).tolist()) == expected
    ends = tables.iterations["end_ns"]
    assert set(ends[gaps.iteration].tolist()) <= set(itertools.chain(*walked))
    low, high = sorted(rng.sample(range(900), 2))
    seen = sum(low <= t <= high for times, is_in in zip(walked, of, strict=True) if is_in for t in times)
    assert tokens.num_tokens_between(low, high, of) == seen

    percent, limit_ns = rng.choice([50, 90, 99, 99.9, 100]), rng.uniform(1, 120)
    own = [len(gaps) == 0 or bool(np.percentile(gaps, percent) <= limit_ns) for gaps in gaps_by_row]
    assert gap_percentile_within(tokens, percent, limit_ns).tolist() == own
    event(f"preempted: {any(r.num_preemptions for r in world.requests)}")
    event(f"departed: {any(r.cancelled_ns != NEVER for r in world.requests)}")


@fresh_each
@given(
    values=st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 5)), min_size=1, max_size=40),
    percent=st.one_of(st.sampled_from([0, 50, 90, 95, 99, 99.9, 100]), st.floats(0, 100)),
)
def test_percentiles_are_those_of_numpy_on_the_expanded_list(values, percent):
    numbers, weights = (np.array(column, dtype=np.int64) for column in zip(*values, strict=True))
    expanded = np.repeat(numbers, weights)
    weighted, plain = Distribution(numbers, weights), Distribution(expanded)
    assert weighted.percentile(percent) == np.percentile(expanded, percent)
    assert plain.percentile(percent) == np.percentile(expanded, percent)
    assert weighted.count == plain.count == len(expanded)
    limit = numbers[0]
    assert weighted.num_above(limit) == plain.num_above(limit) == np.count_nonzero(expanded > limit)
    assert weighted.mean() == pytest.approx(expanded.mean(), rel=1e-12)
    assert weighted.plus(numbers).percentile(percent) == np.percentile(np.append(expanded, numbers), percent)
    assert plain.plus(numbers).percentile(percent) == np.percentile(np.append(expanded, numbers), percent)


def test_an_empty_distribution_has_no_statistics():
    stats = Distribution(np.empty(0, dtype=np.int64)).stats_ms().model_dump()
    assert stats == {"count": 0} | dict.fromkeys(STATISTICS)


def test_statistics_by_name():
    assert [percent_of(name) for name in ("p50", "p99", "p999", "p995", "max")] == [50, 99, 99.9, 99.5, 100]
    assert [percent_of(name) for name in ("mean", "p5", "p100", "p0", "q50")] == [None] * 5


def test_unfinished_requests_censor_what_they_could_move():
    known = Distribution(np.arange(1, 1001))
    assert known.censored_by(np.empty(0, dtype=np.int64)) == []
    # One more value, anywhere from 3 up, cannot move the median or p90 by a percent, nor p99 (989.02 to 990.01).
    assert known.censored_by(np.array([3])) == ["mean", "p999", "max"]
    assert known.censored_by(np.array([3]), ("p999",)) == ["p999"]
    assert known.censored_by(np.full(200, 3)) == list(STATISTICS)
    assert Distribution(np.empty(0, dtype=np.int64)).censored_by(np.array([3])) == list(STATISTICS)


def test_buckets_are_powers_of_two():
    sizes = np.array([0, 1, 2, 3, 4, 5, 8, 9, 16, 1024, 1025])
    members = [(low, high, sizes[inside].tolist()) for low, high, inside in each_bucket(sizes)]
    assert members == [
        (0, 0, [0]),
        (1, 1, [1]),
        (2, 2, [2]),
        (3, 4, [3, 4]),
        (5, 8, [5, 8]),
        (9, 16, [9, 16]),
        (513, 1024, [1024]),
        (1025, 2048, [1025]),
    ]


@fresh_each
@given(
    intervals=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8),
    low=st.integers(0, 60),
    length=st.integers(0, 30),
)
def test_coverage_counts_covered_nanoseconds(intervals, low, length):
    starts, ends = np.array(intervals, dtype=np.int64).reshape(-1, 2).T
    covered = sum(any(a <= t < b for a, b in intervals) for t in range(low, low + length))
    assert Coverage(starts, ends).within(np.array([low]), np.array([low + length])).tolist() == [covered]
    depth = sum(a <= t < b for a, b in intervals for t in range(low, low + length))
    assert total_overlap(starts, ends, low, low + length) == depth


@fresh_each
@given(values=st.lists(st.integers(-9, 9), min_size=1, max_size=30), data=st.data())
def test_range_max_is_the_maximum_of_each_slice(values, data):
    array = np.array(values)
    starts = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=8))
    lengths = [data.draw(st.integers(1, len(values) - start)) for start in starts]
    expected = [max(values[a : a + n]) for a, n in zip(starts, lengths, strict=True)]
    assert range_max(array, np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)).tolist() == expected


def test_gaps_by_the_number_of_sequences_that_decode(world):
    a, b = world.request(output=4), world.request(output=2)
    world.step(10, prefill=[a])
    world.step(5, decode=[a])
    world.step(20, decode=[a], prefill=[b])
    world.step(7, decode=[a, b], finish=[a, b])
    tables = world.tables()
    buckets = gaps_by_batch_size(TokenTimes(tables).gaps(np.array([True, True])), tables.iterations)
    assert [(b.low, b.high, b.itl_ms.count, b.itl_ms.max) for b in buckets] == [(1, 1, 2, 20e-6), (2, 2, 2, 7e-6)]


def test_a_preempted_request_waits_for_its_next_token(world):
    a = world.request(output=4)
    world.step(10, prefill=[a])
    world.step(5, decode=[a])
    world.step(3, prefill=[(world.request(output=1), 5, 0, True)], preempt=[a], finish=world.requests[1:])
    world.step(8, prefill=[a])
    world.step(5, decode=[a], finish=[a])
    gaps = TokenTimes(world.tables()).gaps(np.array([True, False]))
    assert sorted(np.repeat(gaps.values_ns, gaps.weights).tolist()) == [5, 5, 11]


def test_what_is_computed_for_a_client_that_left_is_counted(world):
    dropped, ignored, prefilling, stays = (world.request(output=9) for _ in range(4))
    world.step(10, prefill=[dropped, ignored], used_blocks=4, num_new_blocks=4)
    world.step(10, decode=[dropped, ignored], cancelled_meanwhile=[(dropped, 13)])  # one token in flight
    ignored.cancelled_ns = 24  # it cannot be let go: both tokens from here on are for nobody
    world.step(10, decode=[ignored], prefill=[prefilling], cancelled_meanwhile=[(prefilling, 26)])  # 10 prompt tokens
    world.step(10, decode=[ignored], prefill=[stays], num_new_blocks=1)
    world.step(10, decode=[stays], release=[ignored])
    world.end(stays)
    tables = world.tables()
    report = cancellations([(tables, TokenTimes(tables))])
    assert report.num_departed == 3
    assert report.tokens_for_departed == 1 + 2 + 10
    # The two that held KV at their end: freed at once (admitted at 0), and at the end of the batch (24 to 50).
    assert (report.to_free_ms.count, report.to_free_ms.mean, report.to_free_ms.max) == (2, 13e-6, 26e-6)
    # New blocks are next taken by the step that starts at 30; after 50 none are.
    assert (report.to_reuse_ms.count, report.to_reuse_ms.max) == (1, 17e-6)


def test_at_one_nanosecond_a_departure_comes_before_the_plan_and_reuse_may_follow_at_once(world):
    left, stays = world.request(output=9), world.request(output=9)
    world.step(10, prefill=[left, stays])
    world.step(10, decode=[left, stays])
    world.cancel(left, 20)  # its second token came at 20; the step planned at 20 leaves it out
    world.step(10, decode=[stays], num_new_blocks=1)
    world.end(stays)
    tables = world.tables()
    tokens = TokenTimes(tables)
    report = cancellations([(tables, tokens)])
    assert tokens.num_delivered.tolist() == [2, 3]
    assert report.tokens_for_departed == 0
    assert (report.to_free_ms.max, report.to_reuse_ms.max) == (0, 0)


def test_a_token_planned_but_not_begun_is_in_flight(world):
    left = world.request(output=9)
    world.step(10, prefill=[left])
    world.step(10, decode=[left], host_ns=5, cancelled_meanwhile=[(left, 12)])
    tables = world.tables()
    assert cancellations([(tables, TokenTimes(tables))]).tokens_for_departed == 1
