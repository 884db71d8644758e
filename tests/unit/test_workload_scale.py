"""More or longer requests than a scenario says, and other recordings with the habits of a trace."""

from pathlib import Path

import numpy as np
import pytest

from sim.clock import NS_PER_S
from sim.errors import ScenarioError
from sim.rng import stream
from sim.tokens import Run, TokenRuns
from sim.workload.azure import AzureOptions
from sim.workload.base import TraceRows
from sim.workload.draw import draw_traffic
from sim.workload.replay import play
from sim.workload.traffic import Scale, TrafficClass

CHAT = {
    "name": "chat",
    "arrivals": {"kind": "poisson", "rate_per_s": 5.0},
    "prompt_tokens": {"kind": "uniform", "low": 1, "high": 1000},
    "output_tokens": 3,
}
SECONDS = TraceRows(np.arange(100) * NS_PER_S, np.arange(1, 101), np.arange(1, 101))


def drawn(scale=None, folder=Path(), **fields):
    chat = TrafficClass.model_validate({**CHAT, **fields})
    return draw_traffic([chat], arrivals=None, num_requests=50, duration_ns=None, seed=1, folder=folder, scale=scale)


def played(rows=SECONDS, num_requests=None, duration_ns=None, seed=1, **knobs) -> TraceRows:
    options = AzureOptions(kind="azure", path="trace.csv", **knobs)
    return play(rows, options, stream(seed, "test"), num_requests=num_requests, duration_ns=duration_ns)


def test_the_same_requests_come_faster():
    base, scaled = drawn(), drawn(Scale(rate=4.0))
    assert np.abs(base.arrival_ns - 4 * scaled.arrival_ns).max() <= 4
    assert base.prompt_tokens.tolist() == scaled.prompt_tokens.tolist()


def test_the_same_requests_are_longer_and_never_empty():
    base = drawn()
    assert drawn(Scale(prompt_tokens=1.5)).prompt_tokens.tolist() == np.rint(1.5 * base.prompt_tokens).tolist()
    assert drawn(Scale(output_tokens=0.01)).output_tokens.tolist() == [1] * 50


def test_more_load_on_a_closed_loop_is_more_clients():
    loop = {"kind": "closed_loop", "num_clients": 4}
    assert drawn(Scale(rate=2.5), arrivals=loop).pools[0].num_clients == 10


def test_prompts_whose_tokens_a_trace_names_may_grow_but_not_shrink(tmp_path: Path):
    line = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    (tmp_path / "trace.jsonl").write_text(line)
    trace = {"trace": {"kind": "mooncake", "path": "trace.jsonl"}}
    replay = TrafficClass.model_validate({"name": "replay", **trace})
    rest = {"arrivals": None, "num_requests": None, "duration_ns": None, "seed": 1, "folder": tmp_path}
    assert draw_traffic([replay], scale=Scale(prompt_tokens=1.5), **rest).prompt_tokens.tolist() == [900]
    with pytest.raises(ScenarioError, match=r"scale.prompt_tokens: 0.5 would cut prompts"):
        draw_traffic([replay], scale=Scale(prompt_tokens=0.5), **rest)


def test_a_resampled_trace_is_blocks_of_neighbours_at_the_recorded_rate():
    rows = played(resample_s=10.0)
    steps = np.diff(rows.prompt_tokens) % 100
    assert np.count_nonzero(steps == 1) >= 89  # ten blocks of ten
    assert np.count_nonzero(steps != 1) > 5
    assert rows.prompt_tokens.tolist() == rows.output_tokens.tolist()
    assert abs(len(rows) - 100) <= 10
    assert np.all(np.diff(rows.arrival_ns) >= 0)
    assert rows.arrival_ns[-1] / len(rows) == pytest.approx(NS_PER_S, rel=0.02)


def test_resampling_goes_on_for_as_long_as_a_run():
    assert len(played(resample_s=10.0, num_requests=1234)) == 1234
    assert len(played(resample_s=10.0, limit=7, num_requests=1234)) == 7
    until = played(resample_s=10.0, duration_ns=1000 * NS_PER_S, rate_scale=2.0)
    assert until.arrival_ns[-1] == pytest.approx(1000 * NS_PER_S, rel=0.02)
    assert len(until) == pytest.approx(2000, rel=0.02)


def test_another_seed_is_another_recording_and_blocks_of_a_short_trace_are_shorter():
    first, second = (played(resample_s=10.0, seed=seed).prompt_tokens.tolist() for seed in (1, 2))
    assert first != second
    steps = np.diff(played(resample_s=1e6).prompt_tokens) % 100
    assert np.count_nonzero(steps != 1) > 5


def test_a_request_that_is_drawn_again_shares_nothing_with_itself():
    rows = TraceRows(
        np.arange(10) * NS_PER_S,
        np.full(10, 100),
        np.arange(1, 11),
        lambda row: TokenRuns((Run("system", 50), Run(f"user {row}", 50))),
    )
    again = played(rows, resample_s=5.0, num_requests=200)
    prefixes = [again.tokens(row).prefix for row in range(200)]
    assert len(set(prefixes)) == 200
    assert len({prefix[0] for prefix in prefixes}) < 40  # those drawn as often share the system's text
