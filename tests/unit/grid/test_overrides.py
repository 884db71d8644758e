"""Moving an engine of the grid along one axis: what is accepted, what it changes, and what makes no sense."""

from dataclasses import replace

import numpy as np
import pytest

from sim.build import run
from sim.clients import Clients
from sim.clock import Clock
from sim.core import EngineCore
from sim.cost.linear import Linear
from sim.engine import Engine
from sim.errors import ScenarioError
from sim.policies.base import POLICIES, EngineLimits, StepPredictor
from sim.policies.grid.composition import COMPOSITIONS
from sim.policies.grid.pacing import PACINGS, Situation
from sim.record import Recorder
from sim.scenario import parse_scenario
from tests.laws import test_laws as laws

GRID = ("vllm-v0", "sarathi", "sarathi-vllm", "sarathi-orca", "sarathi-faster-transformer", "sarathi-simple-chunking")
LONG_ANSWERS = laws.columns(
    24,
    arrival_ns=np.cumsum(np.full(24, 9_000_000, dtype=np.int64)),
    prompt_tokens=np.random.default_rng(1).integers(1, 12, 24),
    output_tokens=np.random.default_rng(2).integers(9, 28, 24),
)
"""So far apart and so long that many steps change nothing."""


def tables_of(name, options, num_gpu_blocks, traffic, *, macro_steps):
    cls = POLICIES.load(name)
    limits = EngineLimits(laws.MAX_MODEL_LEN, laws.BLOCK_SIZE, num_gpu_blocks, ("all",))
    cost = Linear(laws.COST)
    limits = replace(limits, predictor=StepPredictor(cost.price, cost.host_ns))
    policy = cls.build(cls.Options(policy=name, **options), limits)
    clock, recorder = Clock(), Recorder()
    engine = Engine(clock, EngineCore(policy), cost, recorder, macro_steps=macro_steps)
    Clients(clock, engine, recorder, traffic).start()
    clock.run()
    return recorder.tables()


@pytest.mark.parametrize("case", [case for case in laws.CASES if case[0] in GRID], ids=": ".join)
@pytest.mark.parametrize("num_gpu_blocks", laws.POOLS.values(), ids=laws.POOLS)
@pytest.mark.parametrize("traffic", [LONG_ANSWERS, laws.TRAFFIC["poisson"]], ids=["long answers", "poisson"])
def test_tables_are_the_same_when_steady_steps_are_advanced_at_once(case, num_gpu_blocks, traffic):
    assert_same_at_once(case[0], laws.options_of(case), num_gpu_blocks, traffic)


PACING_RULES = [
    {"kind": "delay_factor", "factor": 1.0},
    {"kind": "every_n_steps", "n": 4},
    {"kind": "min_batch", "k": 2, "max_wait_steps": 9},
    {"kind": "max_consecutive", "n": 1},
    {"kind": "waiting_served_ratio", "ratio": 0.9, "max_steps": 5},
    laws.PREDICTED_ITL,
]


@pytest.mark.parametrize("step_composition", COMPOSITIONS)
@pytest.mark.parametrize("rule", PACING_RULES, ids=[rule["kind"] for rule in PACING_RULES])
@pytest.mark.parametrize("traffic", [LONG_ANSWERS, laws.TRAFFIC["poisson"]], ids=["long answers", "poisson"])
def test_so_they_are_with_every_composition_under_every_pacing_rule(step_composition, rule, traffic):
    axes = {"step_composition": step_composition, "prefill_pacing": rule, "kv_admission": "prompt"}
    assert_same_at_once("sarathi-orca", {"max_num_seqs": laws.NUM_SLOTS, **axes}, laws.POOLS["ample"], traffic)


def assert_same_at_once(name, options, num_gpu_blocks, traffic):
    one_by_one = tables_of(name, options, num_gpu_blocks, traffic, macro_steps=False)
    at_once = tables_of(name, options, num_gpu_blocks, traffic, macro_steps=True)
    for name in ("iterations", "chunks", "requests", "segments"):
        for column, values in getattr(one_by_one, name).items():
            assert np.array_equal(values, getattr(at_once, name)[column]), (name, column)


