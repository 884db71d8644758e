"""Scenarios: what is accepted, and what is said about the rest."""

import copy
import json
import math
from pathlib import Path

import jsonschema
import pytest

from sim.errors import ScenarioError
from sim.policies.base import POLICIES
from sim.scenario import Scenario, load_scenario, parse_scenario

BASE = {
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": {"policy": "vllm-v1", "max_num_seqs": 8, "max_model_len": 8192},
    "traffic": [
        {
            "name": "chat",
            "arrivals": {"kind": "poisson", "rate_per_s": 6},
            "prompt_tokens": 100,
            "output_tokens": {"kind": "uniform", "low": 1, "high": 5},
        }
    ],
    "run": {"num_requests": 10},
}
YAML = """
model: llama-3.1-8b
hardware: {gpu: h100-sxm}
engine: {policy: vllm-v1, max_num_seqs: 8, max_model_len: 8192}
traffic:
  - name: chat
    arrivals: {kind: poisson, rate_per_s: 6}
    prompt_tokens: 100
    output_tokens: {kind: uniform, low: 1, high: 5}
run: {num_requests: 10}
"""


def changed(path: str, value: object) -> dict:
    data = copy.deepcopy(BASE)
    here = data
    *parents, last = path.split(".")
    for key in parents:
        here = here[int(key)] if isinstance(here, list) else here.setdefault(key, {})
    here[last] = value
    return data


def error_of(data: dict, **options) -> str:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(data, place="x.yaml", **options)
    return str(caught.value)


SLO_TERMS = (
    "expected goodput, or STATISTIC_METRIC_ms: mean, max or a percentile (p50, p99, p999) of "
    "ttft, ttft_after_client_queue, tpot, ntpot, e2e, queue, client_queue, itl"
)
ARRIVALS = "known: constant, poisson, gamma, stages, burst, closed_loop"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "engine.policy",
            "vlm-v1",
            f"engine.policy: unknown policy 'vlm-v1'; known: {', '.join(POLICIES)}. Did you mean 'vllm-v1'?",
        ),
        ("engine.max_num_seq", 3, "engine.max_num_seq: unknown key. Did you mean 'max_num_seqs'?"),
        (
            "hardware.gpus",
            1,
            "hardware.gpus: unknown key; known: gpu, tensor_parallel, price_per_gpu_hour. Did you mean 'gpu'?",
        ),
        ("hardware", {}, "hardware.gpu: is missing (name of a GPU; `servesim gpus` lists them)."),
        ("engine.max_num_seqs", 0, "engine.max_num_seqs: expected at least 1, got 0 (requests that may run at once)."),
        (
            "engine.max_num_seqs",
            True,
            "engine.max_num_seqs: expected a whole number, got true (requests that may run at once).",
        ),
        (
            "engine.max_num_seqs",
            "64",
            "engine.max_num_seqs: expected a whole number, got '64' (requests that may run at once).",
        ),
        (
            "engine.max_num_seqs",
            2.5,
            "engine.max_num_seqs: expected a whole number, got 2.5 (requests that may run at once).",
        ),
        (
            "engine.num_gpu_blocks",
            "lots",
            "engine.num_gpu_blocks: expected a whole number or 'auto', got 'lots' "
            "(KV blocks of the pool; auto: derived from the GPU's memory).",
        ),
        (
            "traffic.0.arrivals.rate_per_s",
            math.nan,
            "traffic[0].arrivals.rate_per_s: expected a finite number, got nan (mean requests per second).",
        ),
        (
            "traffic.0.arrivals.rate_per_s",
            0,
            "traffic[0].arrivals.rate_per_s: expected a number above 0, got 0 (mean requests per second).",
        ),
        (
            "traffic.0.arrivals.rate_per_s",
            True,
            "traffic[0].arrivals.rate_per_s: expected a number, got true (mean requests per second).",
        ),
        (
            "traffic.0.arrivals.kind",
            "poison",
            f"traffic[0].arrivals.kind: unknown arrival process 'poison'; {ARRIVALS}. Did you mean 'poisson'?",
        ),
        ("traffic.0.arrivals", 3, f"traffic[0].arrivals: expected a mapping with 'kind', got 3; {ARRIVALS}."),
        ("traffic.0.arrivals", {"rate_per_s": 3}, f"traffic[0].arrivals: 'kind' is missing; {ARRIVALS}."),
        (
            "traffic.0.prompt_tokens",
            0,
            "traffic[0].prompt_tokens: expected at least 1, got 0 (prompt lengths, tokens).",
        ),
        (
            "traffic.0.cancel",
            {"kind": "after", "after_s": 1},
            "traffic[0].cancel.kind: unknown kind 'after'; known: after_time, after_tokens, deadline. "
            "Did you mean 'after_time'?",
        ),
        (
            "traffic.0.cancel",
            {"after_s": 1},
            "traffic[0].cancel: 'kind' is missing; known: after_time, after_tokens, deadline.",
        ),
        (
            "traffic.0.cancel",
            {"kind": "after_time", "after_s": {"mean_s": 1}},
            "traffic[0].cancel.after_s: 'kind' is missing; known: constant, exponential, uniform.",
        ),
        (
            "traffic.0.cancel",
            {"kind": "after_tokens", "tokens": 3, "tokenss": 3},
            "traffic[0].cancel.tokenss: unknown key; known: kind, probability, tokens. Did you mean 'tokens'?",
        ),
        ("traffic", [], "traffic: expected a list of at least 1, got a list of 0 (the request classes)."),
        ("traffic", {}, "traffic: expected a list, got a mapping of 0 (the request classes)."),
        ("slo", {"p99_tft_ms": 4}, f"slo: unknown term 'p99_tft_ms'; {SLO_TERMS}. Did you mean 'p99_ttft_ms'?"),
        ("slo", {"p99_ttft_ms": -4}, "slo.p99_ttft_ms: expected a number above 0, got -4."),
        ("traffic.0.slo", {"fast": 4.0}, f"traffic[0].slo: unknown term 'fast'; {SLO_TERMS}."),
        ("run", {"drain": False}, "run: drain: false needs duration_s."),
        (
            "run",
            {"duration_s": 4, "warmup_s": 5},
            "run: warmup_s 5 leaves nothing of duration_s 4 to measure.",
        ),
        (
            "cost",
            {"kind": "their.package:Cost"},
            "cost.kind: cost model 'their.package:Cost' would run code from outside servesim; "
            "known: roofline, table, linear, constant. Pass --allow-imports if you trust this scenario.",
        ),
        ("compare", {"a": 3}, "compare.a: expected a mapping, got 3."),
        (
            "compare",
            {"a": {"name": "b"}},
            "compare.a.name: no key of a variant; its key under `compare` is its name.",
        ),
        ("compare", {"a": {"compare": {}}}, "compare.a.compare: no key of a variant; variants have no variants."),
        (
            "run.duration_s",
            1e10,
            "run.duration_s: expected at most 1e+09, got 10000000000.0 (arrivals end here, seconds).",
        ),
        ("engine.block_size", 10**6, "engine.block_size: expected at most 65536, got 1000000 (tokens per KV block)."),
        (
            "traffic.0.arrivals",
            {"kind": "gamma", "rate_per_s": 1, "cv": 1e-300},
            "traffic[0].arrivals.cv: expected at least 1e-06, got 1e-300 "
            "(coefficient of variation of the gaps, 1 / sqrt(burstiness): above 1 is burstier).",
        ),
        (
            "compare",
            {"a": {"engine": {"max_num_seqs": -3}}},
            "compare.a: engine.max_num_seqs: expected at least 1, got -3 (requests that may run at once).",
        ),
        (
            "compare",
            {"a": {"traffic": {"chta": {"priority": 1}}}},
            "compare.a.traffic.chta: no such entry; known: chat, 0. Did you mean 'chat'?",
        ),
        ("seed", -1, "seed: expected at least 0, got -1 (seed of every random stream)."),
        (
            "model",
            None,
            "model: expected text, got nothing "
            "(name of a model that `servesim models` lists, or the path of a HF config.json).",
        ),
    ],
)
def test_one_mistake_one_message(path: str, value: object, message: str):
    assert error_of(changed(path, value)) == f"x.yaml: {message}"


