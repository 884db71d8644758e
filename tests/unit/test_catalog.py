"""What `servesim policies` says, which comes from the policies themselves."""

import json

from sim.policies.base import POLICIES
from sim.policies.vllm_v1_config import VERSIONS
from sim.report.catalog import engine_option_rows, policy_rows


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
