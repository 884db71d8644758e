"""Little's law, L = lambda W, as the identity that it is for a run that begins and ends empty.

The requests in the engine, integrated over time by somebody who watches its door, are the sum of the times
that the tables say they spent inside. No distribution and no interval is involved, so it holds to the
nanosecond for any policy, with preemptions, batching windows, limits of clients and clients that leave.
"""

import numpy as np
import pytest

import sim
from sim.build import draw
from sim.clients import Clients
from sim.clock import Clock
from sim.core import EngineCore
from sim.cost.linear import Linear, LinearOptions
from sim.engine import Engine
from sim.policies.base import POLICIES, EngineLimits
from sim.record import Recorder
from sim.request import NEVER, Outcome

ENGINES = {
    "vllm-v1, short of KV": ("vllm-v1", {"max_num_seqs": 16, "max_num_batched_tokens": 256}),
    "orca": ("orca", {"max_batch_size": 4}),
    "static, with a window": ("static", {"max_batch_size": 4, "max_queue_delay_ms": 20}),
    "static, streaming": ("static", {"max_batch_size": 4, "compute": "early_exit", "release": "streaming"}),
}
CLIENTS = {
    "patient": {},
    "with few connections": {"max_connections": 6},
    "that leave": {"cancel": {"kind": "after_time", "probability": 0.3, "after_s": 0.05}},
}
COST = LinearOptions(base_ms=1, per_prefill_token_us=10, per_decode_us=100, host_us=5)


class Door:
    """Counts who is in an engine and integrates that over time."""

    def __init__(self, clock, engine):
        self._clock, self._engine = clock, engine
        self._num_inside = self._since_ns = 0
        self.most_inside = self.request_ns = 0
        self._submit, self._on_release = engine.submit, engine.on_release
        engine.submit, engine.on_release = self._enter, self._leave

    def _enter(self, request):
        self._count(1)
        self._submit(request)

    def _leave(self, request):
        self._count(-1)
        self._on_release(request)

    def _count(self, change):
        if self._clock.now_ns > self._since_ns:  # within a nanosecond one may enter before another has left
            self.request_ns += self._num_inside * (self._clock.now_ns - self._since_ns)
            self.most_inside = max(self.most_inside, self._num_inside)
            self._since_ns = self._clock.now_ns
        self._num_inside += change


def traffic_of(clients):
    scenario = sim.parse_scenario(
        {
            "model": "llama-3.1-8b",
            "hardware": {"gpu": "h100-sxm"},
            "engine": {"policy": "vllm-v1"},
            "traffic": [
                {
                    "name": "all",
                    "arrivals": {"kind": "gamma", "rate_per_s": 150, "cv": 2},
                    "prompt_tokens": {"kind": "uniform", "low": 20, "high": 300},
                    "output_tokens": {"kind": "uniform", "low": 1, "high": 60},
                    **clients,
                }
            ],
            "run": {"num_requests": 400},
        }
    )
    return draw(scenario)


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_requests_inside_over_time_are_times_spent_inside(engine, clients):
    policy_name, options = ENGINES[engine]
    cls = POLICIES.load(policy_name)
    limits = EngineLimits(max_model_len=512, block_size=16, num_gpu_blocks=100)
    clock, recorder = Clock(), Recorder()
    policy = cls.build(cls.Options(policy=policy_name, **options), limits)
    driver = Engine(clock, EngineCore(policy), Linear(COST), recorder)
    people = Clients(clock, driver, recorder, traffic_of(CLIENTS[clients]))
    door = Door(clock, driver)
    people.start()
    clock.run()
    people.stop()

    requests = recorder.tables().requests
    came_in = requests["queued_ns"] != NEVER
    assert (requests["released_ns"][came_in] != NEVER).all()
    assert door.request_ns == int((requests["released_ns"] - requests["queued_ns"])[came_in].sum())
    # What the law is about really happened.
    assert door.most_inside > 4
    assert (np.count_nonzero(requests["queued_ns"] > requests["arrival_ns"]) > 20) == (
        clients == "with few connections"
    )
    assert (np.count_nonzero(requests["outcome"] == Outcome.CANCELLED) > 20) == (clients == "that leave")
    if policy_name == "vllm-v1" and clients == "patient":
        assert requests["num_preemptions"].sum() > 20
