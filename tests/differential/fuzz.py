"""Many thousands of random lives on all cores: `make fuzz SEEDS=20000`, or `SEEDS=5000:5100` for some of them."""

import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from random import Random

from tests.differential.lives import random_life
from tests.differential.lockstep import INTERESTING, compare_twins

CHUNK = 100


def main(wanted: str) -> int:
    """Compare the twins on the lives of some seeds; 0 if they agree and everything interesting happened."""
    first, _, last = wanted.rpartition(":")
    seeds = range(int(first or 0), int(last))
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    seen: Counter[str] = Counter()
    start_s = time.perf_counter()
    with ProcessPoolExecutor() as pool:
        for lived in pool.map(live, chunks):
            seen.update(lived)
    print(f"{len(seeds)} lives in {time.perf_counter() - start_s:.0f} s: {dict(sorted(seen.items()))}")
    missing = sorted(what for what in INTERESTING if not seen[what])
    if missing:
        print(f"never seen: {', '.join(missing)}")
    return int(bool(missing or seen["different"]))


def live(seeds: range) -> Counter[str]:
    """Compare the twins on some lives; says in which they differ."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        difference = compare_twins(random_life(Random(seed)), seen)
        if difference is not None:
            seen["different"] += 1
            print(f"seed {seed}\n  plain {difference[0]}\n  fast  {difference[1]}", flush=True)
    return seen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
