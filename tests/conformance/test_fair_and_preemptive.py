"""Logs of the VTC artifact and of FastServe that cannot be replayed: one clear message each."""

import pytest

from sim.conformance.suite import Result, examine
from tests.conformance import tiny

REQUEST = {"id": "r0", "arrival_step": 0, "prompt_tokens": 10, "output_tokens": 2, "max_tokens": 2, "client": "a"}
VTC = {
    "engine": "vtc",
    "version": "VTC-artifact @192c2e2",
    "mode": "vtc_fair",
    "name": "by_hand",
    "config": {
        "max_total_token_num": 100,
        "batch_max_tokens": 50,
        "running_max_req_size": 4,
        "max_wait_tokens": 10,
        "clients": ["a", "b"],
        "fair_weights": [1],
        "cost_func": "linear",
        "predict_range": 0.0,
        "rate_limit": None,
        "lora_rank": 0,
        "seconds_per_step": 1.0,
    },
    "requests": [REQUEST],
}
FASTSERVE = {
    "engine": "fastserve",
    "version": "FastServe @187a274",
    "mode": "sj-mlfq",
    "name": "by_hand",
    "config": {
        "max_batch_size": 4,
        "max_tokens_per_batch": 50,
        "block_size": 4,
        "num_gpu_blocks": 10,
        "num_cpu_blocks": 10,
        "proactive_offloading": False,
        "num_min_free_blocks_threshold": 0,
        "use_skip_join": True,
        "iter_base_ms": 4.0,
        "iter_prefill_ms": 0.1,
        "iter_decode_ms": 0.1,
        "idle_step_ms": 10.0,
        "starvation_threshold_s": 3.0,
        "starvation_period": 1000,
    },
    "requests": [REQUEST],
}
HEADER = {"format": "engine-steps-v1"}


def complaint(tmp_path, scenario):
    outcome = examine(tiny.write(tmp_path, scenario, [HEADER]))
    assert (outcome.result, outcome.mismatch) == (Result.ERROR, None)
    return str(outcome.error).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("golden", "config", "expected"),
    [
        (VTC, {"max_total_tokens": 5}, "config: unknown key 'max_total_tokens'; known: "),
        (VTC, {"fair_weights": [-1]}, "config.fair_weights[0]: is -1; input should be greater than 0."),
        (VTC, {"predict_range": 0.5}, "config.predict_range: is 0.5; 0: nothing random."),
        (VTC, {"clients": ["b"]}, "requests[0].client: is 'a'; config.clients: b."),
        (VTC, {"cost_func": "quadratic"}, "config.queue_order.vtc_fair.cost_func: is 'quadratic'; "),
        (FASTSERVE, {"max_batch": 4}, "config: unknown key 'max_batch'; known: "),
        (FASTSERVE, {"max_batch_size": 0}, "config.max_batch_size: is 0; input should be greater than or equal to 1."),
    ],
)
def test_config_that_makes_no_sense(tmp_path, golden, config, expected):
    assert f": {expected}" in f": {complaint(tmp_path, golden | {'config': golden['config'] | config})}"


@pytest.mark.parametrize(
    ("golden", "mode", "known"),
    [
        (
            VTC,
            "vtc_far",
            "slora, vtc_fair, lcf_fair, vtc_max_fair, vtc_oracle, vtc_len_predict, mdrr_fair, lshare_fair",
        ),
        (FASTSERVE, "mlqf", "fcfs, srpt, mlfq, sj-mlfq"),
    ],
)
def test_unknown_mode(tmp_path, golden, mode, known):
    assert f"mode: is {mode!r}; known: {known}. Did you mean" in complaint(tmp_path, golden | {"mode": mode})


def test_other_fair_orders_have_linear_costs_only(tmp_path):
    golden = VTC | {"mode": "lcf_fair", "config": VTC["config"] | {"cost_func": "profile"}}
    assert "config.cost_func: is 'profile'; linear in mode lcf_fair." in complaint(tmp_path, golden)
