"""What docs/papers.md says of figures that are not met: each "tested" is a test here."""

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import sim
from benchmarks.papers import FOLDER, Figure, Row, Runs, entries, rows, value_of
from calibration.whole_steps import Step, fit_linear, prompts
from sim.gpu import load_gpu
from sim.model import load_model
from sim.replica import cost_model
from sim.step import StepShape

ENTRIES = entries()
Change = dict[str, object]

runs = cache(Runs)
"""Of a scenario and a draw; each of them is made once."""

ROOFLINE: Change = {"cost": {"kind": "roofline"}}
SPLITWISE: Change = {
    "cost": {
        "kind": "linear",
        "base_ms": 42.04,
        "per_decode_us": 79.6,
        "per_context_token_ns": 625,
        "per_prefill_token_us": 189.4,
        "per_prefill_pair_ns": 18.35,
    }
}
"""Whole iterations of Llama-2-70B on four A100-80GB (Microsoft, MIT) by `servesim calibrate import splitwise`."""


def slower(factor: float) -> Change:
    """The roofline's device and host, on which everything takes `factor` times as long."""
    parts = {"gemm_compute": 0.80, "attention_compute": 0.60, "memory": 0.83, "allreduce": 0.55}
    times = {"allreduce_latency_us": 5, "layer_overhead_us": 20, "step_overhead_us": 200, "host_us": 300}
    cost: dict[str, object] = {"kind": "roofline", "host_us_per_request": 15 * factor}
    cost |= {f"{name}_efficiency": part / factor for name, part in parts.items()}
    return {"cost": cost | {name: time * factor for name, time in times.items()}}


def dearer(scenario: str, factor: float, **figures: float) -> Change:
    """The scenario's own linear costs times `factor`, but for those that are given."""
    own = sim.load_scenario(FOLDER / f"{scenario}.yaml").cost.model_dump(exclude_defaults=True)
    return {
        "cost": {name: v if name == "kind" else v * factor for name, v in own.items()} | figures | {"kind": "linear"}
    }


def figures(scenario: str, *names: str) -> list[Figure]:
    """Those whose name begins so, in the order given; without names all."""
    known = ENTRIES[scenario].figures
    return [next(f for f in known if f.name.startswith(name)) for name in names] if names else known


def changed(scenario: str, figure: Figure, change: Change, draw: int = 0) -> Row:
    """A figure of a changed scenario."""
    other = figure.model_copy(update={"change": figure.change | change})
    return Row(figure, value_of(runs(scenario, draw), other), "")


def medians(scenario: str, change: Change, num_draws: int) -> list[float]:
    """All figures of a changed scenario, over draws of its traffic."""
    return [
        float(np.median([changed(scenario, figure, change, draw).value for draw in range(num_draws)]))
        for figure in figures(scenario)
    ]


def draws(scenario: str, figure: Figure, num_draws: int) -> list[float]:
    """A figure over draws of the traffic."""
    return [changed(scenario, figure, {}, draw).value for draw in range(num_draws)]


@pytest.mark.slow
def test_orca_and_its_baseline_are_met_on_a_device_half_as_fast():
    scenario = "orca_gpt3_175b"
    assert all(changed(scenario, figure, slower(2)).is_close for figure in figures(scenario))


def test_the_batch_of_a_server_that_keeps_up_is_the_rate_times_the_latency():
    scenario, (figure,) = "vllm_opt13b_sharegpt", figures("vllm_opt13b_sharegpt", "requests batched, vLLM")
    summary = sim.run(FOLDER / f"{scenario}.yaml").summary()
    running, waiting = (summary["iterations"][f"mean_num_{who}"] for who in ("running", "waiting"))
    by_littles_law = summary["throughput"]["requests_per_s"] * summary["metrics"]["e2e_ms"]["mean"] / 1e3
    assert waiting < 0.1 * running
    assert running + waiting == pytest.approx(by_littles_law, rel=0.05)
    assert 0.6 < changed(scenario, figure, ROOFLINE).ratio < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("cv", [0.8, 1.6])
