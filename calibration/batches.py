"""Single iterations of Sarathi-Serve's experiments (Microsoft, Apache-2.0), priced from other iterations of theirs.

Yi-34B on two A100s. The profile is their figure 2: prompts by length, and decodes by batch size. Priced are the
iterations of their table 2, prompts and decodes together, and of figure 9, prompts in chunks: every chunk on the
context of those before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibration import csv_table
from calibration.grids import Floats, rising, term
from calibration.whole_steps import Origin, artifact_of
from sim.cost.artifact import Artifact
from sim.cost.table import Table
from sim.errors import ArtifactError
from sim.model import load_model
from sim.step import StepShape

_MODEL = "yi-34b"
_S_TO_MS = 1e3
_CONTEXTS = np.array([1.0, 2.0])
"""Those of the decodes are not stated: their times are taken whatever the context."""


@dataclass(frozen=True)
class Batch:
    """A prompt in chunks, or one iteration: measured and priced, ms."""

    name: str
    measured_ms: float
    priced_ms: float

    @property
    def error(self) -> float:
        """As a part of what was measured."""
        return self.priced_ms / self.measured_ms - 1


def check_batches(folder: Path) -> list[Batch]:
    """Price table 2 and figure 9 from figure 2. Raises ArtifactError for files that are missing or no times."""
    table = Table(_artifact(folder))
    return [*_hybrid(folder, table), *_chunked(folder, table)]


def _hybrid(folder: Path, table: Table) -> list[Batch]:
    columns = ["batch_num_prefill_tokens", "batch_num_decode_tokens", "batch_execution_time"]
    rows = csv_table.read(folder / "table2_hybrid_batch.csv", columns, columns[2:])
    found = []
    for prompt, decodes, time_ms in rows[columns].itertuples(index=False):
        shape = StepShape(int(decodes), int(decodes), int(decodes), 1, ((int(prompt), 0),) if prompt else (), 1)
        name = f"{int(prompt)} tokens of a prompt and {int(decodes)} decodes"
        found.append(Batch(name, float(time_ms), table.price(shape) / 1e6))
    return found


def _chunked(folder: Path, table: Table) -> list[Batch]:
    columns = ["prefill_length", "chunk_size", "prefill_execution_time"]
    rows = csv_table.read(folder / "fig9_chunking_overhead.csv", columns, columns)
    found = []
    for length, chunk, time_ms in rows[columns].itertuples(index=False):
        starts = range(0, int(length), int(chunk))
        shapes = [StepShape(prefills=((min(int(chunk), int(length) - start), start),)) for start in starts]
        name = f"a prompt of {int(length)} in chunks of {int(chunk)}"
        found.append(Batch(name, float(time_ms), sum(table.price(shape) for shape in shapes) / 1e6))
    return found


def _artifact(folder: Path) -> Artifact:
    """What a row costs, what a pair does, and what decodes cost beyond their rows.

    A time per (query, key) pair is what bends the times of the two longest prompts; the rest of a prompt's time is
    that of its rows.
    """
    prompt, prompt_us = _figure(folder, "prefill")
    decodes, decode_us = _figure(folder, "decode")
    if len(prompt) < 3 or len(decodes) < 2:
        raise ArtifactError(str(folder), f"figure 2 has {len(prompt)} prompts and {len(decodes)} batches of decodes")
    pairs = prompt * (prompt + 1) / 2
    (a, b), (a_us, b_us), (a_pairs, b_pairs) = prompt[-2:], prompt_us[-2:], pairs[-2:]
    pair_us = max(0.0, float((b_us / b - a_us / a) / (b_pairs / b - a_pairs / a)))
    rows = np.concatenate([decodes[:1], prompt])
    row_us = rising(np.concatenate([decode_us[:1], prompt_us - pairs * pair_us]))
    beyond_us = np.maximum(decode_us - np.interp(decodes, rows, row_us), 0.0)
    context = np.array([0.0, prompt[-1]])
    origin = Origin(
        "A100-80GB-PCIe",
        None,
        2,
        "Sarathi-Serve, github.com/microsoft/sarathi-serve, osdi-experiments, figure 2",
        "Apache-2.0",
    )
    pairs_us = pair_us * (pairs[:, None] + prompt[:, None] * context)
    terms = [
        term("tokens", "rows", [rows], row_us, 1, "all that depends on rows, whatever they are"),
        term("decode_attention", "decodes", [decodes, _CONTEXTS], np.stack([beyond_us] * 2, axis=1), 1),
        term("prefill_attention", "pairs", [prompt, context], pairs_us, 1),
    ]
    return artifact_of(origin, load_model(_MODEL), terms)


def _figure(folder: Path, operation: str) -> tuple[Floats, Floats]:
    """Tokens of a batch, rising, and its time, µs; without the first batch of all, which warmed up."""
    columns = ["Batch Id", f"batch_num_{operation}_tokens", "batch_execution_time"]
    rows = csv_table.read(folder / f"fig2_{operation}.csv", columns, columns[2:])
    rows = rows[rows["Batch Id"] > 0].sort_values(columns[1])
    return rows[columns[1]].to_numpy(dtype=float), rows[columns[2]].to_numpy(dtype=float) * _S_TO_MS * 1e3
