"""One command from a bare machine to a checked artifact: profile, fit, serve a scenario for real, report.

`python -m calibration.device_artifact` (`make calibrate-gpu`) needs torch and what the simulator computes with, not
the command line's libraries, and nothing that is downloaded. Cut off, it goes on where it was.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from calibration.profile import Progress

NEEDED = ("torch", "numpy", "pandas", "pyarrow", "scipy", "simpy", "pydantic", "yaml")
ROOT = Path(__file__).resolve().parents[1]
PROFILE_SHARE = 0.6
"""Part of the minutes for the profile; the rest is for serving."""
REPORT_EVERY_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 2 with one message on stderr."""
    options = _parse(arguments)
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        print(f"error: not installed: {', '.join(absent)}", file=sys.stderr)
        return 2
    from sim.errors import UserError

    try:
        make_artifact(options, _say)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def make_artifact(options: argparse.Namespace, say: Callable[[str], None]) -> Path:
    """Profile, fit, verify; returns the artifact's path. Its report lies beside it. Raises UserError."""
    import torch

    from calibration import raw
    from calibration.fit import fit
    from calibration.profile import open_device
    from calibration.verify import verify

    torch.set_num_threads(options.threads)
    device = open_device(options.device)
    start_s = time.monotonic()
    model_name = options.name or re.sub(r"[^a-z0-9]+", "_", Path(options.model).stem.lower())
    options.work.mkdir(parents=True, exist_ok=True)
    points = options.work / f"{model_name}_{device.type}.parquet"
    _profile(options, device, points, say)
    artifact = fit(raw.read(points))
    hardware = re.sub(r"[^a-z0-9]+", "-", (artifact.gpu or artifact.hardware).lower()).strip("-")
    options.out.mkdir(parents=True, exist_ok=True)
    path: Path = options.out / f"{hardware}_{model_name}.json"
    artifact.write(path)
    say(f"wrote {path}; points left out were missed by {_errors(artifact.holdout_error)}")
    report = verify(
        options.scenario, device, options.work / "verify", artifact=path, repeats=options.repeats, overrides=options.set
    )
    took_min = (time.monotonic() - start_s) / 60
    lines = [*report.lines(), f"hold-out errors: {_errors(artifact.holdout_error)}", f"sha256 {artifact.sha256}"]
    path.with_suffix(".report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    say("\n".join(lines))
    say(f"wrote {path.with_suffix('.report.txt')}, after {took_min:.1f} min")
    return path


def _profile(options: argparse.Namespace, device: torch.device, points: Path, say: Callable[[str], None]) -> None:
    """Time the kernels, and free the memory that they took."""
    import torch

    from calibration.fit import worst_regions
    from calibration.points import NO_LIMIT, Limits
    from calibration.profile import Job, profile
    from sim.model import load_model, read_config

    model = load_model(options.model, place="--model")
    longest = min(options.max_model_len, model.max_position_embeddings)
    job = Job(
        model=model,
        config=read_config(options.model)[1],
        device=device,
        limits=Limits(options.max_num_batched_tokens, options.max_num_seqs, longest, NO_LIMIT),
        budget_s=60 * options.minutes * PROFILE_SHARE,
    )
    found = profile(job, points, worst_regions, _Pace(say))
    say(
        f"{found.num_timed} points timed in {found.seconds:.0f} s ({found.num_known} were known), with "
        f"{found.num_layers} of {found.total_layers} layers: {points}"
    )
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _Pace:
    """Says how far a profile is, now and then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_s = float("-inf")

    def __call__(self, now: Progress) -> None:
        if time.monotonic() - self._said_s > REPORT_EVERY_S:
            self._said_s = time.monotonic()
            self._say(f"{now}, {now.left_s:.0f} s left")


def _errors(holdout_error: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * error:.1f} %" for name, error in sorted(holdout_error.items()))


def _say(line: str) -> None:
    print(line, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m calibration.device_artifact", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it (default: 8)")
    parser.add_argument("--model", default="llama-3.1-8b", help="bundled name or config.json")
    parser.add_argument("--name", help="what the artifact's file calls the model (default: the same)")
    parser.add_argument("--scenario", type=Path, default=ROOT / "scenarios/verify_llama31_8b.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "calibration/artifacts", help="folder of the artifact")
    parser.add_argument("--work", type=Path, default=ROOT / "out/calibrate", help="folder of timed points")
    parser.add_argument("--repeats", type=int, default=2, help="how often to serve the scenario")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1, help="of a CPU that computes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY.KEY=VALUE", help="change the scenario")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
