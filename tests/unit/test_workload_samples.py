import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from sim.workload.azure import AzureOptions, AzureTrace
from sim.workload.base import TraceRows
from sim.workload.joint import BandedQuantiles, length_table
from sim.workload.mooncake import MooncakeOptions, MooncakeTrace

SAMPLES = Path(__file__).resolve().parents[2] / "scenarios" / "samples"
PARTS = {"azure-conversation": "conv_first30min.csv", "azure-code": "code_first30min.csv"}


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, SAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def azure(path: Path) -> TraceRows:
    return AzureTrace.build(AzureOptions(kind="azure", path=str(path))).read()


def test_the_samples_are_what_their_script_makes():
    made = script("make_samples").samples()
    assert {name: (SAMPLES / name).read_bytes() == content for name, content in made.items()} == dict.fromkeys(
        made, True
    )
    assert sorted(made) == sorted(path.name for path in SAMPLES.iterdir() if "_sample." in path.name)


@pytest.mark.parametrize("name", PARTS)
def test_the_tables_are_what_their_script_fits(name, shared):
    path = shared / "data/traces/azure_llm_2023" / PARTS[name]
    fitted = script("fit_lengths").fit(path)
    assert json.loads(json.dumps(fitted)) == length_table(name)


@pytest.mark.parametrize("name", PARTS)
def test_the_tables_resemble_their_trace(name, shared):
    real = azure(shared / "data/traces/azure_llm_2023" / PARTS[name])
    prompts, outputs = BandedQuantiles(length_table(name)).draw(50_000, np.random.default_rng(1))
    for drawn, recorded in ((prompts, real.prompt_tokens), (outputs, real.output_tokens)):
        assert drawn.mean() == pytest.approx(recorded.mean(), rel=0.05)
        assert np.quantile(drawn, [0.5, 0.9, 0.99]) == pytest.approx(np.quantile(recorded, [0.5, 0.9, 0.99]), rel=0.1)


def test_the_conversation_table_keeps_how_outputs_depend_on_prompts(shared):
    """Prompts around 1,100 tokens get answers four times as long as short and very long ones."""
    real = azure(shared / "data/traces/azure_llm_2023" / PARTS["azure-conversation"])
    drawn = BandedQuantiles(length_table("azure-conversation")).draw(50_000, np.random.default_rng(1))
    means = [
        [outputs[(prompts > low) & (prompts <= high)].mean() for low, high in ((374, 398), (1033, 1204), (2744, 14050))]
        for prompts, outputs in (drawn, (real.prompt_tokens, real.output_tokens))
    ]
    assert means[0] == pytest.approx(means[1], rel=0.1)
    assert means[1][1] > 3 * max(means[1][0], means[1][2])


def test_the_azure_samples_have_the_rate_and_lengths_of_their_table():
    for name in PARTS:
        rows = azure(SAMPLES / f"{name.replace('-', '_')}_sample.csv")
        assert len(rows) == 2000
        assert 1999 / (rows.arrival_ns[-1] / 1e9) == pytest.approx(length_table(name)["rate_per_s"], rel=0.01)


def test_the_mooncake_sample_shares_prefixes():
    options = MooncakeOptions(kind="mooncake", path=str(SAMPLES / "mooncake_sample.jsonl"))
    rows = MooncakeTrace.build(options).read()
    seen, shared, total = set(), 0, 0
    for row in range(len(rows)):
        blocks = [run.stream for run in rows.tokens(row).prefix]
        shared += len(seen.intersection(blocks))
        total += len(blocks)
        seen.update(blocks)
    assert len(rows) == 303
    assert 0.3 < shared / total < 0.7
