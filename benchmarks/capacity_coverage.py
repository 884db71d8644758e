"""How often the 95 % intervals of `servesim capacity` hold the boundary, for queues whose boundary is known.

    PYTHONPATH=. python benchmarks/capacity_coverage.py [SEARCHES]

The queues and the truth are those of `tests/statistical/test_capacity.py`; every search has another seed, and all
are spread over the cores. 60 searches leave 3 % (one standard error) on each coverage.
"""

import sys

import numpy as np
from joblib import Parallel, delayed

from sim.planning.capacity import find_capacity
from sim.planning.workers import Workers
from tests.statistical.test_capacity import CASES, queue

FIRST_SEED = 100


def search(case: str, seed: int) -> tuple[bool, float, float, int]:
    """Whether the interval holds the truth; the error of its middle, its half-width, and the replications made."""
    prompt_tokens, slo, rate = CASES[case]
    found = find_capacity(queue(prompt_tokens, slo, seed=seed), workers=Workers(num_jobs=1), num_requests=3000)
    boundary = found.boundary
    return boundary.has(rate), boundary.value / rate - 1, boundary.relative_half_width, found.num_replications


def main(num_searches: int) -> None:
    """A line a queue."""
    for case in CASES:
        seeds = range(FIRST_SEED, FIRST_SEED + num_searches)
        rows = np.array(Parallel(n_jobs=-1)(delayed(search)(case, seed) for seed in seeds), dtype=float)
        held, error, half_width, replications = rows.mean(axis=0)
        print(
            f"{case}: {held:.1%} of {num_searches} intervals hold the truth; error {error:+.2%} on average (standard "
            f"deviation {rows[:, 1].std():.2%}), half-width {half_width:.2%}, {replications:.1f} replications",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
