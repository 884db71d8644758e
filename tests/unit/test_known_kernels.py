import numpy as np
import pytest

from calibration.known_kernels import after_whole_tiles, by_pairs, changing_after, largest_split_batch


def test_products_rise_right_after_whole_tiles():
    points = np.array([1.0, 48, 64, 65, 80, 112, 128, 144, 192, 320])
    times = np.arange(10.0)
    rows, us = after_whole_tiles(points, times)
    assert rows.tolist() == [1, 48, 64, 65, 80, 112, 128, 129, 144, 192, 320], "one was timed, one lies two tiles off"
    assert us.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9]


def test_a_product_without_whole_tiles_stays_as_it_is():
    points, times = np.array([1.0, 48, 100]), np.array([1.0, 2, 3])
    assert [values.tolist() for values in after_whole_tiles(points, times)] == [points.tolist(), times.tolist()]


@pytest.mark.parametrize("num_decode", [None, 3])
def test_attention_of_prompts_follows_pairs_between_chunks_far_apart(num_decode):
    chunks, contexts, kv = np.array([16.0, 24, 64]), np.array([0.0, 100]), np.array([16.0, 32])

    def pairs(chunk, context):
        return 5 + 2 * (chunk * context + chunk * (chunk + 1) / 2)

    axes = [chunks, contexts] if num_decode is None else [np.arange(1.0, num_decode + 1), chunks, contexts, kv]
    grid = np.meshgrid(*axes, indexing="ij")
    place = 0 if num_decode is None else 1
    own, table = by_pairs(axes, pairs(grid[place], grid[place + 1]), place)
    assert own[place].tolist() == [16, 24, 34, 44, 54, 64]
    assert [values.tolist() for values in own[place + 1 :]] == [values.tolist() for values in axes[place + 1 :]]
    exact = np.meshgrid(*own, indexing="ij")
    np.testing.assert_allclose(table, pairs(exact[place], exact[place + 1]), rtol=1e-12)


@pytest.mark.parametrize(
    ("gpu", "heads", "kv_heads", "batch"),
    [
        ("rtx-pro-6000", 32, 8, 32),  # whole from 37.6 on, which runs as 40
        ("rtx-pro-6000", 16, 4, 72),  # the same model on two GPUs: from 75.2 on
        ("rtx-4090", 32, 8, 24),
        ("a100-sxm-80gb", 32, 8, 16),  # from 21.6 on, which runs as 24
        ("rtx-4090", 32, 32, None),  # not split without grouped heads
        ("h100-sxm", 32, 8, None),  # another kernel
        (None, 32, 8, None),
        ("l4", 256, 128, None),  # whole from the first on
    ],
)
def test_batches_whose_contexts_are_split(gpu, heads, kv_heads, batch):
    assert largest_split_batch(gpu, heads, kv_heads) == batch


BATCHES, RATIOS, SPREADS = np.array([16.0, 32, 64]), np.array([0.1, 0.2, 0.4]), np.array([0.0, 100])
SKEW = np.array([[[0.0, n + 10 * ratio] for ratio in RATIOS] for n in (1, 2, 50)])


def test_skew_changes_between_a_batch_and_the_next():
    (batches, *others), table = changing_after(40, [BATCHES, RATIOS, SPREADS], SKEW)
    assert batches.tolist() == [16, 32, 40, 41, 64]
    assert [values.tolist() for values in others] == [RATIOS.tolist(), SPREADS.tolist()]
    assert table[[0, 1, 2, 4]].tolist() == SKEW[[0, 1, 1, 2]].tolist()
    as_many = [0.1, 0.2 * 41 / 64, 0.4 * 41 / 64]  # the first lies below what was timed
    np.testing.assert_allclose(table[3], [[0.0, 50 + 10 * ratio] for ratio in as_many], rtol=1e-12)


@pytest.mark.parametrize(
    ("batch", "points"),
    [(32, [16, 32, 33, 64]), (63, [16, 32, 63, 64]), (8, [16, 32, 64]), (64, [16, 32, 64]), (100, [16, 32, 64])],
)
def test_points_that_were_timed_stay_and_nothing_is_added_outside(batch, points):
    (batches, *_), table = changing_after(batch, [BATCHES, RATIOS, SPREADS], SKEW)
    assert batches.tolist() == points
    assert table[np.isin(batches, BATCHES)].tolist() == SKEW.tolist()
