"""What an iteration and a request cost, as ratios to a bare SimPy timeout measured in the same run.

    python benchmarks/bench.py                the table
    python benchmarks/bench.py --prices       only what it costs to price an iteration from tables
    python benchmarks/bench.py --million      also one million requests (time, memory, Parquet apart)

CPU time of this process, the best of several repeats; the unit is measured before and after each repeat,
because machines are shared and drift. Traffic is drawn before the clock starts.

Where a request's time goes at 256 seats, by the interpreter's instructions: planner and KV 44 %, the sums over the
batch 9 %, tables 13 %, engine, device and core 14 %, SimPy and the clock 6 %, clients and requests 9 %, prices 5 %.
Nothing stands out, and instructions are not all: CPython 3.11 looks up by name, which costs as much as ten of them,
members of an enum, properties, fields of named tuples, attributes of objects with more than 29 and of two classes that
alternate in one place, and it calls a class with keywords or a named tuple by way of a dictionary or a lambda. Moving
short loops into chains of C iterators saves instructions and costs time: building the iterators is the larger part for
the dozen steps of a usual run.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simpy

from calibration.grids import term
from sim.build import draw
from sim.clients import Clients
from sim.clock import Clock
from sim.core import EngineCore
from sim.cost.artifact import Artifact, Shape
from sim.cost.base import Target
from sim.cost.roofline import Roofline, RooflineOptions
from sim.cost.table import Table
from sim.engine import Engine
from sim.gpu import load_gpu
from sim.metrics.facts import RunFacts
from sim.metrics.load import step_arrays
from sim.metrics.shares import work_shares
from sim.model import load_model
from sim.policies.base import POLICIES, EngineLimits, Policy
from sim.policies.orca import Orca
from sim.policies.static import StaticBatching
from sim.policies.vllm_v1 import VllmV1
from sim.policies.vllm_v1_config import V1Config
from sim.policies.vllm_v1_reference import VllmV1Reference
from sim.record import Recorder, Tables
from sim.request import NEVER
from sim.scenario import parse_scenario
from sim.step import StepShape
from sim.storage import save_run
from sim.workload.base import ClientPool, Traffic

AMPLE = {"num_gpu_blocks": 500_000, "max_num_batched_tokens": 8192, "max_model_len": 131_072}
REPEATS = 5


def unit_s(num_timeouts: int = 100_000) -> float:
    """CPU seconds of one timeout of a bare SimPy process."""
    env = simpy.Environment()

    def process():  # noqa: ANN202  # a SimPy process
        for _ in range(num_timeouts):
            yield env.timeout(1)

    env.process(process())
    start = time.process_time()
    env.run()
    return (time.process_time() - start) / num_timeouts


def roofline(model: str = "llama-3.1-8b", gpu: str = "h100-sxm") -> Roofline:
    """The cost model that a scenario gets when it says nothing."""
    return Roofline.build(RooflineOptions(kind="roofline"), Target(load_model(model), load_gpu(gpu), 1, 2.0))


def traffic(arrival_ns: np.ndarray, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> Traffic:
    """Open-loop requests of one class that stay to their end."""
    zeros = np.zeros(len(arrival_ns), dtype=np.int64)
    never = zeros + NEVER
    return Traffic(
        class_names=("all",),
        pools=(ClientPool(),),
        class_index=zeros,
        arrival_ns=arrival_ns,
        think_ns=zeros,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_tokens=output_tokens,
        priority=zeros,
        cancel_after_ns=never,
        cancel_after_tokens=never,
        leaves_at_deadline=zeros.astype(bool),
    )


def lognormal(rng: np.random.Generator, mean: float, num: int, sigma: float = 1.0) -> np.ndarray:
    """Whole lengths with the given mean."""
    return np.maximum(1, np.rint(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num))).astype(np.int64)


def together(num: int, prompt_tokens: int, output_tokens: int) -> Traffic:
    """Equal requests that all arrive at once."""
    zeros = np.zeros(num, dtype=np.int64)
    return traffic(zeros, zeros + prompt_tokens, zeros + output_tokens)


def poisson(num: int, rate_per_s: float, prompt: float = 128, output: float = 256, seed: int = 0) -> Traffic:
    """Poisson arrivals with lognormal lengths."""
    rng = np.random.default_rng(seed)
    arrival_ns = np.cumsum(rng.exponential(1e9 / rate_per_s, num)).astype(np.int64)
    return traffic(arrival_ns, lognormal(rng, prompt, num), lognormal(rng, output, num))


def timed(policy: Policy, requests: Traffic, cost: Roofline, *, macro_steps: bool) -> tuple[float, Tables]:
    """CPU seconds of the event loop, and the tables."""
    clock, recorder = Clock(), Recorder()
    engine = Engine(clock, EngineCore(policy), cost, recorder, macro_steps=macro_steps)
    Clients(clock, engine, recorder, requests).start()
    start = time.process_time()
    clock.run()
    return time.process_time() - start, recorder.tables()


class Measured:
    """One row: the best of several runs."""

    def __init__(
        self, make: Callable[[], Policy], requests: Traffic, *, macro_steps: bool = True, repeats: int = REPEATS
    ) -> None:
        cost = roofline()
        self.units = self.seconds = float("inf")
        for _ in range(repeats):
            before = unit_s()
            seconds, self.tables = timed(make(), requests, cost, macro_steps=macro_steps)
            self.units = min(self.units, seconds / ((before + unit_s()) / 2))
            self.seconds = min(self.seconds, seconds)
        self.num_iterations = len(self.tables.iterations["lane"])
        self.num_requests = len(requests)

    def column(self, name: str) -> np.ndarray:
        """A column of the iterations."""
        return self.tables.iterations[name]


def v1(**options: object) -> Callable[[], Policy]:
    """A maker of fast V1 planners with an ample pool unless told otherwise."""
    config = V1Config(**{"enable_prefix_caching": False, **AMPLE, **options})  # type: ignore[arg-type]  # plain options
    return lambda: VllmV1(config)


def unchanged(num_running: int, *, is_async: bool, macro_steps: bool) -> tuple[float, float]:
    """Seconds and units of a step in which nothing changes: what 2,000 more of them add to the same run."""
    make = v1(max_num_seqs=num_running, async_scheduling=is_async)
    short, long = (
        Measured(make, together(num_running, 100, num_outputs), macro_steps=macro_steps) for num_outputs in (400, 2400)
    )
    num = long.num_iterations - short.num_iterations
    return (long.seconds - short.seconds) / num, (long.units - short.units) / num


def bench_iterations() -> float:
    """Steps in which nothing changes, one by one and advanced at once. Returns the units of one at 256 running."""
    print("\nunchanged iterations (2,000 more outputs for requests that run together)")
    print(f"{'running':>8} {'mode':>6} {'µs':>8} {'× timeout':>10} {'macro-steps: µs':>16} {'× timeout':>10}")
    at_256 = 0.0
    for num_running in (32, 256, 1024):
        for is_async in (False, True):
            one_by_one = unchanged(num_running, is_async=is_async, macro_steps=False)
            at_once = unchanged(num_running, is_async=is_async, macro_steps=True)
            at_256 = one_by_one[1] if (num_running, is_async) == (256, False) else at_256
            print(
                f"{num_running:>8} {'async' if is_async else 'sync':>6} {one_by_one[0] * 1e6:>8.2f} "
                f"{one_by_one[1]:>10.2f} {at_once[0] * 1e6:>16.2f} {at_once[1]:>10.2f}"
            )
    return at_256


def bench_requests(units_per_iteration: float) -> None:
    """What a request adds to the price of unchanged iterations: to arrive, be admitted, finish and be recorded."""
    print("\nrequests (Poisson, lognormal lengths of mean 128 in, 256 out; macro-steps off)")
    print(f"{'seats':>8} {'running':>8} {'iterations/request':>19} {'units/request':>14} {'beyond iterations':>18}")
    for num_seqs, rate in ((32, 14.0), (256, 51.8), (1024, 90.0)):
        row = Measured(v1(max_num_seqs=num_seqs, async_scheduling=False), poisson(6000, rate), macro_steps=False)
        per_request = row.units / row.num_requests
        iterations = row.num_iterations / row.num_requests
        running = row.column("num_running").mean()
        beyond = per_request - units_per_iteration * iterations
        print(f"{num_seqs:>8} {running:>8.0f} {iterations:>19.2f} {per_request:>14.1f} {beyond:>18.1f}")


def bench_pressure() -> None:
    """KV so short that steps preempt, against the same requests with ample KV."""
    requests = poisson(4000, 50.0)
    ample = Measured(v1(max_num_seqs=256), requests)
    tight = Measured(v1(max_num_seqs=256, num_gpu_blocks=1900), requests)
    preempting = (tight.column("num_preempted") > 0).mean()
    ratio = (tight.units / tight.num_requests) / (ample.units / ample.num_requests)
    print(
        f"\nKV pressure: {preempting:.0%} of the steps preempt, {tight.column('num_preempted').sum()} preemptions; "
        f"a request costs {ratio:.2f} times what it costs with ample KV"
    )


def preset(name: str, limits: EngineLimits, seats: str = "max_num_seqs", **options: object) -> Callable[[int], Policy]:
    """A maker of an engine with so many seats; `seats` is its own word for them."""
    cls = POLICIES.load(name)
    return lambda n: cls.build(cls.Options(policy=name, **{seats: n}, **options), limits)


def bench_policies() -> None:
    """Each policy at 32 and 256 running: units per iteration, arrivals and ends of the requests included.

    At 256, about half of it is theirs. FastServe's `fcfs` and `srpt` walk all members in every pass, and so does the
    reference of `vllm-v1`; `vllm-v0` with prefix caching takes and names block by block. The others cost what changes.
    """
    print("\npolicies (equal requests, all together, macro-steps off): × timeout per iteration at 32 and 256 running")
    limits = EngineLimits(max_model_len=4096, block_size=16, num_gpu_blocks=500_000)
    for name, make in {
        "vllm-v1": lambda n: VllmV1(V1Config(max_num_seqs=n, **AMPLE)),
        "vllm-v1 (reference)": lambda n: VllmV1Reference(V1Config(max_num_seqs=n, **AMPLE)),
        "orca": lambda n: Orca.build(Orca.Options(policy="orca", max_batch_size=n), limits),
        **{name: preset(name, limits) for name in ("vllm-v0", *(p for p in POLICIES if p.startswith("sarathi")))},
        "vllm-v0 (chunked)": preset("vllm-v0", limits, enable_chunked_prefill=True),
        "vllm-v0 (prefix caching)": preset("vllm-v0", limits, enable_prefix_caching=True),
        "vtc": preset("vtc", EngineLimits(4096, 1, 8_000_000), "running_max_req_size"),
        **{
            f"fastserve ({scheduler})": preset(
                "fastserve", limits, "max_batch_size", max_tokens_per_batch=1_000_000, scheduler=scheduler
            )
            for scheduler in ("sj-mlfq", "mlfq", "fcfs", "srpt")
        },
        "static": lambda n: StaticBatching.build(StaticBatching.Options(policy="static", max_batch_size=n), limits),
    }.items():
        rows = [
            Measured(lambda n=n, make=make: make(n), together(n, 100, 400), macro_steps=False, repeats=3)
            for n in (32, 256)
        ]
        print(f"{name:>26} " + " ".join(f"{row.units / row.num_iterations:>8.1f}" for row in rows))


SCENARIOS = {
    "Vidur's demo (Llama-2-7B on an A100, 10,000 requests)": {
        "model": "llama-2-7b",
        "hardware": {"gpu": "a100-sxm-80gb"},
        "engine": {"policy": "vllm-v1", "max_num_seqs": 128, "enable_prefix_caching": False},
        "traffic": [
            {
                "name": "demo",
                "arrivals": {"kind": "poisson", "rate_per_s": 6.0},
                "prompt_tokens": {"kind": "uniform", "low": 500, "high": 1000},
                "output_tokens": {"kind": "uniform", "low": 100, "high": 300},
            }
        ],
        "run": {"num_requests": 10_000},
    },
    "Mooncake conversation (2,728 requests, prefix caching)": {
        "model": "llama-3.1-8b",
        "hardware": {"gpu": "h200-sxm"},
        "engine": {"policy": "vllm-v1", "max_num_batched_tokens": 8192},
        "traffic": [
            {
                "name": "mooncake",
                "trace": {
                    "kind": "mooncake",
                    "path": "${SERVESIM_SHARED}/data/traces/mooncake_fast25/conversation_first15min.jsonl",
                    "fallback": "scenarios/samples/mooncake_sample.jsonl",
                },
            }
        ],
    },
}


def bench_scenarios() -> None:
    """Engine time of whole scenarios."""
    print("\nscenarios (engine time alone)")
    for title, mapping in SCENARIOS.items():
        scenario = parse_scenario({"name": "bench", "seed": 1, **mapping})
        requests = draw(scenario)
        config = V1Config(
            num_gpu_blocks=30_000 if "Vidur" in title else 60_000,
            max_num_seqs=scenario.engine.max_num_seqs,  # type: ignore[attr-defined]  # a vllm-v1 engine
            max_num_batched_tokens=scenario.engine.max_num_batched_tokens,  # type: ignore[attr-defined]
            enable_prefix_caching=scenario.engine.enable_prefix_caching,  # type: ignore[attr-defined]
            max_model_len=131_072,
            async_scheduling=True,
        )
        cost = roofline(scenario.model, scenario.hardware.gpu)
        runs = [timed(VllmV1(config), requests, cost, macro_steps=True) for _ in range(3)]
        seconds, tables = min(runs, key=lambda run: run[0])
        hits = tables.requests["cached_prompt_tokens"].sum() / tables.requests["prompt_tokens"].sum()
        print(
            f"{title:>55}: {seconds:.2f} s, {len(tables.iterations['lane']):,} iterations, {hits:.0%} prompt tokens hit"
        )


def table_artifact() -> Artifact:
    """A made-up artifact of the size of a profile's, with every kind of term that prices look at."""
    rows, batches = np.geomspace(1, 8192, 40), np.array([1.0, 2, 4, 8, 16, 32, 64, 128, 256])
    contexts, chunks = np.geomspace(16, 16384, 11), np.geomspace(16, 8192, 10)

    def grid(*axes: np.ndarray) -> list[np.ndarray]:
        return np.meshgrid(*axes, indexing="ij")

    n, c = grid(chunks, np.concatenate([[0.0], contexts]))
    batch, context = grid(batches, contexts)
    b, t, cached, mean = grid(batches, chunks[::3], np.concatenate([[0.0], contexts[::4]]), contexts[::2])
    _, spread = grid(np.array([0.1, 0.9]), np.array([0.0, 8192.0]))
    terms = [
        *(term("tokens", f"product {i}", [rows], 20 + 0.2 * rows, 32) for i in range(7)),
        *(term("sequences", f"head {i}", [batches], 300 + batches, 1) for i in range(2)),
        term("decode_attention", "decode", [batches, contexts], 5 + 1e-3 * batch * context, 32),
        term("prefill_attention", "prompt", [chunks, np.concatenate([[0.0], contexts])], 5 + 1e-5 * n * (c + n), 32),
        term(
            "mixed_attention",
            "mixed",
            [batches, chunks[::3], np.concatenate([[0.0], contexts[::4]]), contexts[::2]],
            9 + 1e-3 * b * mean + 1e-5 * t * (cached + t),
            32,
        ),
        *(
            term(
                kind,
                kind,
                [batches[[0, -1]], np.array([0.1, 0.9]), np.array([0.0, 8192.0])],
                np.stack([1e-3 * spread] * 2),
                32,
            )
            for kind in ("decode_skew", "mixed_skew")
        ),
    ]
    return Artifact(
        hardware="made up",
        gpu=None,
        model="llama-3.1-8b",
        shape=Shape.of(load_model("llama-3.1-8b")),
        dtype="bfloat16",
        kv_dtype_bytes=2.0,
        tensor_parallel=1,
        measured_on="never",
        versions={},
        source="benchmarks/bench.py",
        licence="none",
        cuda_graph_sizes=[1, 2, 4, *range(8, 513, 8)],
        terms=terms,
        missing=[],
        holdout_error={},
    )


