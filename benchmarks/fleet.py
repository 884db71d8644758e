"""What a request costs in a fleet, as a ratio to what it costs on one engine under the same load.

    python benchmarks/fleet.py                      every routing policy, 16 replicas, 32,000 requests
    python benchmarks/fleet.py --requests 1000000 --router least_requests

CPU time of this process without drawing the traffic; the engine alone is measured before and after each fleet,
because machines are shared and drift.
"""

from __future__ import annotations

import argparse
import time

from bench import poisson, roofline, timed, v1

from sim.clients import Clients
from sim.clock import Clock
from sim.core import EngineCore
from sim.engine import Engine
from sim.record import Recorder
from sim.rng import stream
from sim.router import Member, Router
from sim.routing.base import ROUTING

NUM_REPLICAS = 16
RATE_PER_S = 45.0
"""Of each replica: 0.85 of what it finishes when it is flooded."""


def fleet_s(kind: str, num_requests: int) -> tuple[float, int]:
    """CPU seconds of a fleet's event loop, and its iterations."""
    clock, requests, cost = Clock(), poisson(num_requests, RATE_PER_S * NUM_REPLICAS), roofline()
    make, members = v1(max_num_seqs=256, async_scheduling=False), []
    for _ in range(NUM_REPLICAS):
        recorder = Recorder()
        engine = Engine(clock, EngineCore(make()), cost, recorder, shares_clock=True)
        members.append(Member(engine, recorder))
    routing = ROUTING.load(kind)
    policy = routing.build(routing.Options(kind=kind), NUM_REPLICAS, stream(0, "router"))
    router = Router(clock, members, policy, requests.sessions().item)
    Clients(clock, router, router, requests).start()
    start = time.process_time()
    clock.run()
    seconds = time.process_time() - start
    return seconds, sum(len(tables.iterations["lane"]) for tables in router.tables()[0])


def alone_s(num_requests: int) -> float:
    """CPU seconds of a request on one engine."""
    requests = poisson(num_requests, RATE_PER_S)
    seconds, _ = timed(v1(max_num_seqs=256, async_scheduling=False)(), requests, roofline(), macro_steps=True)
    return seconds / num_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32_000)
    routers = [kind for kind in ROUTING if ROUTING.load(kind).sends]
    parser.add_argument("--router", choices=routers, nargs="*", default=routers)
    arguments = parser.parse_args()
    per_replica = max(arguments.requests // NUM_REPLICAS, 1)
    print(f"{'router':>16} {'CPU s':>8} {'µs/request':>11} {'× one engine':>13} {'iterations/request':>19}")
    before = alone_s(per_replica)
    for kind in arguments.router:
        seconds, num_iterations = fleet_s(kind, arguments.requests)
        after = alone_s(per_replica)
        each = seconds / arguments.requests
        print(
            f"{kind:>16} {seconds:>8.2f} {each * 1e6:>11.1f} {each / ((before + after) / 2):>13.2f} "
            f"{num_iterations / arguments.requests:>19.2f}",
            flush=True,
        )
        before = after


if __name__ == "__main__":
    main()
