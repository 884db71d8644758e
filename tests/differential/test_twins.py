"""The fast V1 planner equals the plain one, call by call, on random lives."""

import random
from collections import Counter

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.differential.lives import random_life
from tests.differential.lockstep import INTERESTING, compare_twins

NUM_LIVES = 240
RARE = (14, 117, 143)
"""Seeds of lives in which a request finishes while it waits, by the token that was in flight when it was preempted."""


def test_twins_agree_on_random_lives():
    seen: Counter[str] = Counter()

    @settings(max_examples=NUM_LIVES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def live(rng):
        life = random_life(rng)
        note(repr(life))
        seen["lives"] += 1
        assert compare_twins(life, seen) is None

    live()
    for seed in RARE:
        assert compare_twins(random_life(random.Random(seed)), seen) is None
    assert seen["lives"] >= NUM_LIVES
    assert {what for what in INTERESTING if not seen[what]} == set()
