"""Fits a length table of `sim/data/lengths` to an Azure trace: a few hundred quantiles, no rows.

    python scenarios/samples/fit_lengths.py conv_first30min.csv > sim/data/lengths/azure-conversation.json

The tables in the repository are fitted to the first 1,800 s of AzureLLMInferenceTrace_conv.csv and _code.csv
(github.com/Azure/AzurePublicDataset, commit b469a11, CC-BY-4.0; Patel et al., "Splitwise", ISCA 2024).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from sim.workload.azure import AzureOptions, AzureTrace

PROMPT_SHARES = [0, 0.01, *(i / 40 for i in range(1, 40)), 0.99, 0.995, 0.999, 1]
OUTPUT_SHARES = [0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.99, 0.995, 1]
GAP_SHARES = [0, 0.01, 0.05, *(i / 10 for i in range(1, 10)), 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1]
NUM_BANDS = 10


def fit(path: Path) -> dict[str, object]:
    """The figures of a table, ready for JSON."""
    rows = AzureTrace.build(AzureOptions(kind="azure", path=str(path))).read()
    gaps_s = np.diff(rows.arrival_ns) / 1e9
    by_prompt = np.argsort(rows.prompt_tokens, kind="stable")
    bands = [rows.output_tokens[band] for band in np.array_split(by_prompt, NUM_BANDS)]
    return {
        "source": "Azure LLM inference trace 2023, first 1800 s (github.com/Azure/AzurePublicDataset, commit b469a11); "
        "Patel et al., Splitwise, ISCA 2024",
        "licence": "CC-BY-4.0; these are fitted figures, not rows of the trace",
        "num_requests": len(rows),
        "rate_per_s": round(float(1 / gaps_s.mean()), 4),
        "gap_cv": round(float(gaps_s.std() / gaps_s.mean()), 4),
        "gap_quantiles_s": _pairs(GAP_SHARES, np.quantile(gaps_s, GAP_SHARES).round(4).tolist()),
        "prompt_quantiles": _pairs(PROMPT_SHARES, np.quantile(rows.prompt_tokens, PROMPT_SHARES).round().tolist()),
        "output_shares": OUTPUT_SHARES,
        "output_bands": [np.quantile(band, OUTPUT_SHARES).round().astype(int).tolist() for band in bands],
    }


def to_json(table: dict[str, object]) -> str:
    """One line per key."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _pairs(shares: list[float], values: list[float]) -> list[list[float]]:
    return [[share, int(value) if value == int(value) else value] for share, value in zip(shares, values, strict=True)]


if __name__ == "__main__":
    sys.stdout.write(to_json(fit(Path(sys.argv[1]))))
