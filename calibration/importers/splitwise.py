"""Splitwise's `perf_model.csv` (Microsoft, MIT): whole iterations of one batch, in ms, five times each.

A row is a batch of equal prompts, and a step of their decodes halfway through the answer. Its end-to-end times
are not used: long generations were cut short in them. Nor are batches of prompts that took less time than the
GPUs' peak allows, which cannot have run whole (64 prompts of 512 tokens of Llama-2-70B on two A100: 0.8 s for
what takes 7 s at peak).
"""

from __future__ import annotations

from pathlib import Path

from calibration import csv_table
from calibration.models import load_plain_model, plain_name
from calibration.plausible import check_plausible
from calibration.whole_steps import Origin, Step, artifact_of, fit_linear, prompts, terms
from sim.cost.artifact import Artifact
from sim.errors import ArtifactError
from sim.gpu import Gpu, load_gpu
from sim.model import Model

GPUS = {"a100-80gb": "a100-sxm-80gb", "h100-80gb": "h100-sxm", "h100-80gb-pcap": "h100-sxm"}
"""Their names (the last is power-capped), and ours."""


def import_table(
    path: Path, model: str = "llama-2-70b", hardware: str = "a100-80gb", tensor_parallel: int = 8
) -> Artifact:
    """The artifact of one model on one group of GPUs. Raises ArtifactError when the file has no times of it.

    `hardware` is the file's name of the GPU, `model` ours of the model.
    """
    described = load_plain_model(model)
    gpu = GPUS.get(hardware)
    steps = timed_steps(path, described.name, hardware, tensor_parallel)
    if gpu is not None:
        steps = _possible(steps, described, load_gpu(gpu), tensor_parallel)
    linear, held_out = fit_linear(steps, str(path))
    origin = Origin(
        hardware, gpu, tensor_parallel, "Splitwise, github.com/Mutinifni/splitwise-sim, data/perf_model.csv", "MIT"
    )
    artifact = artifact_of(origin, described, terms(linear, steps, str(path)), linear.base, held_out)
    check_plausible(artifact, described, str(path))
    return artifact


def timed_steps(path: Path, model: str, hardware: str, tensor_parallel: int) -> list[Step]:
    """Two iterations a row: its prompts, and its decodes. Raises ArtifactError when there are none."""
    columns = ["prompt_size", "batch_size", "token_size", "tensor_parallel", "prompt_time", "token_time"]
    names = ["model", "hardware"]
    rows = csv_table.read(path, [*names, *columns], ["batch_size", "prompt_size", "prompt_time", "token_time"], names)
    is_model = rows["model"].map(plain_name) == plain_name(model)
    own = is_model & (rows["hardware"] == hardware) & (rows["tensor_parallel"] == tensor_parallel)
    if not own.any():
        timed = sorted(set(zip(rows["model"], rows["hardware"], rows["tensor_parallel"], strict=True)))
        raise ArtifactError(
            str(path), f"no times of {model} on {tensor_parallel} x {hardware}", valid=f"timed: {timed}"
        )
    steps = []
    for prompt, batch, output, _, prompt_ms, token_ms in rows.loc[own, columns].itertuples(index=False):
        steps.append(prompts(int(prompt), int(batch), float(prompt_ms)))
        steps.append(Step(int(batch), batch * (prompt + output / 2), 0, 0.0, float(token_ms)))
    return steps


def _possible(steps: list[Step], model: Model, gpu: Gpu, tensor_parallel: int) -> list[Step]:
    """Without prompts that took less than their products do at peak, unless those are most, which is another matter."""
    weights = sum(product.num_layers * product.parameters for product in model.products(tensor_parallel)[:-1])
    least_ms = 2e3 * weights / gpu.bf16_flops
    possible = [step for step in steps if step.time_ms > step.prefill_tokens * least_ms]
    num_prompts = sum(step.prefill_tokens > 0 for step in steps)
    return possible if len(steps) - len(possible) < num_prompts / 2 else steps