def bench_prices() -> None:
    """What it costs to price an iteration from tables of every kind of term, batch sizes being known already."""
    cost = Table(table_artifact())
    rng = np.random.default_rng(0)
    batches, contexts = rng.integers(1, 257, 2000), rng.integers(20, 8000, 2000)
    decodes = [
        StepShape(n, n * c, n * c * c + n * 1000, c + 300, (), n)
        for n, c in zip(batches.tolist(), contexts.tolist(), strict=True)
    ]
    chunks = [((int(tokens), 0), (64, 512)) for tokens in rng.integers(1, 4000, 2000)]
    shapes = {
        "decodes alone": decodes,
        "with one prompt": [shape._replace(prefills=own[:1]) for shape, own in zip(decodes, chunks, strict=True)],
        "with two prompts": [shape._replace(prefills=own) for shape, own in zip(decodes, chunks, strict=True)],
    }
    print("\nprice of an iteration from tables with all kinds of terms (unequal contexts)")
    for title, own in shapes.items():
        print(f"{title:>20}: {_us_each(lambda own=own: [cost.price(shape) for shape in own], len(own))}")
    for num_steps in (8, 64, 1024):
        run = _us_each(lambda num=num_steps: [cost.price_decode_run(shape, num) for shape in decodes[:200]], 200)
        print(f"{f'{num_steps} decodes at once':>20}: {run} in all")


