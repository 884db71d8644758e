"""How well a sweep uses the cores: 64 points in one process and in several, on an otherwise quiet machine.

    python benchmarks/sweep_efficiency.py [PROCESSES]

Efficiency is the time of one process over the time of several times their number. The workers' start counts.
"""

import sys
import time

import sim
from sim.planning.sweep import sweep
from sim.planning.workers import Workers

SCENARIO = {
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": {"policy": "vllm-v1", "max_model_len": 16384},
    "traffic": [
        {
            "name": "chat",
            "arrivals": {"kind": "poisson", "rate_per_s": 16.0},
            "lengths": {"table": "azure-conversation"},
        }
    ],
    "run": {"num_requests": 3000},
    "sweep": {
        "engine.max_num_seqs": [32, 64, 128, 256],
        "engine.max_num_batched_tokens": [512, 1024, 2048, 4096],
        "seed": [1, 2, 3, 4],
    },
}


def main() -> None:
    num_jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    scenario, times_s = sim.parse_scenario(SCENARIO), {}
    for jobs in (1, num_jobs):
        start_s = time.perf_counter()
        num_points = len(sweep(scenario, workers=Workers(jobs)).answers)
        times_s[jobs] = time.perf_counter() - start_s
        print(f"{num_points} points, {jobs} processes: {times_s[jobs]:.1f} s")
    print(f"efficiency {times_s[1] / (num_jobs * times_s[num_jobs]):.0%}")


if __name__ == "__main__":
    main()
