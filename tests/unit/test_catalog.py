"""What `servesim policies` says, which comes from the policies themselves."""

import json

from sim.doors.base import DOORS
from sim.policies.base import POLICIES
from sim.policies.grid.pacing import PACINGS
from sim.policies.vllm_v1_config import VERSIONS
from sim.queues.base import QUEUE_ORDERS
from sim.report.catalog import engine_option_rows, kind_rows, policy_rows
from sim.routing.base import ROUTING


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


def test_every_kind_of_queue_order_door_pacing_and_router_has_its_options():
    kinds = kind_rows()
    families = {
        "queue_order": QUEUE_ORDERS,
        "prefill_pacing": PACINGS,
        "admission_control": DOORS,
        "fleet.router": ROUTING,
    }
    assert {option: [row["kind"] for row in rows if row["kind"]] for option, rows in kinds.items()} == {
        option: list(family) for option, family in families.items()
    }
    assert all(row["meaning"] for rows in kinds.values() for row in rows)
    orders = kinds["queue_order"]
    first = next(i for i, row in enumerate(orders) if row["kind"] == "edf")
    assert orders[first : first + 4] == [
        {"kind": "edf", "option": "", "default": "", "meaning": "the earliest deadline first"},
        {
            "kind": "",
            "option": "ttft_ms",
            "default": 1000.0,
            "meaning": "time to first token that a request is due, milliseconds",
        },
        {"kind": "", "option": "by_class", "default": None, "meaning": "the same for single request classes"},
        {
            "kind": "",
            "option": "drop_late",
            "default": False,
            "meaning": "turn away who has not been admitted when its first token is due",
        },
    ]
    assert all(row["meaning"] for rows in kinds.values() for row in rows)
    json.dumps(kinds)


def test_defaults_are_plain_data():
    rows = {row["policy"]: {option["option"]: option["default"] for option in row["options"]} for row in policy_rows()}
    assert rows["vtc"]["queue_order"] == "vtc_fair"
    assert rows["static"]["preferred_batch_size"] is None
    json.dumps(list(rows.values()))