def test_every_mistake_has_a_line():
    data = changed("engine.max_num_seqs", 0) | {"seed": "x", "modle": "y"}
    assert error_of(data).splitlines() == [
        "x.yaml: seed: expected a whole number, got 'x' (seed of every random stream).",
        "x.yaml: engine.max_num_seqs: expected at least 1, got 0 (requests that may run at once).",
        "x.yaml: modle: unknown key; known: name, seed, model, hardware, engine, cost, traffic, arrivals, fleet, "
        "scale, run, slo, compare, sweep. Did you mean 'model'?",
    ]


def test_foreign_classes_need_permission_and_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = changed("cost", {"kind": "no_such_package:Cost"})
    assert error_of(data, allow_imports=True) == (
        "x.yaml: cost.kind: cannot import cost model 'no_such_package:Cost' (No module named 'no_such_package'). "
        "Is it installed?"
    )
    (tmp_path / "theirs.py").write_text(
        "from sim.cost.base import CostOptions\nfrom sim.cost.constant import Constant\n"
        "class TheirOptions(CostOptions):\n    speed: float\n"
        "class Theirs(Constant):\n    Options = TheirOptions\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    scenario = parse_scenario(changed("cost", {"kind": "theirs:Theirs", "speed": 5.0}), allow_imports=True)
    assert scenario.model_dump()["cost"] == {"kind": "theirs:Theirs", "host": None, "speed": 5.0}
    data = changed("cost", {"kind": "theirs:Theirs", "sped": 5.0})
    assert error_of(data, allow_imports=True).splitlines() == [
        "x.yaml: cost.speed: is missing.",
        "x.yaml: cost.sped: unknown key.",
    ]


def test_defaults():
    scenario = parse_scenario(BASE)
    assert (scenario.name, scenario.seed, scenario.cost.kind) == ("scenario", 0, "roofline")
    assert scenario.run.model_dump() == {
        "num_requests": 10,
        "duration_s": None,
        "warmup_s": 0.0,
        "drain": True,
        "cut_drain": False,
        "oversized": "error",
    }


def test_a_file_equals_the_same_data(tmp_path: Path):
    path = tmp_path / "chat.yaml"
    path.write_text(YAML)
    loaded = load_scenario(path)
    assert loaded.model_dump() == parse_scenario(BASE | {"name": "chat"}).model_dump()
    assert (loaded.place, loaded.folder) == (str(path), tmp_path)


def test_overrides_and_seed(tmp_path: Path):
    path = tmp_path / "chat.yaml"
    path.write_text(YAML)
    overrides = ["engine.policy=static", "engine.max_batch_size=4", "traffic.chat.arrivals.rate_per_s=1e1", "run=null"]
    scenario = load_scenario(path, overrides, seed=7)
    assert scenario.seed == 7
    assert scenario.engine.model_dump(include={"policy", "max_batch_size", "max_model_len"}) == {
        "policy": "static",
        "max_batch_size": 4,
        "max_model_len": 8192,
    }
    assert scenario.traffic[0].arrivals.rate_per_s == 10.0
    assert scenario.run.num_requests is None


def test_an_override_that_hits_nothing_names_its_place(tmp_path: Path):
    path = tmp_path / "chat.yaml"
    path.write_text(YAML)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path, ["traffic[5].priority=1"])
    assert str(caught.value) == f"{path}: traffic.5: no such entry; known: chat, 0."


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.max_num_seq=null", "engine.max_num_seq: unknown key. Did you mean 'max_num_seqs'?"),
        ("traffic.chat.arrivals.rate=null", "traffic[0].arrivals.rate: unknown key; known: kind, rate_per_s."),
        ("run.warmup=null", "run.warmup: unknown key; known: num_requests, duration_s, warmup_s, drain, cut_drain, "),
        ("engin.policy=null", "engin: unknown key; known: name, seed, model, hardware, engine, cost, "),
        ("slo.p99_ttft_ms=null", "slo.p99_ttft_ms: no such key to take back."),
    ],
)
def test_a_null_for_what_is_no_key_is_refused(tmp_path: Path, override: str, message: str):
    path = tmp_path / "chat.yaml"
    path.write_text(YAML)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path, [override])
    assert str(caught.value).startswith(f"{path}: {message}")
    key, _, _ = override.partition("=")
    *parents, last = key.split(".")
    overlay: object = {last: None}
    for parent in reversed(parents):
        overlay = {parent: overlay}
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(BASE | {"compare": {"typo": overlay}}, place="x.yaml")
    assert str(caught.value).startswith(f"x.yaml: compare.typo: {message}")


