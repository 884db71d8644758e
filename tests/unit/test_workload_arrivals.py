import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from sim.clock import NS_PER_S
from sim.errors import ScenarioError
from sim.options import Options
from sim.workload.base import ARRIVALS, Arrivals
from sim.workload.traffic import TrafficClass

OPEN = [
    {"kind": "constant", "rate_per_s": 7.0},
    {"kind": "poisson", "rate_per_s": 7.0},
    {"kind": "gamma", "rate_per_s": 7.0, "cv": 2.0},
    {"kind": "stages", "stages": [{"duration_s": 5, "rate_per_s": 3}, {"duration_s": 90, "rate_per_s": 20}]},
    {"kind": "burst", "num_requests": 9, "at_s": 1.5, "spread_s": 0.5, "every_s": 4.0},
]


def options_of(mapping: dict) -> Options:
    lengths = {"prompt_tokens": 1, "output_tokens": 1}
    return TrafficClass.model_validate({"name": "c", "arrivals": mapping, **lengths}).arrivals


def build(mapping: dict) -> Arrivals:
    return ARRIVALS.load(mapping["kind"]).build(options_of(mapping))


def draw(mapping: dict, num=None, duration_s=None, seed=1) -> list[int]:
    duration_ns = None if duration_s is None else round(duration_s * NS_PER_S)
    return build(mapping).draw(num, duration_ns, np.random.default_rng(seed)).tolist()


def refusal(mapping: dict) -> str:
    with pytest.raises(ValidationError) as caught:
        options_of(mapping)
    return caught.value.errors()[0]["msg"]


def test_constant_is_regular():
    assert draw({"kind": "constant", "rate_per_s": 4}, num=4) == [250_000_000, 500_000_000, 750_000_000, NS_PER_S]
    assert draw({"kind": "constant", "rate_per_s": 3}, duration_s=1) == [333_333_333, 666_666_667, NS_PER_S]
    assert draw({"kind": "constant", "rate_per_s": 3}, num=2, duration_s=1) == [333_333_333, 666_666_667]
    assert draw({"kind": "constant", "rate_per_s": 0.1}, duration_s=1) == []


@pytest.mark.parametrize("mapping", OPEN, ids=lambda mapping: mapping["kind"])
def test_limits_hold_and_smaller_ones_give_a_beginning(mapping):
    long = draw(mapping, num=1000)
    assert len(long) == 1000
    assert long == sorted(long)
    assert long[0] >= 0
    assert draw(mapping, num=10) == long[:10]
    assert draw(mapping, num=1000, duration_s=20) == [t for t in long if t <= 20 * NS_PER_S]
    assert draw(mapping, duration_s=20) == [t for t in long if t <= 20 * NS_PER_S]


@pytest.mark.parametrize("mapping", OPEN, ids=lambda mapping: mapping["kind"])
def test_twice_the_rate_takes_half_the_time(mapping):
    slow = np.array(draw(mapping, num=1000))
    fast = build(mapping).scaled(2.0).draw(1000, None, np.random.default_rng(1))
    if mapping["kind"] == "stages":  # stages keep their lengths: the first lasts 5 s at 6/s instead of 3/s
        assert abs(int((fast <= 5 * NS_PER_S).sum()) - 30) < 20
    else:
        assert np.abs(fast * 2 - slow).max() <= 2


@pytest.mark.parametrize(
    ("mapping", "cv"),
    [
        ({"kind": "poisson", "rate_per_s": 6.0}, 1.0),
        ({"kind": "gamma", "rate_per_s": 6.0, "cv": 2.0}, 2.0),
        ({"kind": "gamma", "rate_per_s": 6.0, "burstiness": 4.0}, 0.5),
    ],
)
def test_gaps_have_their_mean_and_variation(mapping, cv):
    gaps_s = np.diff([0, *draw(mapping, num=100_000)]) / NS_PER_S
    half_width = 3 * cv / 6 / np.sqrt(100_000)
    assert abs(gaps_s.mean() - 1 / 6) < half_width
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.03)


def test_poisson_gaps_are_exponential():
    gaps_s = np.diff([0, *draw({"kind": "poisson", "rate_per_s": 6.0}, num=20_000)]) / NS_PER_S
    assert stats.kstest(gaps_s, stats.expon(scale=1 / 6).cdf).pvalue > 0.01


def test_rescaled_gamma_ends_at_number_over_rate():
    mapping = {"kind": "gamma", "rate_per_s": 5.0, "burstiness": 0.5, "rescale": True}
    assert draw(mapping, num=200)[-1] == 40 * NS_PER_S
    assert draw(mapping, duration_s=40) == draw(mapping, num=200)
    free = np.array(draw({**mapping, "rescale": False}, num=200))
    assert np.array(draw(mapping, num=200)) == pytest.approx(free * (40e9 / free[-1]), abs=10)