def test_the_spread_of_prompts_matters_little_to_the_ratios(cv: float):
    scenario = "vllm_opt13b_sharegpt"
    for figure in figures(scenario):
        if figure.over:
            own = changed(scenario, figure, {}).value
            assert changed(scenario, figure, {"traffic.0.prompt_tokens.cv": cv}).value == pytest.approx(own, rel=0.1)


def test_orca_that_knows_its_answers_batches_as_many_as_printed_where_more_arrive_than_it_can_serve():
    scenario = "vllm_opt13b_alpaca"
    oracle, vllm = figures(scenario, "requests batched, Orca (Oracle)", "requests batched, vLLM")
    assert changed(scenario, oracle, {"scale.rate": 3}).is_close
    assert changed(scenario, vllm, {"scale.rate": 3}).ratio > 1.15


@pytest.mark.slow
def test_short_answers_gain_most_over_fastertransformer():
    (alpaca,) = figures("vllm_opt13b_alpaca", "sustained rate")
    overload = {"vllm_opt13b_sharegpt": {"scale.rate": 3}, "vllm_opt66b_sharegpt": {"scale.rate": 1}}
    others = [
        changed(scenario, alpaca, overload.get(scenario, {"scale.rate": 1})).value
        for scenario in ("vllm_opt13b_sharegpt", "vllm_opt66b_sharegpt", "vllm_opt175b_sharegpt")
    ]
    assert changed("vllm_opt13b_alpaca", alpaca, {}).value > max(others)


@pytest.mark.slow
def test_paging_gains_most_where_memory_is_least():
    gains = [
        changed(f"vllm_opt{size}_sharegpt", figure, {}).value
        for size in ("66b", "13b", "175b")
        for figure in figures(f"vllm_opt{size}_sharegpt", "sustained rate, vLLM / Orca (Max)")
    ]
    assert gains == sorted(gains, reverse=True)


def test_a_longer_fixed_time_of_an_iteration_brings_175b_into_the_range():
    scenario = "vllm_opt175b_sharegpt"
    change = dearer(scenario, 1, base_ms=75)
    assert all(changed(scenario, figure, change).is_close for figure in figures(scenario))


# Sarathi-Serve


def artifact_timings(shared: Path) -> Change:
    """Linear costs by the artifact's own timings of whole prompts and of decodes (its figure 2), Yi-34B on two A100."""
    steps = []
    for kind in ("prefill", "decode"):
        table = pd.read_csv(shared / f"data/profiles/sarathi_measured_batches/fig2_{kind}.csv")
        for tokens, time_s in table.loc[
            table["Batch Id"] > 0, [f"batch_num_{kind}_tokens", "batch_execution_time"]
        ].values:
            is_prefill = kind == "prefill"
            steps.append(
                prompts(int(tokens), 1, time_s * 1e3) if is_prefill else Step(int(tokens), 0.0, 0, 0.0, time_s * 1e3)
            )
    linear, _ = fit_linear(steps, "figure 2")
    return {
        "cost": {
            "kind": "linear",
            "base_ms": linear.base,
            "per_decode_us": linear.per_decode * 1e3,
            "per_prefill_token_us": linear.per_prefill_token * 1e3,
            "per_prefill_pair_ns": linear.per_pair * 1e6,
        }
    }


