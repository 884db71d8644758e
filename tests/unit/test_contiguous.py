"""Contiguous reservation: lengths, rounding, and what cannot happen."""

import pytest

from sim.errors import InvariantError
from sim.kv.contiguous import ContiguousKV
from sim.request import Request


def pool(reserve="max_tokens", usable_blocks=10):
    return ContiguousKV(usable_blocks, block_size=16, max_model_len=100, reserve=reserve)


@pytest.mark.parametrize(
    ("reserve", "prompt_tokens", "max_tokens", "num_blocks"),
    [
        ("max_tokens", 16, 16, 2),
        ("max_tokens", 16, 17, 3),
        ("max_tokens", 90, 50, 7),  # no further than max_model_len
        ("max_model_len", 1, 1, 7),
    ],
)
def test_stretch_is_the_longest_course_in_whole_blocks(reserve, prompt_tokens, max_tokens, num_blocks):
    assert pool(reserve).blocks_to_reserve(prompt_tokens, max_tokens) == num_blocks


def test_stretch_is_taken_and_given_back_whole():
    kv = pool()
    first, second = Request(0, 16, 16), Request(1, 100, 1)
    kv.allocate(first, 2)
    kv.allocate(second, 7)
    assert (kv.free_blocks, kv.used_blocks, first.num_blocks, second.num_blocks) == (1, 9, 2, 7)
    kv.free(first)
    kv.free(first)
    assert (kv.free_blocks, first.num_blocks) == (3, 0)
    with pytest.raises(InvariantError, match="7 of 10 KV blocks are still held"):
        kv.check_drained()
    kv.free(second)
    kv.check_drained()


def test_stretch_neither_grows_nor_exceeds_the_pool():
    kv = pool()
    request = Request(0, 16, 16)
    with pytest.raises(InvariantError, match="holds 0 blocks and takes 11 of 10"):
        kv.allocate(request, 11)
    with pytest.raises(InvariantError, match="takes 0 of"):
        kv.allocate(request, 0)
    kv.allocate(request, 2)
    with pytest.raises(InvariantError, match="holds 2 blocks and takes 1 of 8"):
        kv.allocate(request, 1)


def test_what_never_fits_is_said_with_its_limit():
    assert pool().never_fits(99, 50) is None
    assert pool().never_fits(100, 1) == "its prompt of 100 tokens leaves no room for an answer within max_model_len 100"
    assert (
        pool(usable_blocks=6).never_fits(90, 10)
        == "it reserves 7 KV blocks of 16 tokens (max_tokens) and the pool has 6"
    )
    assert (
        pool("max_model_len", usable_blocks=6).never_fits(1, 1)
        == "it reserves 7 KV blocks of 16 tokens (max_model_len) and the pool has 6"
    )