def test_regular_stages_follow_the_expected_number():
    stages = [
        {"duration_s": 2, "rate_per_s": 1},
        {"duration_s": 10, "rate_per_s": 0},
        {"duration_s": 4, "start_rate_per_s": 0, "end_rate_per_s": 1},
        {"duration_s": 4, "start_rate_per_s": 1, "end_rate_per_s": 0},
    ]
    mapping = {"kind": "stages", "process": "constant", "stages": stages}
    # the up-ramp has t²/8 arrivals after t seconds, the down-ramp t - t²/8 more
    assert draw(mapping) == [
        1_000_000_000,
        2_000_000_000,
        14_828_427_125,
        16_000_000_000,
        17_171_572_875,
        20_000_000_000,
    ]
    assert draw(mapping, duration_s=16) == [1_000_000_000, 2_000_000_000, 14_828_427_125, 16_000_000_000]
    assert draw(mapping, num=2) == [1_000_000_000, 2_000_000_000]


def test_poisson_ramp_has_the_ramp_for_a_density():
    ramp = {"kind": "stages", "stages": [{"duration_s": 100, "start_rate_per_s": 50, "end_rate_per_s": 350}]}
    times_s = np.array(draw(ramp)) / NS_PER_S
    assert abs(len(times_s) - 20_000) < 3 * np.sqrt(20_000)
    assert stats.kstest(times_s, lambda t: (50 * t + 1.5 * t**2) / 20_000).pvalue > 0.01


def test_burst_comes_at_once_and_again():
    assert draw({"kind": "burst", "num_requests": 3}) == [0, 0, 0]
    assert draw({"kind": "burst", "num_requests": 3}, num=2) == [0, 0]
    assert draw({"kind": "burst", "num_requests": 2, "at_s": 1, "every_s": 3}, duration_s=5) == [
        *[NS_PER_S] * 2,
        *[4 * NS_PER_S] * 2,
    ]
    spread = draw({"kind": "burst", "num_requests": 1000, "at_s": 1, "spread_s": 2})
    assert spread == sorted(spread)
    assert NS_PER_S <= spread[0] < 1.1 * NS_PER_S < 2.9 * NS_PER_S < spread[-1] <= 3 * NS_PER_S


def test_closed_loop_gives_think_times():
    loop = build({"kind": "closed_loop", "num_clients": 32, "think_time_s": 1.5})
    assert loop.clients == 32
    assert loop.draw(3, None, np.random.default_rng(1)).tolist() == [1_500_000_000] * 3
    assert loop.scaled(0.5).clients == 16
    thinking = {"kind": "closed_loop", "num_clients": 1, "think_time_s": {"kind": "exponential", "mean_s": 2.0}}
    assert np.mean(draw(thinking, num=50_000)) == pytest.approx(2e9, rel=0.02)
    assert draw({"kind": "closed_loop", "num_clients": 4}, num=2) == [0, 0]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"kind": "poisson", "rate_per_s": 0}, "Input should be greater than 0"),
        ({"kind": "poisson", "rate_per_s": -2.0}, "Input should be greater than 0"),
        ({"kind": "poisson", "rate_per_s": float("nan")}, "Input should be a finite number"),
        ({"kind": "gamma", "rate_per_s": 1}, "neither burstiness nor cv is given; give one of them"),
        (
            {"kind": "gamma", "rate_per_s": 1, "cv": 2, "burstiness": 1},
            "both burstiness and cv are given; give one of them",
        ),
        (
            {"kind": "burst", "num_requests": 1, "spread_s": 2, "every_s": 1},
            "spread_s 2 is above every_s 1; a burst must end before the next one",
        ),
        ({"kind": "stages", "stages": []}, "List should have at least 1 item after validation, not 0"),
        (
            {"kind": "stages", "stages": [{"duration_s": 1, "rate_per_s": 0}]},
            "the rate of every stage is 0; at least one must be above 0",
        ),
        ({"kind": "stages", "stages": [{"duration_s": 1, "start_rate_per_s": 1}]}, "Field required"),
        ({"kind": "closed_loop", "num_clients": 0}, "Input should be greater than or equal to 1"),
        (
            {"kind": "poison", "rate_per_s": 1},
            "unknown arrival process 'poison'; known: constant, poisson, gamma, stages, burst, closed_loop. "
            "Did you mean 'poisson'?",
        ),
    ],
)
def test_bad_options_are_refused(mapping, message):
    assert refusal(mapping) == message


@pytest.mark.parametrize("mapping", OPEN, ids=lambda mapping: mapping["kind"])
def test_too_many_requests_are_refused_before_they_are_drawn(mapping):
    if mapping["kind"] == "stages":
        mapping = {"kind": "stages", "stages": [{"duration_s": 1e6, "rate_per_s": 1e6}]}
    with pytest.raises(ScenarioError, match=r"requests; a run holds at most 1e\+08"):
        draw(mapping, num=10**12)


def test_times_beyond_the_clock_are_refused():
    with pytest.raises(ScenarioError) as caught:
        draw({"kind": "constant", "rate_per_s": 1e-9}, num=10)
    assert str(caught.value) == (
        ": the last request would arrive after 1e+10 s; a run lasts at most 4e+09 s. "
        "Raise the rate or lower the number of requests."
    ).removeprefix(": ")
