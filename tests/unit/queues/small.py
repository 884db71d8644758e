"""Any engine on a pool and with costs that are small enough to work out by hand."""

from sim.clock import Clock, Priority
from sim.core import EngineCore
from sim.cost.linear import Linear, LinearOptions
from sim.engine import Engine
from sim.policies.base import POLICIES, EngineLimits
from sim.record import Recorder
from sim.request import Outcome


def simulate(policy, requests, num_usable, macro_steps=True, **options):
    """A prompt token and a decode take 1 ms, and KV is held token by token."""
    cls = POLICIES.load(policy)
    num_null = cls.build(cls.Options(policy=policy), EngineLimits(20, 1, 100)).usable_blocks - 100
    limits = EngineLimits(20, 1, num_usable - num_null, class_names=("a", "b"))
    clock, recorder = Clock(), Recorder()
    cost = Linear(LinearOptions(base_ms=0, per_prefill_token_us=1000, per_decode_us=1000))
    engine = Engine(
        clock,
        EngineCore(cls.build(cls.Options(policy=policy, **options), limits)),
        cost,
        recorder,
        macro_steps=macro_steps,
    )
    engine.on_expire = lambda request: engine.cancel(request, Outcome.TIMED_OUT)
    for arrival in requests:
        clock.call_at(arrival.arrival_ns, Priority.ARRIVE, lambda arrival=arrival: engine.submit(arrival))
    clock.run()
    return recorder.tables()
