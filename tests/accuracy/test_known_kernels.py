"""Whether published tables say of their kernels what `calibration/known_kernels.py` takes them to do."""

import numpy as np
import pandas as pd
import pytest

from calibration.grids import rising, to_grid
from calibration.known_kernels import TILE_TOKENS, by_pairs, largest_split_batch

PROFILES = "data/profiles/llmservingsim"
BUNDLES = [("RTX4090", 1), ("RTXPRO6000", 1), ("RTXPRO6000", 2)]
GPUS = {"RTX4090": "rtx-4090", "RTXPRO6000": "rtx-pro-6000"}


def read(shared, hardware, tensor_parallel, name):
    folder = shared / PROFILES / f"{hardware}_Llama-3.1-8B"
    return pd.read_csv(next(folder.glob(f"tp{tensor_parallel}_{name}.csv*")))


@pytest.mark.parametrize(("hardware", "tensor_parallel"), BUNDLES)
def test_a_long_context_costs_nothing_until_contexts_are_left_whole(shared, hardware, tensor_parallel):
    """The rule comes from FlashAttention's source; that the step lies where it says is in three tables."""
    rows = read(shared, hardware, tensor_parallel, "skew")
    rows = rows[(rows["pc"] == 0) & (rows["skew"] == 4) & rows["kvs"].between(512, 4096) & (rows["ratio"] <= 0.125)]
    added = ((rows["t_skew_us"] / rows["t_mean_us"]) - 1).groupby(rows["n"]).median()
    step = added.diff()
    split = largest_split_batch(GPUS[hardware], 32 // tensor_parallel, 8 // tensor_parallel)
    first_whole = {("RTX4090", 1): 32, ("RTXPRO6000", 1): 64, ("RTXPRO6000", 2): 128}[hardware, tensor_parallel]
    assert (step.idxmax(), step.max() > 0.18) == (first_whole, True)
    assert first_whole / 2 <= split < first_whole


@pytest.mark.parametrize(("hardware", "tensor_parallel"), BUNDLES)
@pytest.mark.parametrize("product", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
def test_products_rise_after_whole_tiles(shared, hardware, tensor_parallel, product):
    rows = read(shared, hardware, tensor_parallel, "dense")
    rows = rows[(rows["layer"] == product) & (rows["tokens"] >= 128)].sort_values("tokens")
    tokens, us = rows["tokens"].to_numpy(), rising(rows["time_us"].to_numpy())
    after = tokens[:-1] % TILE_TOKENS == 0
    assert after.mean() == pytest.approx(0.25, abs=0.01)
    assert np.diff(us)[after].sum() > 0.88 * (us[-1] - us[0])


def test_pairs_foretell_chunks_better_than_a_line_where_they_were_timed_far_apart(shared):
    """Every other chunk of the RTX 4090 from its neighbours; what is left out is then a factor of two away."""
    names = ["n_decode", "prefill_chunk", "kv_prefill", "kv_decode"]
    rows = read(shared, "RTX4090", 1, "attention")
    rows = rows[(rows["prefill_chunk"] >= 128) & (rows["n_decode"] > 0)]
    axes, table = to_grid([rows[name].to_numpy(dtype=float) for name in names], rows["time_us"].to_numpy())
    chunks = axes[1]
    assert chunks.tolist() == [128, 256, 512, 1024, 2048]
    kept = table[:, ::2]
    own, filled = by_pairs([axes[0], chunks[::2], *axes[2:]], kept, 1)
    line, pairs = (
        np.nanmean(np.abs(_at(points, times, chunks[1::2]) / table[:, 1::2] - 1))
        for points, times in ((chunks[::2], kept), (own[1], filled))
    )
    assert pairs < 0.7 * line


def _at(points, times, chunks):
    """Times along the second axis, by a line between its points."""
    right = np.searchsorted(points, chunks)
    share = ((chunks - points[right - 1]) / (points[right] - points[right - 1])).reshape(1, -1, 1, 1)
    return times[:, right - 1] + share * (times[:, right] - times[:, right - 1])