def scenario(**engine):
    return {
        "name": "axes",
        "model": "llama-3.1-8b",
        "hardware": {"gpu": "h100-sxm"},
        "engine": {"policy": "vllm-v0", "max_model_len": 2048, "num_gpu_blocks": 200, **engine},
        "traffic": [
            {
                "name": "chat",
                "arrivals": {"kind": "poisson", "rate_per_s": 30.0},
                "prompt_tokens": {"kind": "uniform", "low": 50, "high": 300},
                "output_tokens": {"kind": "uniform", "low": 50, "high": 300},
            }
        ],
        "run": {"num_requests": 80},
    }


def refusal(**engine):
    with pytest.raises(ScenarioError) as caught:
        run(scenario(**engine))
    return str(caught.value)


@pytest.mark.parametrize(
    ("engine", "key", "reason"),
    [
        ({"kv_admission": "max_tokens", "preemption": "swap"}, "engine.preemption", "has no meaning with kv_admission"),
        ({"kv_admission": "max_tokens", "watermark": 0.1}, "engine.watermark", "has no meaning with kv_admission"),
        ({"preemption": "swap", "preemption_mode": "recompute"}, "engine.preemption", "contradicts preemption_mode"),
        (
            {"prefill_pacing": {"kind": "every_n_steps", "n": 4}, "scheduler_delay_factor": 0.5},
            "engine.prefill_pacing",
            "contradicts scheduler_delay_factor",
        ),
        (
            {"queue_order": {"kind": "fcfs"}, "scheduling_policy": "priority"},
            "engine.queue_order",
            "contradicts scheduling_policy",
        ),
        ({"preemption": "swap", "enable_prefix_caching": True}, "engine.preemption", "shared blocks"),
        ({"victim": "oldest", "kv_admission": "max_tokens"}, "engine.victim", "has no meaning with kv_admission"),
        ({"victim": "oldest", "preemption": "pause"}, "engine.victim", "has no meaning with preemption 'pause'"),
        ({"victim": "oldest", "scheduling_policy": "priority"}, "engine.victim", "contradicts scheduling_policy"),
        ({"victim": "oldest", "enable_prefix_caching": True}, "engine.victim", "prefix caching"),
        ({"victim": "youngest"}, "engine.victim", "'youngest'"),
        ({"victim_goes_to": "tail", "kv_admission": "max_tokens"}, "engine.victim_goes_to", "has no meaning with"),
        ({"victim_goes_to": "tail", "preemption": "swap"}, "engine.victim_goes_to", "preemption 'swap'"),
        ({"victim_goes_to": "tail", "preemption_mode": "swap"}, "engine.victim_goes_to", "preemption 'swap'"),
        ({"victim_goes_to": "tail", "queue_order": {"kind": "vtc"}}, "engine.victim_goes_to", "queue_order 'vtc'"),
        ({"victim_goes_to": "tail", "scheduling_policy": "priority"}, "engine.victim_goes_to", "contradicts"),
        ({"victim_goes_to": "back"}, "engine.victim_goes_to", "'back'"),
        (
            {"step_composition": "closed_batch", "enable_chunked_prefill": True},
            "engine.step_composition",
            "needs whole prompts",
        ),
        ({"policy": "sarathi", "step_composition": "closed_batch"}, "engine.step_composition", "needs whole prompts"),
        (
            {"step_composition": "decodes_first", "scheduling_policy": "priority"},
            "engine.step_composition",
            "contradicts scheduling_policy",
        ),
        ({"step_composition": "prefills"}, "engine.step_composition", "'prefills'"),
        ({"head_of_line": "skip", "queue_order": {"kind": "vtc"}}, "engine.head_of_line", "queue_order 'vtc'"),
        ({"head_of_line": "skip", "scheduling_policy": "priority"}, "engine.head_of_line", "contradicts"),
        ({"head_of_line": "pass"}, "engine.head_of_line", "'pass'"),
        (
            {"policy": "sarathi", "preemption": "swap", "pipeline_parallel_size": 2},
            "engine.preemption",
            "needs the results",
        ),
        (
            {"policy": "sarathi", "preemption": "pause", "pipeline_parallel_size": 2},
            "engine.preemption",
            "needs the results",
        ),
        ({"preemption": "evict"}, "engine.preemption", "'evict'"),
        ({"prefill_pacing": {"kind": "sometimes"}}, "engine.prefill_pacing", "unknown pacing rule 'sometimes'"),
        ({"prefill_pacing": {"kind": "every_n_steps", "n": 0}}, "engine.prefill_pacing.n", "0"),
        ({"queue_order": {"kind": "lifo"}}, "engine.queue_order", "unknown queue order 'lifo'"),
        ({"preemption": "swap", "swap_space": 0.0}, "engine.num_cpu_blocks", "the 0 blocks of host memory"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(engine, key, reason):
    message = refusal(**engine)
    assert key in message
    assert reason in message


V1 = {"policy": "vllm-v1", "async_scheduling": False, "enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("engine", "key", "reason"),
    [
        (V1 | {"preemption": "swap", "enable_prefix_caching": True}, "engine.preemption", "shared blocks"),
        (V1 | {"preemption": "pause", "async_scheduling": True}, "engine.preemption", "before the next one is planned"),
        (
            V1 | {"queue_order": {"kind": "vtc"}, "scheduling_policy": "priority"},
            "engine.queue_order",
            "contradicts scheduling_policy",
        ),
        (V1 | {"victim": "oldest", "preemption": "pause"}, "engine.victim", "has no meaning with preemption 'pause'"),
        (
            V1 | {"victim": "lowest_priority", "scheduling_policy": "priority"},
            "engine.victim",
            "contradicts scheduling_policy priority",
        ),
        (V1 | {"victim": "youngest"}, "engine.victim", "'youngest'"),
        (V1 | {"head_of_line": "skip", "queue_order": {"kind": "vtc"}}, "engine.head_of_line", "queue_order 'vtc'"),
        (V1 | {"head_of_line": "skip", "scheduling_policy": "priority"}, "engine.head_of_line", "contradicts"),
        (V1 | {"victim_goes_to": "tail", "preemption": "reject"}, "engine.victim_goes_to", "preemption 'reject'"),
        (
            V1 | {"victim_goes_to": "arrival_order", "queue_order": {"kind": "edf", "ttft_ms": 100}},
            "engine.victim_goes_to",
            "queue_order 'edf'",
        ),
        (
            V1 | {"victim_goes_to": "tail", "scheduling_policy": "priority"},
            "engine.victim_goes_to",
            "contradicts scheduling_policy",
        ),
        (V1 | {"preemption": "swap", "num_cpu_blocks": 3}, "engine.num_cpu_blocks", "do not hold"),
    ],
)
def test_what_makes_no_sense_on_vllm_v1(engine, key, reason):
    message = refusal(**engine)
    assert key in message
    assert reason in message


def test_vllm_v1_without_an_override_is_its_own_planner():
    cls = POLICIES.load("vllm-v1")
    limits = EngineLimits(max_model_len=2048, block_size=16, num_gpu_blocks=200)
    assert type(cls.build(cls.Options(policy="vllm-v1"), limits)).__name__ == "VllmV1"
    moved = cls.Options(policy="vllm-v1", queue_order={"kind": "vtc"})
    assert type(cls.build(moved, limits)).__name__ == "VllmV1Axes"


def test_priority_scheduling_can_be_moved_along_other_axes():
    common = V1 | {"scheduling_policy": "priority"}
    paced = run(scenario(**common, prefill_pacing={"kind": "every_n_steps", "n": 1}))
    own = run(scenario(**common))
    for name, values in own.tables.requests.items():
        assert values.tolist() == paced.tables.requests[name].tolist()


@pytest.mark.parametrize("engine", [{}, V1], ids=["vllm-v0", "vllm-v1"])
def test_each_way_out_of_memory_pressure_has_its_own_cost(engine):
    ways = ("recompute", "swap", "pause", "reject")
    results = {name: run(scenario(**engine, preemption=name)) for name in ways}
    recomputed = {name: int(r.tables.requests["recomputed_tokens"].sum()) for name, r in results.items()}
    swapped = {name: int(r.tables.iterations["num_swapped_blocks"].sum()) for name, r in results.items()}
    rejected = {name: int((r.tables.requests["outcome"] == 2).sum()) for name, r in results.items()}
    assert recomputed["recompute"] > 0
    assert recomputed["pause"] < recomputed["recompute"]
    assert recomputed["swap"] == recomputed["reject"] == 0
    assert swapped["swap"] > 0
    assert swapped["recompute"] == swapped["pause"] == swapped["reject"] == 0
    assert rejected["reject"] > 0
    assert rejected["recompute"] == rejected["swap"] == rejected["pause"] == 0


def test_swapped_blocks_take_their_time_on_the_host_link():
    results = run(scenario(preemption="swap"))
    iterations = results.tables.iterations
    is_swapping = iterations["num_swapped_blocks"] > 0
    device_ns = (iterations["end_ns"] - iterations["start_ns"])[is_swapping]
    # 16 tokens of 128 KiB at 0.8 of 64 GB/s
    link_ns = iterations["num_swapped_blocks"][is_swapping] * 16 * 131_072 / (0.8 * 64)
    assert (device_ns > link_ns).all()
    free = run(scenario(preemption="recompute"))
    assert results.breakdown is not None
    assert free.tables.iterations["num_swapped_blocks"].sum() == 0


SITUATION = Situation(
    now_ns=0, earliest_arrival_ns=None, num_waiting=1, num_running=10, num_decoding=10, num_admitted=0
)


def opened(options, num_steps, situation=SITUATION, admits=True):
    """In which of so many steps the rule opens, when everything that it allows is admitted."""
    cls = PACINGS.load(options["kind"])
    rule = cls.build(cls.Options(**options))
    answers = []
    for _ in range(num_steps):
        answers.append(rule.opens(situation))
        rule.planned(int(answers[-1] and admits), situation.num_waiting)
    return answers


def test_pacing_rules():
    assert opened({"kind": "always"}, 3) == [True] * 3
    assert opened({"kind": "every_n_steps", "n": 3}, 7) == [True, False, False, True, False, False, True]
    assert opened({"kind": "max_consecutive", "n": 2}, 6) == [True, True, False, True, True, False]
    assert opened({"kind": "min_batch", "k": 4, "max_wait_steps": 2}, 6) == [False, False, True, False, False, True]
    ratio = {"kind": "waiting_served_ratio", "ratio": 0.3, "max_steps": 20}
    assert opened(ratio, 22) == [False] * 20 + [True, False]
    assert opened(ratio, 1, SITUATION._replace(num_waiting=3)) == [True]
    for options in ({"kind": "every_n_steps", "n": 3}, {"kind": "min_batch", "k": 4, "max_wait_steps": 2}):
        assert opened(options, 3, SITUATION._replace(num_decoding=0, num_running=0)) == [True] * 3


def test_delay_factor_waits_in_proportion_to_the_last_prompts():
    cls = PACINGS.load("delay_factor")
    rule = cls.build(cls.Options(kind="delay_factor", factor=2.0))
    assert rule.opens(SITUATION._replace(now_ns=100, earliest_arrival_ns=99, num_running=0))
    rule.planned(1, 0)
    assert not rule.opens(SITUATION._replace(now_ns=110, earliest_arrival_ns=95))  # waited 15, the prompts took 10
    assert rule.opens(SITUATION._replace(now_ns=116, earliest_arrival_ns=95))


def test_an_override_is_part_of_the_scenario():
    engine = parse_scenario(scenario(prefill_pacing={"kind": "every_n_steps", "n": 4}, preemption="swap")).engine
    assert engine.model_dump()["preemption"] == "swap"