def test_a_null_for_a_key_that_is_not_given_changes_nothing(tmp_path: Path):
    path = tmp_path / "chat.yaml"
    path.write_text(YAML)
    same = load_scenario(path, ["engine.block_size=null", "run.warmup_s=null", "compare=null"])
    assert same == load_scenario(path)


def test_quantiles_and_variants_may_be_called_by_numbers(tmp_path: Path):
    path = tmp_path / "chat.yaml"
    quantiles = "{kind: empirical, quantiles: {0: 1, 0.5: 10, 1: 20}}"
    path.write_text(YAML.replace("prompt_tokens: 100", f"prompt_tokens: {quantiles}") + "compare: {32: {seed: 2}}\n")
    scenario = load_scenario(path)
    assert scenario.traffic[0].prompt_tokens.quantiles == {0.0: 1.0, 0.5: 10.0, 1.0: 20.0}
    assert list(scenario.variants()) == ["32"]


def test_variants_are_complete_scenarios_with_the_same_traffic():
    compare = {
        "static": {"engine": {"policy": "static", "max_batch_size": 32}},
        "one": {"engine": {"max_num_seqs": 1}, "cost": {"kind": "constant", "step_ms": 5.0}},
    }
    base = parse_scenario(BASE | {"compare": compare})
    static, one = base.variants().values()
    assert list(base.variants()) == ["static", "one"]
    assert (static.engine.policy, static.engine.max_model_len) == ("static", 8192)
    assert (one.engine.policy, one.engine.max_num_seqs, one.cost.kind) == ("vllm-v1", 1, "constant")
    assert static.traffic == one.traffic == base.traffic
    assert static.compare == {}


def test_the_schema_accepts_what_is_accepted():
    schema = json.loads(json.dumps(Scenario.model_json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(BASE, schema)
    for path, value in [
        ("engine.policy", "static"),  # max_num_seqs is none of its options
        ("traffic.0.arrivals.kind", "constan"),
        ("traffic.0.arrivals.rate_per_s", -1),
        ("seeed", 1),
    ]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(changed(path, value), schema)
