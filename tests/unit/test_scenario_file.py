"""Scenario files as plain data: what YAML may say, what overrides and overlays do to it."""

import math
from pathlib import Path

import pytest

from sim.errors import ScenarioError
from sim.scenario_file import lay_over, overlay_from_overrides, parse_yaml, read_yaml


def error_of(call, *arguments) -> str:
    with pytest.raises(ScenarioError) as caught:
        call(*arguments)
    return str(caught.value)


def test_scalars_are_those_of_yaml_1_2():
    text = """
    [1, -2, +3, 1_000, 007, 1.5, .5, 2., 1e3, 1.5e-3, .inf, -.inf, true, False, null, ~, '1', "true",
     on, yes, no, 12:30, 0x10, 2026-01-01, a.b, -, 1.2.3]
    """
    assert parse_yaml(text, "x") == [
        *(1, -2, 3, 1000, 7, 1.5, 0.5, 2.0, 1000.0, 0.0015, math.inf, -math.inf, True, False, None, None, "1", "true"),
        *("on", "yes", "no", "12:30", "0x10", "2026-01-01", "a.b", "-", "1.2.3"),
    ]
    assert math.isnan(parse_yaml(".nan", "x"))
    assert parse_yaml("{a: , b: [ ]}", "x") == {"a": None, "b": []}


def test_anchors_and_merge_keys_work():
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", "x") == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


def test_keys_are_text_as_written():
    text = "{0.5: 1, 32: 2, true: 3, 1e3: 4, <<: {7: 5}, 2020-01-01: 6}"
    assert parse_yaml(text, "x") == {"0.5": 1, "32": 2, "true": 3, "1e3": 4, "7": 5, "2020-01-01": 6}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "x.yaml:4: not valid YAML: key 'c' is given twice, first in line 3."),
        ("a: 1\n[2]: x\n", "x.yaml:2: not valid YAML: a key is not text."),
        ("a: [1\nb: 2\n", "x.yaml:2: not valid YAML: expected ',' or ']', but got ':'."),
        ("a: !!python/name:os.system\n", "x.yaml:1: not valid YAML: could not determine a constructor for the tag"),
        ("a: *nowhere\n", "x.yaml:1: not valid YAML: found undefined alias 'nowhere'."),
        ("a: \x07\n", "x.yaml: not valid YAML: unacceptable character #x0007"),
        ("[" * 5000, "x.yaml: not valid YAML: nested too deeply."),
        ("a: 1\nb: !!int x\n", "x.yaml:2: not valid YAML: not a value of the kind 'int' (invalid literal"),
        ("a: !!bool x\n", "x.yaml:1: not valid YAML: not a value of the kind 'bool'"),
        ("a: !!timestamp x\n", "x.yaml:1: not valid YAML: not a value of the kind 'timestamp'"),
        ("a: !!timestamp 2020-99-01\n", "x.yaml:1: not valid YAML: not a value of the kind 'timestamp'"),
        ("a: " + "9" * 5000, "x.yaml:1: not valid YAML: not a value of the kind 'int' (Exceeds the limit"),
        ('a: "\\ud800"\n', "x.yaml:1: not valid YAML: not a value of the kind 'str'"),
        ("a: 1\nb: &b {c: *b}\n", "x.yaml:2: not valid YAML: found unconstructable recursive node."),
    ],
    ids=[
        "duplicate",
        "list as key",
        "syntax",
        "code",
        "alias",
        "control character",
        "deep",
        *("tag",) * 4,
        "digits",
        "surrogate",
        "cycle",
    ],
)
def test_bad_yaml_names_the_line(text: str, message: str):
    assert error_of(parse_yaml, text, "x.yaml").startswith(message)


def test_a_file_holds_a_mapping(tmp_path: Path):
    valid = "; a scenario is a mapping with at least model, hardware and traffic."
    for text, found in [
        ("", "is empty"),
        ("- a\n", "holds a list"),
        ("hello\n", "holds a plain text"),
        ("3", "holds 3"),
    ]:
        path = tmp_path / "x.yaml"
        path.write_text(text)
        assert error_of(read_yaml, path) == f"{path}: {found}{valid}"


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path):
    (tmp_path / "quickstart.yaml").write_text("a: 1")
    path = tmp_path / "quikstart.yaml"
    assert error_of(read_yaml, path) == f"{path}: no such file. Did you mean 'quickstart.yaml'?"
    assert error_of(read_yaml, tmp_path) == f"{tmp_path}: cannot be read: Is a directory."
    path = tmp_path / "no" / "x.yaml"
    assert error_of(read_yaml, path) == f"{path}: no such file. There is no folder '{path.parent}'."
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert error_of(read_yaml, path) == f"{path}: cannot be read: it is not UTF-8 text."