def test_the_printed_gaps_do_not_fit_the_budget(shared: Path):
    table = pd.read_csv(shared / "data/profiles/sarathi_measured_batches/table2_hybrid_batch.csv")
    timed_ms = table.loc[table["batch_num_prefill_tokens"] == 1024, "batch_execution_time"].item()
    cost = cost_model(sim.load_scenario(FOLDER / "sarathi_table4_sharegpt.yaml"))
    ours_ms = cost.price(StepShape(prefills=((1024, 0),))) / 1e6
    (printed,) = figures("sarathi_table4_sharegpt", "P99 TBT, combined, ms")
    assert (round(timed_ms), round(ours_ms, -1), printed.printed) == (217, 180, 140)
    weights = sum(product.num_layers * product.parameters for product in load_model("yi-34b-200k").products(2))
    at_peak_ms = 2 * 1024 * weights / load_gpu("a100-sxm-80gb").bf16_flops * 1e3
    assert at_peak_ms / printed.printed == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("lengths", ["sharegpt", "arxiv"])
def test_all_gaps_of_chunks_are_those_of_half_the_budget(lengths: str):
    entry = ENTRIES[f"sarathi_table4_{lengths}"]
    explaining = [figure for figure in entry.figures if figure.counts == "explains"]
    made = rows(entry.model_copy(update={"figures": explaining}))
    assert [abs(row.ratio - 1) < 0.15 for row in made] == [True, True]


def test_one_run_of_table_4_may_well_give_the_printed_times():
    scenario = "sarathi_table4_sharegpt"
    names = ("P50 TTFT, hybrid batches only, ms", "P99 TBT, hybrid batches only, ms", "P50 TTFT, chunks only, ms")
    for figure in figures(scenario, *names, "P50 TTFT, combined, ms", "P99 TBT, hybrid batches only / combined"):
        made = draws(scenario, figure, 15)
        assert min(made) < figure.printed < max(made), figure.name


def test_the_printed_growth_of_ttft_lies_between_our_load_and_that_of_the_artifacts_timings(shared: Path):
    scenario, (figure,) = (
        "sarathi_table4_sharegpt",
        figures("sarathi_table4_sharegpt", "P50 TTFT, hybrid batches only /"),
    )
    theirs, ours = (
        np.median([changed(scenario, figure, change, draw).value for draw in range(9)])
        for change in (artifact_timings(shared), {})
    )
    assert 0.4 < theirs < 0.6 < figure.printed < 0.85 < ours < 1


def test_prompts_of_arxiv_alone_nearly_fill_the_artifacts_server(shared: Path):
    table = pd.read_csv(shared / "data/profiles/sarathi_measured_batches/fig2_prefill.csv")
    table = table[table["Batch Id"] > 0].sort_values("batch_num_tokens")
    (traffic,) = sim.load_scenario(FOLDER / "sarathi_table4_arxiv.yaml").traffic
    mean, sigma, longest = (getattr(traffic.prompt_tokens, name) for name in ("mean", "sigma", "max"))
    lengths = np.random.default_rng(1).lognormal(np.log(mean) - sigma**2 / 2, sigma, 100_000).clip(max=longest)
    times_s = np.interp(lengths, table["batch_num_tokens"], table["batch_execution_time"])
    busy = traffic.arrivals.rate_per_s * times_s.mean()
    assert busy == pytest.approx(0.89, abs=0.01)


def test_waits_near_a_full_server_scatter():
    scenario = "sarathi_table4_arxiv"
    wait, gap = figures(scenario, "P50 TTFT, combined, ms", "P99 TBT, hybrid batches only / combined")
    made = draws(scenario, wait, 15)
    assert max(made) > 4 * min(made)
    made = draws(scenario, gap, 15)
    assert min(made) < gap.printed < max(made)


@pytest.mark.slow
def test_sarathis_capacity_is_what_its_iterations_get_through():
    scenario, (figure,) = (
        "sarathi_capacity_yi34b",
        figures("sarathi_capacity_yi34b", "Sarathi / vLLM, P99 TBT under 0.2 s"),
    )
    wider = figure.model_copy(update={"under": figure.under | {"p99_itl_ms": 250.0}})
    assert runs(scenario).value("base", wider) == runs(scenario).value("base", figure)


