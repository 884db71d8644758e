"""Makes the sample traces beside this file; the same bytes every time.

    python scenarios/samples/make_samples.py

The samples are synthetic, for those who do not have the public traces. No row of a public trace is among them.

- `azure_conversation_sample.csv`, `azure_code_sample.csv`: the Azure format. Lengths and gaps between arrivals
  are drawn from the quantiles in `sim/data/lengths`, which are fitted to the public trace and name its source and
  licence. Gaps are independent of one another, so the rate does not drift as the real one does.
- `mooncake_sample.jsonl`: the Mooncake format. Conversations whose prompts all begin with one of three system
  prompts and quote their earlier turns, so that most prompts share a prefix. The figures are round ones, chosen to
  resemble what Qin et al., "Mooncake" (FAST 2025) describe: prompts of some 10,000 tokens, answers of some 350.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

import numpy as np

from sim.rng import stream
from sim.workload.joint import BandedQuantiles, length_table
from sim.workload.lengths import Lognormal, LognormalOptions

SEED = 20231116
NUM_AZURE_REQUESTS = 2000
NUM_CONVERSATIONS = 130
BLOCK_TOKENS = 512


def azure_sample(table_name: str) -> str:
    """A trace in the Azure format, line ends included, from the figures of a bundled table."""
    table = length_table(table_name)
    shares, gaps_s = np.array(table["gap_quantiles_s"]).T
    drawn_s = np.interp(stream(SEED, f"{table_name}/gaps").random(NUM_AZURE_REQUESTS), shares, gaps_s)
    arrivals_s = np.cumsum(drawn_s / drawn_s.mean() / table["rate_per_s"])
    prompts, outputs = BandedQuantiles(table).draw(NUM_AZURE_REQUESTS, stream(SEED, f"{table_name}/lengths"))
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for arrival_s, prompt, output in zip(arrivals_s, prompts, outputs, strict=True):
        ticks = round(arrival_s * 1e7)
        second = datetime(2026, 1, 1) + timedelta(seconds=ticks // 10**7)
        lines.append(f"{second:%Y-%m-%d %H:%M:%S}.{ticks % 10**7:07d},{prompt},{output}")
    return "\r\n".join(lines) + "\r\n"


def mooncake_sample() -> str:
    """A trace in Mooncake's format: conversations that share system prompts and quote their past."""
    rng = stream(SEED, "mooncake")
    new_hash_id = count()
    system_prompts = [[next(new_hash_id) for _ in range(blocks)] for blocks in (1, 2, 4)]
    rows = []
    for _ in range(NUM_CONVERSATIONS):
        time_ms = int(rng.uniform(0, 600_000))
        past = list(system_prompts[rng.integers(len(system_prompts))])
        tokens = len(past) * BLOCK_TOKENS
        for _ in range(rng.geometric(0.43)):
            tokens += _lognormal(rng, mean=5000, cv=1.5, high=60_000)
            output = _lognormal(rng, mean=350, cv=0.8, high=2000)
            hash_ids = past + [next(new_hash_id) for _ in range(-(-tokens // BLOCK_TOKENS) - len(past))]
            rows.append((time_ms, tokens, output, hash_ids))
            past = hash_ids[: tokens // BLOCK_TOKENS]
            tokens += output
            time_ms += int(rng.exponential(60_000)) + output * 20
    rows.sort(key=lambda row: row[0])
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows)


def samples() -> dict[str, bytes]:
    """Contents of every sample file, by name."""
    return {
        "azure_conversation_sample.csv": azure_sample("azure-conversation").encode(),
        "azure_code_sample.csv": azure_sample("azure-code").encode(),
        "mooncake_sample.jsonl": mooncake_sample().encode(),
    }


def _lognormal(rng: np.random.Generator, *, mean: float, cv: float, high: int) -> int:
    return int(Lognormal(LognormalOptions(kind="lognormal", mean=mean, cv=cv, max=high)).draw(1, rng)[0])


if __name__ == "__main__":
    for name, content in samples().items():
        (Path(__file__).parent / name).write_bytes(content)