def test_overrides_become_one_overlay():
    overrides = ["engine.max_num_seqs=64", "engine.policy=static", "traffic[0].arrivals={kind: poisson}", "slo=null"]
    assert overlay_from_overrides(overrides) == {
        "engine": {"max_num_seqs": 64, "policy": "static"},
        "traffic": {"0": {"arrivals": {"kind": "poisson"}}},
        "slo": None,
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed"], "--set seed: is not an override; expected key.key=value."),
        (["=3"], "--set =3: is not an override; expected key.key=value."),
        (["a..b=3"], "--set a..b=3: is not an override; expected key.key=value."),
        (["a=3", "a.b=4"], "--set a.b=4: 'a' was set to a plain value by an override before it."),
        (["a=[1"], "--set a=[1:1: not valid YAML: expected ',' or ']', but got '<stream end>'."),
    ],
)
def test_bad_overrides(overrides: list[str], message: str):
    assert error_of(overlay_from_overrides, overrides) == message


BASE = {
    "engine": {"policy": "vllm-v1", "max_num_seqs": 256, "max_model_len": 8192, "block_size": 16},
    "traffic": [{"name": "chat", "arrivals": {"kind": "poisson", "rate_per_s": 6}}, {"name": "code", "share": 1}],
    "slo": {"p99_ttft_ms": 500},
}


@pytest.mark.parametrize(
    ("overlay", "changed"),
    [
        ({"engine": {"max_num_seqs": 8}}, {"engine": BASE["engine"] | {"max_num_seqs": 8}}),
        (
            {"engine": {"max_num_seqs": None}},
            {"engine": {"policy": "vllm-v1", "max_model_len": 8192, "block_size": 16}},
        ),
        (
            {"engine": {"policy": "static", "max_batch_size": 4}},
            {"engine": {"policy": "static", "max_batch_size": 4, "max_model_len": 8192, "block_size": 16}},
        ),
        (
            {"traffic": {"chat": {"arrivals": {"rate_per_s": 9}}}},
            {"traffic": [{"name": "chat", "arrivals": {"kind": "poisson", "rate_per_s": 9}}, BASE["traffic"][1]]},
        ),
        (
            {"traffic": {"0": {"arrivals": {"kind": "burst"}}, "1": {"share": 0.5}}},
            {"traffic": [{"name": "chat", "arrivals": {"kind": "burst"}}, {"name": "code", "share": 0.5}]},
        ),
        ({"traffic": [{"name": "other"}]}, {"traffic": [{"name": "other"}]}),
        ({"run": {"num_requests": 5}}, {"run": {"num_requests": 5}}),
        ({"kind": "x", "policy": "y"}, {"kind": "x", "policy": "y"}),
    ],
)
def test_overlays(overlay: dict, changed: dict):
    before = repr(BASE)
    assert lay_over(BASE, overlay, "x") == BASE | changed
    assert repr(BASE) == before


def test_a_null_takes_a_key_back():
    assert lay_over(BASE, {"slo": None}, "x") == {key: BASE[key] for key in ("engine", "traffic")}


def test_one_way_to_give_kv_memory_takes_back_the_other():
    base = {"num_gpu_blocks": 100, "policy": "vllm-v1"}
    assert lay_over(base, {"kv_cache_memory_bytes": 5}, "x") == {"policy": "vllm-v1", "kv_cache_memory_bytes": 5}


def test_an_unknown_list_entry_suggests_a_known_one():
    message = "x: traffic.chta: no such entry; known: chat, code, 0, 1. Did you mean 'chat'?"
    assert error_of(lay_over, BASE, {"traffic": {"chta": {"share": 1}}}, "x") == message
    assert (
        error_of(lay_over, BASE, {"traffic": {"2": {}}}, "x") == "x: traffic.2: no such entry; known: chat, code, 0, 1."
    )
