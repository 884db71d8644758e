"""Figures that papers print: the right system is ahead, and what explains each difference holds."""

import re
from functools import cache
from itertools import combinations

import pytest

import sim
from benchmarks.papers import FOLDER, ROOT, Figure, Row, Runs, entries, rows, value_of
from sim.build import cost_model
from sim.step import StepShape

ENTRIES = entries()
FAST = ("orca_equal_lengths", "vllm_opt13b_sharegpt", "vtc_overload", "vtc_proportional", "anyscale_opt13b")
"""What runs in seconds; each experiment as a whole runs with the slow tests."""


runs = cache(Runs)
"""Of a scenario; each of them is made once."""


def slower(factor: float) -> dict[str, object]:
    """A device and a host on which everything takes `factor` times as long."""
    parts = {"gemm_compute": 0.80, "attention_compute": 0.60, "memory": 0.83, "allreduce": 0.55}
    times = {"allreduce_latency_us": 5, "layer_overhead_us": 20, "step_overhead_us": 200, "host_us": 300}
    return (
        {"cost.kind": "roofline", "cost.host_us_per_request": 15 * factor}
        | {f"cost.{name}_efficiency": part / factor for name, part in parts.items()}
        | {f"cost.{name}": time * factor for name, time in times.items()}
    )


def figures(scenario: str, *names: str) -> list[Figure]:
    """Those whose name begins so, in the order given; without names all."""
    known = ENTRIES[scenario].figures
    return [next(f for f in known if f.name.startswith(name)) for name in names] if names else known


def under(scenario: str, figure: Figure, change: dict[str, object]) -> Row:
    """A figure of a changed scenario."""
    changed = figure.model_copy(update={"change": figure.change | change})
    return Row(figure, value_of(runs(scenario), changed))


def check_order(made: list[Row]) -> None:
    """Whatever two printed figures are of the same kind, their order is ours too; a ratio has its sign."""
    for row in made:
        assert row.has_sign, row
    kind = {row.figure.name: (row.figure.key, row.figure.over, row.figure.under) for row in made}
    for one, other in combinations(made, 2):
        printed = one.figure.printed, other.figure.printed
        if (
            kind[one.figure.name] != kind[other.figure.name]
            or one.figure.over
            or abs(printed[0] / printed[1] - 1) < 0.1
        ):
            continue
        assert (one.value < other.value) == (printed[0] < printed[1]), (one, other)


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "printed"])
def test_scenario_says_what_it_reproduces(name: str):
    header = re.match(r"(#.*\n)+", (FOLDER / f"{name}.yaml").read_text())
    assert header is not None
    for word in ("Paper:", "Figure:", "Set-up:", "Run time:"):
        assert word in header[0]
    scenario = sim.load_scenario(FOLDER / f"{name}.yaml")
    assert scenario.name == name
    variants = {"base", *scenario.variants()}
    assert {v for figure in ENTRIES[name].figures for v in (*figure.of, *figure.over)} <= variants


@pytest.mark.parametrize("name", FAST)
def test_the_same_systems_are_ahead(name: str):
    check_order(rows(ENTRIES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_the_document_is_what_comes_out(name: str):
    made = rows(ENTRIES[name])
    check_order(made)
    text = (ROOT / "docs" / "papers.md").read_text()
    for row in made:
        assert row.line in text


def test_document_has_every_experiment():
    text = (ROOT / "docs" / "papers.md").read_text()
    for entry in ENTRIES.values():
        assert f"## {entry.title}\n" in text
        assert " ".join(entry.differs.split()) in text
        assert all(f"| {figure.name} |" in text for figure in entry.figures)


# What the document says of differences


@pytest.mark.slow
def test_orca_and_its_baseline_are_met_on_a_device_half_as_fast():
    scenario = "orca_gpt3_175b"
    assert all(under(scenario, figure, slower(2)).is_close for figure in figures(scenario))


def test_the_batch_of_a_server_that_keeps_up_is_the_rate_times_the_latency():
    scenario, (figure,) = "vllm_opt13b_sharegpt", figures("vllm_opt13b_sharegpt", "requests batched, vLLM")
    summary = sim.run(FOLDER / f"{scenario}.yaml").summary()
    assert summary["iterations"]["mean_num_waiting"] < 0.1
    by_littles_law = summary["throughput"]["requests_per_s"] * summary["metrics"]["e2e_ms"]["mean"] / 1e3
    assert summary["iterations"]["mean_num_running"] == pytest.approx(by_littles_law, rel=0.05)
    assert under(scenario, figure, slower(1.25)).value < figure.printed < under(scenario, figure, slower(1.5)).value


@pytest.mark.slow
def test_paging_gains_most_where_memory_is_least():
    gains = [
        rows(ENTRIES[f"vllm_opt{size}_sharegpt"].model_copy(update={"figures": [figure]}))[0].value
        for size in ("66b", "13b", "175b")
        for figure in figures(f"vllm_opt{size}_sharegpt", "sustained rate, vLLM / Orca (Max)")
    ]
    assert gains == sorted(gains, reverse=True)


def test_chunks_cost_less_here_than_in_sarathis_own_timings():
    cost = cost_model(sim.load_scenario(FOLDER / "sarathi_table4_sharegpt.yaml"))
    whole = cost.price(StepShape(prefills=((4096, 0),), num_sampled=1))
    in_chunks = sum(cost.price(StepShape(prefills=((1024, done),))) for done in range(0, 4096, 1024))
    assert 1 < in_chunks / whole < 1.17
    assert 0.14e9 < cost.price(StepShape(prefills=((1024, 0),))) < 0.19e9


def test_the_limits_of_capacity_are_multiples_of_a_decode_iteration():
    cost = cost_model(sim.load_scenario(FOLDER / "sarathi_capacity_yi34b.yaml"))
    iteration_ms = cost.price(StepShape(32, 32 * 4096, 32 * 4096**2, 4096, num_sampled=32)) / 1e6
    limits = {f.under["p99_itl_ms"] for f in figures("sarathi_capacity_yi34b") if "decode iterations" in f.name}
    assert limits == {round(5 * iteration_ms), round(25 * iteration_ms)}


@pytest.mark.slow
@pytest.mark.parametrize("change", [slower(2), {"cost.kind": "roofline", "cost.host_us": 60_000}])
def test_no_speed_of_device_or_host_explains_fastgens_factor(change: dict[str, object]):
    (figure,) = figures("fastgen_llama2_70b", "FastGen / vLLM at 9 s")
    assert 1.1 < under("fastgen_llama2_70b", figure, change).value < 1.3


@pytest.mark.slow
def test_the_real_vllm_with_66b_lies_between_the_rooflines_device_and_one_half_as_fast():
    for figure in figures("distserve_opt66b"):
        fast, slow = (under("distserve_opt66b", figure, slower(factor)).value for factor in (1, 2))
        assert slow < figure.printed < fast


def test_vtcs_waits_are_met_with_costs_a_tenth_higher():
    linear = sim.load_scenario(FOLDER / "vtc_proportional.yaml").cost.model_dump(exclude_defaults=True)
    dearer = {f"cost.{name}": v if name == "kind" else v * 1.1 for name, v in linear.items()}
    dearer["cost.kind"] = "linear"
    assert all(under("vtc_proportional", figure, dearer).is_close for figure in figures("vtc_proportional"))
