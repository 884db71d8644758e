"""VTC's `cost_profile.json` (Apache-2.0): Llama-7B on an A10G with S-LoRA's kernels, in seconds per request.

By prompt and output length: a batch that fills a pool of 10,000 tokens, and the parts of its prefill and of all
its decodes that fall to each request.
"""

from __future__ import annotations

import json
from pathlib import Path

from calibration.csv_table import LARGEST, SMALLEST
from calibration.models import load_plain_model
from calibration.plausible import check_plausible
from calibration.whole_steps import Origin, Step, artifact_of, fit_linear, prompts, terms
from sim.cost.artifact import Artifact
from sim.errors import ArtifactError


def import_profile(path: Path, model: str = "llama-2-7b") -> Artifact:
    """The artifact of their only model, which has the shape of Llama-2-7B. Raises ArtifactError for other files."""
    described = load_plain_model(model)
    steps = timed_steps(path)
    linear, held_out = fit_linear(steps, str(path))
    source = "VTC, github.com/Ying1123/VTC-artifact, fair_bench/cost_profile.json"
    origin = Origin("A10G", "a10g", 1, source, "Apache-2.0")
    artifact = artifact_of(origin, described, terms(linear, steps, str(path)), linear.base, held_out)
    check_plausible(artifact, described, str(path))
    return artifact


def timed_steps(path: Path) -> list[Step]:
    """The prefill of each batch, and its mean decode step. Raises ArtifactError for what is no such profile."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            (int(prompt), int(output), int(batch), float(prefill_s), float(decode_s))
            for prompt, outputs in profile.items()
            for output, (batch, prefill_s, decode_s) in outputs.items()
        ]
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ArtifactError(
            str(path),
            f"is no cost profile ({error})",
            valid="expected {prompt: {output: [batch, prefill seconds, decode seconds]}}",
        ) from error
    steps = []
    for prompt, output, batch, prefill_s, decode_s in rows:
        sizes, times = (prompt, output, batch), (prefill_s, decode_s)
        if not (all(1 <= size < LARGEST for size in sizes) and all(SMALLEST < time < LARGEST for time in times)):
            raise ArtifactError(
                f"{path}: {prompt}.{output}",
                f"is {[batch, prefill_s, decode_s]}",
                valid="expected lengths, a batch and times above zero",
            )
        steps.append(prompts(prompt, batch, batch * prefill_s * 1e3))
        if output > 1:  # the first token is the prefill's
            steps.append(Step(batch, batch * (prompt + output / 2), 0, 0.0, batch * decode_s * 1e3 / (output - 1)))
    return steps
