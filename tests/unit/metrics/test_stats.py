"""Intervals and cuts against what is known of them by hand or by brute force."""

import numpy as np
import pytest

from sim.errors import InvariantError
from sim.metrics.stats import (
    Interval,
    WarmUp,
    batch_means,
    bootstrap_interval,
    circular_blocks,
    find_warm_up,
    jackknife_values,
    mean_interval,
    paired_difference,
    percentile_interval,
    run_mean_interval,
    run_percentile_interval,
)
from sim.rng import stream


def test_the_mean_of_independent_values_has_students_interval():
    interval = mean_interval(np.array([1.0, 2.0, 3.0, 4.0]))
    half = 3.182446305284263 * np.sqrt(5 / 3) / 2  # t with 3 degrees of freedom, from a printed table
    assert (interval.value, interval.level) == (2.5, 0.95)
    assert (interval.low, interval.high) == pytest.approx((2.5 - half, 2.5 + half))
    assert interval.relative_half_width == pytest.approx(half / 2.5)


def test_one_value_says_nothing_about_its_spread():
    assert mean_interval(np.array([7.0])) == Interval(7.0, -np.inf, np.inf)


def test_batches_are_equal_and_drop_the_beginning():
    assert batch_means(np.arange(11), num_batches=5).tolist() == [1.5, 3.5, 5.5, 7.5, 9.5]
    assert run_mean_interval(np.arange(11), num_batches=5).value == 5.5
    with pytest.raises(InvariantError, match="3 values cannot be cut into 20 batches"):
        batch_means(np.arange(3))


def test_the_warm_up_is_cut_where_the_level_changes():
    noise = stream(1, "test").normal(0, 1, 1000)
    shifted = noise + np.where(np.arange(1000) < 200, 30, 0)
    assert find_warm_up(shifted) == WarmUp(200, is_settled=True)
    assert find_warm_up(noise).num_cut < 100


def test_what_never_settles_is_said_so():
    assert not find_warm_up(np.arange(1000.0)).is_settled
    assert find_warm_up(np.arange(10.0)) == WarmUp(0, is_settled=False)


def brute_force_mser(values):
    means = values[: len(values) // 5 * 5].reshape(-1, 5).mean(axis=1)
    errors = [np.var(means[cut:]) / (len(means) - cut) for cut in range(len(means) // 2 + 1)]
    return 5 * int(np.argmin(errors))


@pytest.mark.parametrize("seed", range(5))
def test_the_cut_has_the_least_standard_error(seed: int):
    values = np.cumsum(stream(seed, "test").normal(0, 1, 203))
    assert find_warm_up(values).num_cut == brute_force_mser(values)


def test_ranks_of_independent_values_are_binomial():
    interval = percentile_interval(np.arange(1, 101), 50)
    assert (interval.low, interval.value, interval.high) == (40, 50.5, 61)  # Conover's table for n = 100, p = 0.5


def test_too_few_values_bound_a_percentile_from_one_side_only():
    interval = percentile_interval(np.arange(100), 99)
    assert (interval.low, interval.high) == (96, np.inf)


def test_dependence_widens_the_interval_of_a_percentile():
    values = stream(1, "test").exponential(1, 2000)
    alone, in_clusters = run_percentile_interval(values, 90), run_percentile_interval(np.repeat(values, 50), 90)
    assert alone.has(np.log(10))
    assert 0.5 < in_clusters.half_width / alone.half_width < 2  # 50 copies of each value are no information


def test_blocks_are_neighbours_on_a_circle():
    positions = circular_blocks(10, 4, stream(1, "test"))
    assert len(positions) == 10
    steps = np.diff(positions) % 10
    assert [int(step) for i, step in enumerate(steps) if (i + 1) % 4] == [1] * 7


def test_the_bootstrap_agrees_with_students_interval():
    values = stream(1, "test").normal(5, 1, 400)
    drawn = bootstrap_interval(values, np.mean, stream(2, "test"), block=1)
    assert drawn.half_width == pytest.approx(mean_interval(values).half_width, rel=0.1)
    assert drawn.value == np.mean(values)


def test_what_replications_have_in_common_cancels_in_a_difference():
    common = stream(1, "test").normal(0, 100, 20)
    ours, theirs = common + 3 + np.tile([0.1, -0.1], 10), common
    assert paired_difference(ours, theirs).half_width < 0.1
    assert paired_difference(ours, theirs).has(3)
    with pytest.raises(InvariantError, match="20 values cannot be paired with 19"):
        paired_difference(ours, theirs[1:])


def test_the_jackknife_of_a_mean_is_the_values_and_of_a_square_is_unbiased():
    values = np.array([1.0, 4.0, 7.0, 12.0])
    assert jackknife_values(lambda rows: float(values[rows].mean()), 4) == pytest.approx(values)
    squares = jackknife_values(lambda rows: float(values[rows].mean() ** 2), 4)
    assert squares.mean() == pytest.approx(values.mean() ** 2 - values.var(ddof=1) / 4)