@pytest.mark.slow
def test_the_rooflines_costs_explain_sarathis_capacity_no_better():
    scenario, (figure,) = (
        "sarathi_capacity_yi34b",
        figures("sarathi_capacity_yi34b", "Sarathi / vLLM, P99 TBT under 0.2 s"),
    )
    for change in (ROOFLINE, slower(1.25)):
        assert 2.6 < changed(scenario, figure, change | {"run.num_requests": 1000}).value < 3.3


@pytest.mark.slow
def test_lengths_of_arxiv_would_gain_less():
    scenario, (figure,) = "sarathi_capacity_mistral7b", figures("sarathi_capacity_mistral7b", "Sarathi / vLLM")
    arxiv = sim.load_scenario(FOLDER / "sarathi_table4_arxiv.yaml").traffic[0]
    change = {
        "traffic.0.prompt_tokens": arxiv.prompt_tokens.model_dump(exclude_defaults=True) | {"kind": "lognormal"},
        "traffic.0.output_tokens": arxiv.output_tokens.model_dump(exclude_defaults=True) | {"kind": "lognormal"},
        "engine.max_model_len": 16384,
        "run.num_requests": 500,
    }
    assert changed(scenario, figure, change).value < 0.75 * changed(scenario, figure, {}).value


# The others


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{}, ROOFLINE, SPLITWISE, slower(2), {"cost": {"kind": "roofline", "host_us": 60_000}}],
    ids=["vidur", "roofline", "splitwise", "slower", "host"],
)
def test_no_costs_explain_fastgens_factor(change: Change):
    (figure,) = figures("fastgen_llama2_70b", "FastGen / vLLM at 9 s")
    assert 1 < changed("fastgen_llama2_70b", figure, change).value < 1.3


def test_fastgens_rate_lies_between_those_of_two_published_timings():
    scenario, (figure,) = "fastgen_llama2_70b", figures("fastgen_llama2_70b", "FastGen at 9 s")
    assert changed(scenario, figure, SPLITWISE).value < figure.printed < changed(scenario, figure, {}).value


def test_one_run_of_100_requests_may_well_keep_what_is_printed():
    scenario, (figure,) = "distserve_opt13b", figures("distserve_opt13b", "share that keeps 250 ms and 100 ms at 3 ")
    made = draws(scenario, figure, ENTRIES[scenario].seeds)
    assert min(made) < 0.4 < figure.printed < 0.8 < max(made)


def test_the_real_vllm_with_66b_lies_between_the_rooflines_device_and_a_slower_one():
    scenario = "distserve_opt66b"
    fast, slow = medians(scenario, ROOFLINE, 5), medians(scenario, dearer(scenario, 1.25), 5)
    for figure, most, least in zip(figures(scenario), fast, slow, strict=True):
        assert least < figure.printed < most


def test_vtcs_waits_are_met_with_costs_a_tenth_higher():
    scenario = "vtc_proportional"
    for figure in figures(scenario):
        row = changed(scenario, figure, dearer(scenario, 1.1))
        assert abs(row.ratio - 1) < (0.2 if figure.name == "slow client, VTC / FCFS, mean TTFT" else 0.15), row


def test_what_schedulers_gain_in_anyscales_article_hangs_on_kernels_and_host():
    scenario = "anyscale_opt13b"
    gain, unpaged = figures(scenario, "vLLM / optimized static", "continuous without paging")
    assert changed(scenario, gain, ROOFLINE).is_close
    own = sim.load_scenario(FOLDER / f"{scenario}.yaml").cost.model_dump()["base_ms"]
    rates = [
        runs(scenario).value(
            variant, unpaged.model_copy(update={"change": dearer(scenario, 1, base_ms=own + extra_ms)})
        )
        for variant, extra_ms in (("continuous, no paging", 6), ("static", 0))
    ]
    assert rates[0] / rates[1] == pytest.approx(unpaged.printed, rel=0.05)
