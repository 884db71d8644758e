"""The buddy allocator: what is cut, what joins again, and free memory that nobody can have."""

import numpy as np
import pytest

from sim.errors import InvariantError
from sim.kv.buddy import BuddyKV
from sim.request import Request


def pool(usable_blocks=16, reserve="max_tokens"):
    return BuddyKV(usable_blocks, block_size=1, max_model_len=100, reserve=reserve)


@pytest.mark.parametrize(
    ("reserve", "num_blocks"), [("max_tokens", 64), ("output_tokens", 32), ("power_of_two", 32), ("max_model_len", 128)]
)
def test_stretches_are_powers_of_two(reserve, num_blocks):
    kv = pool(200, reserve)
    request = Request(0, 14, 13, max_tokens=40)
    assert kv.blocks_to_reserve(14, kv.room_for_answer(request)) == num_blocks


def test_room_is_the_true_length_or_the_power_of_two_above_it():
    request = Request(0, 10, 25, max_tokens=40)
    assert [pool(reserve=r).room_for_answer(request) for r in ("max_tokens", "output_tokens", "power_of_two")] == [
        40,
        25,
        32,
    ]
    assert pool(reserve="output_tokens").room_for_answer(Request(0, 10, 25, max_tokens=7)) == 7


def test_holes_are_lost_until_their_other_halves_are_free():
    kv = pool()
    requests = [Request(i, 1, 1) for i in range(4)]
    for request in requests:
        kv.allocate(request, 4)
    assert not kv.fits(1)
    kv.free(requests[0])
    kv.free(requests[2])
    assert (kv.free_blocks, kv.fits(4), kv.fits(8)) == (8, True, False)
    with pytest.raises(InvariantError, match="takes 8 blocks, for which there is no chunk"):
        kv.allocate(Request(9, 1, 1), 8)
    kv.free(requests[1])
    assert kv.fits(8)
    assert not kv.fits(16)
    kv.free(requests[3])
    assert kv.fits(16)
    kv.check_drained()


def test_a_pool_of_any_size_begins_as_powers_of_two():
    # 15,728 slots for OPT-13B on 40 GB: seven requests of 2,048, as the vLLM paper finds for Orca (Max)
    kv = pool(15_728)
    assert kv.longest_stretch == 8192
    num = 0
    while kv.fits(2048):
        kv.allocate(Request(num, 1, 1), 2048)
        num += 1
    assert (num, kv.free_blocks) == (7, 15_728 - 7 * 2048)
    assert kv.never_fits(1, 1) is None
    assert "it reserves 16 KV blocks of 1 tokens (max_tokens) and the pool has 12" in str(pool(12).never_fits(8, 8))


def test_only_powers_of_two_are_given():
    with pytest.raises(InvariantError, match="takes 3 blocks"):
        pool().allocate(Request(0, 1, 1), 3)


def test_no_two_requests_ever_share_a_block():
    kv, rng = pool(1000), np.random.default_rng(0)
    held: dict[Request, range] = {}
    most = 0
    for i in range(3000):
        if held and rng.random() < 0.45:
            request = list(held)[rng.integers(len(held))]
            kv.free(request)
            del held[request]
            continue
        request, num_blocks = Request(i, 1, 1), 1 << int(rng.integers(8))
        if kv.fits(num_blocks):
            kv.allocate(request, num_blocks)
            first = kv._first_block[request]
            held[request] = range(first, first + num_blocks)
            blocks = [block for stretch in held.values() for block in stretch]
            assert len(set(blocks)) == len(blocks) == kv.used_blocks
            assert max(blocks) < 1000
            most = max(most, len(blocks))
    assert most > 900
    for request in held:
        kv.free(request)
    kv.check_drained()
    assert kv.fits(512)
