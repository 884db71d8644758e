"""DistServe's fitted coefficients (Apache-2.0): OPT-13B on A100-SXM-80GB, for its own engine and for vLLM, in ms.

By tensor parallelism: an iteration of prompts takes `a + b·Σn + c·Σn²`, one of decodes `a + b·Σcontext +
c·batch`, with other coefficients from some batch size on. There are no points behind them in the file: the
range that they were fitted on is not stated, nor their error. They are put on a grid that holds every
iteration of the model up to `LARGEST_BATCH`; what they say of larger batches is reported as beyond it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from calibration.grids import rising, term
from calibration.json_file import read_json
from calibration.models import load_plain_model
from calibration.plausible import check_plausible
from calibration.whole_steps import Origin, artifact_of, prompt_terms
from sim.cost.artifact import Artifact, Term
from sim.errors import ArtifactError
from sim.options import Count, NonNegative, Options

LARGEST_BATCH = 512
_LARGEST_PROMPTS = 16384
"""Tokens of prompts in one iteration."""
_Three = Annotated[tuple[NonNegative, NonNegative, NonNegative], Field(description="a, b, c")]


class _Coefficients(Options):
    decoding_large_small_bs_threshold: Count
    prefill: _Three
    decoding_smallbs: _Three
    decoding_largebs: _Three


_FILE = TypeAdapter(dict[str, dict[str, _Coefficients]])


def import_coefficients(
    path: Path, engine: str = "distserve", tensor_parallel: int = 1, model: str = "opt-13b"
) -> Artifact:
    """The artifact of one engine (`distserve` or `vllm`). Raises ArtifactError for what is no such file."""
    described = load_plain_model(model)
    own = _read(path, engine, tensor_parallel)
    fixed, per_token, per_square = own.prefill
    step = min(fixed, own.decoding_smallbs[0], own.decoding_largebs[0])
    # Σn² = 2·pairs − Σn: pairs are what chunks of one iteration add up to
    chunks = prompt_terms(fixed - step, per_token - per_square, 2 * per_square, (1, _LARGEST_PROMPTS))
    source = "DistServe, github.com/LLMServe/DistServe, simdistserve/estimators/profile_data"
    origin = Origin("A100-SXM-80GB", "a100-sxm-80gb", tensor_parallel, source, "Apache-2.0")
    terms = [_decodes(own, step, described.max_position_embeddings), *chunks]
    artifact = artifact_of(origin, described, terms, step, versions={"engine": engine})
    check_plausible(artifact, described, str(path))
    return artifact


def _read(path: Path, engine: str, tensor_parallel: int) -> _Coefficients:
    try:
        content = _FILE.validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = f"{path}: {'.'.join(map(str, first['loc']))}"
        raise ArtifactError(place, first["msg"], valid="expected coefficients of DistServe's estimators") from error
    if engine not in content:
        raise ArtifactError("--engine", f"{path} has none of {engine!r}", valid=f"it has {', '.join(content)}")
    by_degree = content[engine]
    if str(tensor_parallel) not in by_degree:
        raise ArtifactError(
            "--tp", f"{path} has none of {engine} on {tensor_parallel} GPUs", valid=f"it has {', '.join(by_degree)}"
        )
    return by_degree[str(tensor_parallel)]


def _decodes(own: _Coefficients, step_ms: float, max_context: int) -> Term:
    """Decodes by batch and context. Where the second set of coefficients begins, times must not fall."""
    threshold = own.decoding_large_small_bs_threshold
    batch = np.unique([*range(1, 9), *range(16, LARGEST_BATCH + 1, 8), threshold - 1, threshold]).astype(float)
    batch, context = batch[batch > 0], np.array([1.0, float(max_context)])
    is_small = (batch < threshold)[:, None]
    fixed, per_token, per_request = np.where(
        is_small, np.array(own.decoding_smallbs), np.array(own.decoding_largebs)
    ).T[:, :, None]
    ms = rising(fixed - step_ms + per_token * batch[:, None] * context + per_request * batch[:, None])
    note = f"all that decodes cost; made to rise where their coefficients change, at {threshold} requests"
    return term("decode_attention", "decode_attention", [batch, context], ms * 1e3, 1, note)