def _us_each(call: Callable[[], object], num: int) -> str:
    """The best of several repeats, µs and units; each after a call that looks everything up."""
    best_s = units = float("inf")
    for _ in range(REPEATS):
        unit = unit_s(20_000)
        call()
        start = time.process_time()
        call()
        seconds = (time.process_time() - start) / num
        best_s, units = min(best_s, seconds), min(units, seconds / unit)
    return f"{best_s * 1e6:.2f} µs, {units:.2f} × timeout"


def million() -> None:
    """One million requests at 0.98 of capacity with 256 seats, in a process of its own."""
    requests = poisson(1_000_000, 51.8)  # 0.98 of the 52.8 requests/s that this engine finishes when it is flooded
    start_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    clock, recorder = Clock(), Recorder()
    policy = v1(max_num_seqs=256, async_scheduling=False)()
    engine = Engine(clock, EngineCore(policy), roofline(), recorder)
    Clients(clock, engine, recorder, requests).start()
    start, wall = time.process_time(), time.perf_counter()
    clock.run()
    tables = recorder.tables()
    cpu_s, wall_s = time.process_time() - start, time.perf_counter() - wall
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    facts = RunFacts(class_names=("all",), num_blocks=0, usable_blocks=policy.usable_blocks, block_size=16)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        cost = roofline()
        save_run(Path(folder), tables, facts, cost.breakdown(step_arrays(tables)), work_shares(tables, cost))
        parquet_s = time.perf_counter() - start
    running = tables.iterations["num_running"]
    print(
        json.dumps(
            {
                "cpu_s": round(cpu_s, 1),
                "wall_s": round(wall_s, 1),
                "parquet_s": round(parquet_s, 1),
                "peak_mib": round(rss),
                "before_mib": round(start_rss),
                "iterations": len(running),
                "mean_running": round(float(running.mean()), 1),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", action="store_true", help="also run one million requests")
    parser.add_argument("--prices", action="store_true", help="only what prices cost")
    parser.add_argument("--only-million", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_million:
        million()
        return
    if arguments.prices:
        bench_prices()
        return
    print(f"bare SimPy timeout: {min(unit_s() for _ in range(5)) * 1e6:.2f} µs of CPU")
    bench_requests(bench_iterations())
    bench_pressure()
    bench_policies()
    bench_prices()
    bench_scenarios()
    if arguments.million:
        print("\none million requests (256 seats):", flush=True)
        subprocess.run([sys.executable, __file__, "--only-million"], check=True)


if __name__ == "__main__":
    main()
