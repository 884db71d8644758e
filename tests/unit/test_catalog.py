"""What `servesim policies` says, which comes from the policies themselves."""

import json
from io import StringIO

from rich.console import Console

from sim.doors.base import DOORS
from sim.policies.base import POLICIES
from sim.policies.vllm_v1_config import VERSIONS
from sim.queues.base import QUEUE_ORDERS
from sim.report.catalog import engine_option_rows, kinds, policy_rows
from sim.report.console import grid_report


def test_every_policy_says_what_it_does_whom_it_copies_and_what_proves_it():
    rows = {row["policy"]: row for row in policy_rows()}
    assert list(rows) == list(POLICIES)
    for row in rows.values():
        assert list(row) == ["policy", "batching", "copies", "proof", "note", "axes", "options"]
        assert all(row[key] for key in ("batching", "copies", "proof", "note"))
        assert all(option["meaning"] for option in row["options"])
    vllm = rows["vllm-v1"]
    oldest, newest = (".".join(map(str, version)) for version in (min(VERSIONS), max(VERSIONS)))
    assert vllm["copies"] == f"vLLM's V1 scheduler, {oldest} to {newest} (vllm_version)"
    assert vllm["note"].startswith(
        "the fast planner covers FCFS, sync and async, with and without prefix caching; priority and pipeline stages "
        "run on the plain reference planner; speculative decoding is not offered in scenarios. "
    )


def test_options_have_defaults_and_each_stands_once():
    (vllm,) = (row for row in policy_rows() if row["policy"] == "vllm-v1")
    assert {"option": "max_num_seqs", "default": None, "meaning": "requests that may run at once"} in vllm["options"]
    common = [row["option"] for row in engine_option_rows()]
    assert common[:2] == ["max_model_len", "block_size"]
    assert not {row["option"] for row in vllm["options"]} & {*common, "policy"}


def test_defaults_are_plain_data():
    rows = {row["policy"]: {option["option"]: option["default"] for option in row["options"]} for row in policy_rows()}
    assert rows["vtc"]["queue_order"] == "vtc_fair"
    assert rows["static"]["preferred_batch_size"] is None
    json.dumps(list(rows.values()))


def test_every_kind_is_named_with_its_options():
    found = kinds()
    assert list(found) == ["queue_order", "admission_control", "prefill_pacing", "fleet.router"]
    for key, family in (("queue_order", QUEUE_ORDERS), ("admission_control", DOORS)):
        assert [kind.partition(" (")[0] for kind in found[key].split("; ")] == list(family)
    assert found["queue_order"].startswith("fcfs; priority; priority_aging (age_s); sjf (prediction); ")


def test_the_second_line_of_a_value_is_indented_like_the_first():
    console = Console(width=80, file=StringIO())
    for renderable in grid_report(policy_rows()):
        console.print(renderable)
    lines = console.file.getvalue().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  the step's chunk, the whole prompt "))
    assert lines[first + 1].rstrip() == "  reserved"
