import numpy as np
import pytest

from calibration import raw
from calibration.points import DENSE, NO_LIMIT, SAMPLED, Limits, Point, candidates, coarse, spread_contexts
from sim.errors import ArtifactError

LIMITS = Limits(max_num_batched_tokens=128, max_num_seqs=16, max_model_len=256, cache_tokens=NO_LIMIT)


def test_a_point_is_told_apart_by_the_sums_over_its_contexts():
    point = Point("step", num_tokens=12, num_seqs=3, chunk_tokens=10, chunk_context_tokens=4, contexts=(5, 7))
    assert point.key == {
        "operator": "step",
        "mode": "eager",
        "num_tokens": 12,
        "num_seqs": 3,
        "chunk_tokens": 10,
        "chunk_context_tokens": 4,
        "num_decodes": 2,
        "decode_context_tokens": 12,
        "decode_context_max": 7,
        "decode_context_sq": 74.0,
    }
    assert point.key.keys() == raw.KEY.keys()
    assert point.cached_tokens == 12 + 2 + 14


def test_unequal_contexts_keep_their_mean():
    assert spread_contexts(4, 100, 3.0) == (100,) * 4
    contexts = spread_contexts(16, 100, 3.0)
    assert contexts == (363,) * 2 + (63,) * 14
    assert np.mean(contexts) == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize("has_experts", [False, True])
def test_the_grid_spans_every_operator_up_to_the_limits(has_experts: bool):
    points = coarse(LIMITS, has_experts, ("eager", "graph"))
    assert {point.operator for point in points} == {
        *(set(DENSE) - ({"gate_up_proj", "down_proj"} if has_experts else {"moe"})),
        *SAMPLED,
        "prefill_attention",
        "decode_attention",
        "mixed_attention",
        "step",
    }
    norms = [point.num_tokens for point in points if point.operator == "norm"]
    assert norms == [1, 3, 11, 38, 128]
    decodes = {(len(p.contexts), p.contexts[0]) for p in points if p.operator == "decode_attention"}
    assert {(1, 16), (1, 255), (16, 16), (16, 255)} <= decodes
    chunks = {(p.chunk_tokens, p.chunk_context_tokens) for p in points if p.operator == "prefill_attention"}
    assert (128, 0) in chunks
    assert max(n + c for n, c in chunks) <= 256
    mixed = [point for point in points if point.operator == "mixed_attention"]
    assert 30 < len(mixed) < 100
    assert {len(point.contexts) for point in mixed} == {1, 4, 16}
    assert len({point.contexts[0] for point in mixed}) > 2
    graphs = [point for point in points if point.mode == "graph"]
    assert {point.operator for point in graphs} == {"step"}
    assert all(point.contexts and not point.chunk_tokens for point in graphs)


def test_candidates_are_more_and_unequal_and_each_is_there_once():
    rough, fine = (make(LIMITS, False, ("eager",)) for make in (coarse, candidates))
    keys = [tuple(point.key.values()) for point in fine]
    assert len(fine) > 2 * len(rough)
    assert len(set(fine)) == len(fine)
    assert any(len(set(point.contexts)) > 1 for point in fine)
    assert len(set(keys)) == len(keys)


def test_nothing_is_asked_for_that_the_cache_cannot_hold():
    small = Limits(128, 16, 256, cache_tokens=1000)
    points = candidates(small, False, ("eager",))
    assert max(point.cached_tokens for point in points) <= 1000
    assert len(points) < len(candidates(LIMITS, False, ("eager",)))


def test_limits_that_leave_no_grid_are_refused():
    with pytest.raises(ArtifactError, match="--max-num-seqs: is 1; at least 2"):
        Limits(128, 1, 256, NO_LIMIT)
