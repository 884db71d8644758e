"""Runs of S-LoRA's server under VTC's queues (Apache-2.0), client by client, on the costs of its own profile.

A run is one CSV: who asked when, with which lengths, and how long each request took. Its name begins with the order
of its queue. The server's scheduler is simulated as its sources have it, with a pool of 10,000 tokens; nothing is
fitted on the runs.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import sim
from calibration import csv_table
from calibration.importers.vtc import import_profile
from sim.errors import ArtifactError

if TYPE_CHECKING:
    import pandas as pd

ORDERS = {"FCFS": "fcfs", "VTC": "vtc_fair"}
"""How a run's file begins -> the order of its queue."""
_POOL_TOKENS = 10_000
_MAX_MODEL_LEN = 2048
_COLUMNS = ("client", "req_time_s", "prompt_len", "output_len", "first_token_latency_s", "request_latency_s")


@dataclass(frozen=True)
class Client:
    """One client's mean latencies, or those of all together: measured and simulated, s."""

    name: str
    num_requests: int
    first_token_s: tuple[float, float]
    request_s: tuple[float, float]
    total_s: tuple[float, float]
    """From the first request to the last answer."""

    @property
    def errors(self) -> tuple[float, float, float]:
        """Of first tokens, requests and the total, as parts of what was measured."""
        pairs = (self.first_token_s, self.request_s, self.total_s)
        first, whole, total = (simulated / measured - 1 for measured, simulated in pairs)
        return first, whole, total


def check_clients(profile: Path, run: Path) -> list[Client]:
    """Replay one run on the profile: all clients together first, then each. Raises ArtifactError for other files."""
    order = ORDERS.get(run.name.partition("_")[0])
    if order is None:
        raise ArtifactError(
            str(run), "does not say the order of its queue", valid=f"names begin with {' or '.join(ORDERS)}"
        )
    requests = csv_table.read(run, _COLUMNS, _COLUMNS[4:]).sort_values("req_time_s", kind="stable")
    clients = sorted(requests["client"].unique().tolist())
    with tempfile.TemporaryDirectory() as folder:
        import_profile(profile).write(Path(folder) / "artifact.json")
        for client in clients:
            _write_trace(Path(folder) / f"{client}.jsonl", requests[requests["client"] == client])
        results = sim.run(_scenario(order, Path(folder), clients))
    table = results.tables.requests
    of_class = np.array(clients)[table["class_index"]]
    measured = _spans(*(requests[name].to_numpy(dtype=float) for name in ("req_time_s", *_COLUMNS[4:])))
    queued = table["queued_ns"] / 1e9
    simulated = _spans(queued, table["first_token_ns"] / 1e9 - queued, table["finished_ns"] / 1e9 - queued)
    own = [_client(f"client {c}", measured, requests["client"] == c, simulated, of_class == c) for c in clients]
    return [_client("all", measured, requests["client"] >= 0, simulated, of_class >= 0), *own]


def _write_trace(path: Path, requests: pd.DataFrame) -> None:
    lines = [
        json.dumps({"timestamp": at_s * 1e3, "input_length": int(prompt), "output_length": int(output)})
        for at_s, prompt, output in requests[["req_time_s", "prompt_len", "output_len"]].itertuples(index=False)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def _scenario(order: str, folder: Path, clients: list[int]) -> dict[str, Any]:
    return {
        "model": "llama-2-7b",
        "hardware": {"gpu": "a10g"},
        "engine": {
            "policy": "vtc",
            "queue_order": {"kind": order},
            "num_gpu_blocks": _POOL_TOKENS,
            "max_model_len": _MAX_MODEL_LEN,
        },
        "cost": {"kind": "table", "artifact": str(folder / "artifact.json"), "out_of_range": "allow"},
        "traffic": [
            {"name": f"client-{client}", "trace": {"kind": "mooncake", "path": str(folder / f"{client}.jsonl")}}
            for client in clients
        ],
    }


def _spans(queued_s: Any, first_token_s: Any, request_s: Any) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({"queued": queued_s, "first": first_token_s, "whole": request_s})


def _client(name: str, measured: pd.DataFrame, own: Any, simulated: pd.DataFrame, theirs: Any) -> Client:
    run, replay = measured[np.asarray(own)], simulated[np.asarray(theirs)]
    first, whole = ((float(run[key].mean()), float(replay[key].mean())) for key in ("first", "whole"))
    ends = [float((one["queued"] + one["whole"]).max() - one["queued"].min()) for one in (run, replay)]
    return Client(name, len(run), first, whole, (ends[0], ends[1]))
