"""Cost artifacts: what was measured on a GPU, as one JSON file that a scenario can name.

An artifact says what it was measured on and with, where it comes from and under which licence, and carries
its times as named terms. It is read strictly: a file that was changed, or that prices something else than the
scenario asks for, is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from sim.cost.base import Target
from sim.cost.grids import Floats
from sim.errors import ArtifactError
from sim.model import Model
from sim.options import Count, CountOrZero, Finite, NonNegative, Options

AXES: dict[str, tuple[str, ...]] = {
    "tokens": ("num_tokens",),
    "sequences": ("num_sequences",),
    "prefill_tokens": ("num_tokens",),
    "experts": ("num_tokens", "num_experts"),
    "decode_attention": ("num_decode", "context"),
    "prefill_attention": ("num_tokens", "context"),
    "mixed_attention": ("num_decode", "num_tokens", "prefill_context", "context"),
    "decode_skew": ("num_decode", "ratio", "spread"),
    "mixed_skew": ("num_decode", "ratio", "spread"),
}
"""What the time of each kind of term depends on.

`tokens`: rows that the iteration computes. `sequences`: rows whose logits it needs. `prefill_tokens`: rows of
its prompts alone, for measurements of whole iterations. `experts`: rows that the iteration computes, and
experts that they touch in one layer. `decode_attention`: decoding requests and their mean context, themselves
included. `prefill_attention`: tokens and context of one prompt chunk. `mixed_attention`: both at once, in one
call. The `skew` kinds are what unequal contexts add: a part `ratio` of the requests is longer than the others by
`spread` tokens.
"""

ITERATION = "iteration"
"""What residuals call whole iterations, against the sum of all terms."""
NORMAL_SPREAD = float(np.sqrt(np.pi / 2))
"""Standard deviation of normal errors whose mean absolute value is 1."""


class Axis(Options):
    """The measured points of one variable."""

    name: str
    points: list[NonNegative] = Field(min_length=2)

    @model_validator(mode="after")
    def _check_order(self) -> Axis:
        if any(b <= a for a, b in zip(self.points, self.points[1:], strict=False)):
            raise ValueError(f"the points of {self.name} do not rise")
        return self


class Term(Options):
    """One named part of an iteration's time."""

    name: str
    kind: Literal[
        "tokens",
        "sequences",
        "prefill_tokens",
        "experts",
        "decode_attention",
        "prefill_attention",
        "mixed_attention",
        "decode_skew",
        "mixed_skew",
    ]
    calls: Count = Field(description="times per iteration: 32 for something in each of 32 layers")
    is_communication: bool = Field(default=False, description="whether the time is spent between GPUs")
    note: str = Field(default="", description="how it was obtained, where that is not obvious")
    axes: list[Axis]
    us: list[NonNegative] = Field(description="time of one call, µs, in row-major order of the axes")
    corners: list[list[NonNegative]] = Field(
        default=[],
        description="the largest points that were timed, where the grid reaches beyond them: what none of them is at "
        "least as large as, along every axis, is extrapolated; empty: the grid was timed to its ends",
    )

    @model_validator(mode="after")
    def _check_shape(self) -> Term:
        names = tuple(axis.name for axis in self.axes)
        if names != AXES[self.kind]:
            raise ValueError(f"{self.name} has the axes {names}, a term of {self.kind} has {AXES[self.kind]}")
        size = int(np.prod([len(axis.points) for axis in self.axes]))
        if size != len(self.us):
            raise ValueError(f"{self.name} has {len(self.us)} times for {size} points")
        if any(len(corner) != len(names) for corner in self.corners):
            raise ValueError(f"{self.name} has corners of other than {len(names)} coordinates")
        return self

    @property
    def points(self) -> list[list[float]]:
        """The measured points, axis by axis."""
        return [axis.points for axis in self.axes]

    def table_ns(self) -> Floats:
        """Time of all calls of an iteration, ns, one array axis per axis."""
        return np.reshape(np.array(self.us) * (1e3 * self.calls), [len(axis.points) for axis in self.axes])


class Shape(Options):
    """What of a model its kernels depend on; names are those of HF `config.json`."""

    num_hidden_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    vocab_size: Count
    num_moe_layers: CountOrZero = Field(default=0, description="layers with experts; 0: a dense model")
    num_experts: CountOrZero = 0
    num_experts_per_tok: CountOrZero = 0
    moe_intermediate_size: CountOrZero = 0

    @classmethod
    def of(cls, model: Model) -> Shape:
        """The shape of a model."""
        experts = model.experts
        own = (
            {}
            if experts is None
            else {
                "num_moe_layers": experts.num_layers,
                "num_experts": experts.num_experts,
                "num_experts_per_tok": experts.num_experts_per_tok,
                "moe_intermediate_size": experts.intermediate_size,
            }
        )
        return cls(**own | {name: getattr(model, name) for name in cls.model_fields if hasattr(model, name)})


class Residual(Options):
    """How a fit met points of one region that it was made without. Errors are relative: 0.1 is a tenth too much."""

    term: str = Field(description=f"a term, or `{ITERATION}`: whole iterations against the sum of all terms")
    region: str
    num_points: Count
    mean_error: Finite = Field(description="signed: what the region is wrong by as a whole")
    mean_absolute_error: NonNegative
    spread: NonNegative = Field(description="standard deviation of the errors")


class Artifact(Options):
    """Measured times of one model on one GPU (or one group of GPUs that share it)."""

    format: Literal[1] = 1
    hardware: str = Field(description="what it was measured on, in its source's words")
    gpu: str | None = Field(description="the same as `servesim gpus` calls it; null: not listed there")
    model: str
    shape: Shape
    dtype: str
    kv_dtype_bytes: NonNegative
    tensor_parallel: Count
    measured_on: str = Field(description="date")
    versions: dict[str, str]
    source: str
    licence: str
    cuda_graph_sizes: list[Count] = Field(
        description="numbers of rows that iterations with fewer are padded to; empty: times are of rows as they are"
    )
    step_us: NonNegative = Field(default=0.0, description="device time of every iteration that no term depends on, µs")
    host_us: NonNegative = Field(default=0.0, description="host time before every iteration, µs")
    host_us_per_request: NonNegative = Field(default=0.0, description="the same for each request in it, µs")
    terms: list[Term]
    missing: list[str] = Field(description="parts of an iteration that nothing here prices")
    holdout_error: dict[str, NonNegative] = Field(
        description="term -> mean absolute error, as a part, at points that it was made without"
    )
    residuals: list[Residual] = Field(default=[], description="the same by region, where a profile was fitted here")

    @property
    def sha256(self) -> str:
        """Hash of the contents."""
        return hashlib.sha256(_canonical(self.model_dump(mode="json")).encode()).hexdigest()

    def perturbed(self, rng: np.random.Generator) -> Artifact | None:
        """The artifact with its times off as its fit was at points left out; None where it says nothing of that.

        Where whole iterations were held out, all times get one factor with their root mean square error; else
        every term gets its own, normal with the term's mean absolute error. Factors are log-normal, 1 in the median.
        """
        own = [residual for residual in self.residuals if residual.term == ITERATION]
        if own:
            square = np.average(
                [residual.mean_error**2 + residual.spread**2 for residual in own],
                weights=[residual.num_points for residual in own],
            )
            factor = float(np.exp(np.sqrt(square) * rng.standard_normal()))
            factors = dict.fromkeys((term.name for term in self.terms), factor)
        elif self.holdout_error:
            factor = 1.0
            factors = {
                name: float(np.exp(error * NORMAL_SPREAD * rng.standard_normal()))
                for name, error in sorted(self.holdout_error.items())
            }
        else:
            return None
        terms = [
            term.model_copy(update={"us": [us * factors.get(term.name, 1.0) for us in term.us]}) for term in self.terms
        ]
        return self.model_copy(update={"terms": terms, "step_us": self.step_us * factor})

    def of_kind(self, kind: str) -> list[Term]:
        """The terms of one kind."""
        return [term for term in self.terms if term.kind == kind]

    def write(self, path: Path) -> None:
        """Write it with its hash; equal artifacts give equal bytes."""
        content = self.model_dump(mode="json")
        path.write_text(_canonical(content | {"sha256": self.sha256}) + "\n", encoding="utf-8")


def read_artifact(path: Path, place: str = "cost.artifact") -> Artifact:
    """The artifact in a file. Raises ArtifactError for one that is missing, damaged or of another format."""
    where = f"{place}: {path}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(
            place,
            f"cannot read {str(path)!r} ({error.strerror})",
            valid="expected the path of a cost artifact",
            remedy="`servesim calibrate import` makes one.",
        ) from error
    except ValueError as error:
        raise ArtifactError(where, f"not JSON ({error})", remedy="Make the artifact again.") from error
    if not isinstance(content, dict) or "sha256" not in content:
        raise ArtifactError(where, "no cost artifact", valid="expected a file that `servesim calibrate` wrote")
    sha256 = content.pop("sha256")
    try:
        artifact = Artifact.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ArtifactError(where, f"{key}: {first['msg']}", remedy="Make the artifact again.") from error
    if artifact.sha256 != sha256:
        raise ArtifactError(
            where, "its contents are not what its sha256 says", remedy="Make the artifact again; do not edit it."
        )
    return artifact


def check_target(artifact: Artifact, target: Target, place: str = "cost.artifact") -> None:
    """Raise ArtifactError unless the artifact was measured for just what the scenario runs."""
    wanted: dict[str, tuple[Any, Any]] = {
        "hardware.gpu": (target.gpu.name, artifact.gpu or target.gpu.name),
        "hardware.tensor_parallel": (target.tensor_parallel, artifact.tensor_parallel),
        "bytes per element of KV": (target.kv_dtype_bytes, artifact.kv_dtype_bytes),
        "bits per weight": (_weight_bits(target.model), _bits_of(artifact.dtype)),
    }
    own = Shape.of(target.model)
    for name in Shape.model_fields:
        wanted[f"{name} of {target.model.name}"] = (getattr(own, name), getattr(artifact.shape, name))
    for what, (asked, measured) in wanted.items():
        if asked != measured:
            raise ArtifactError(
                place,
                f"measured for {artifact.model} on {artifact.tensor_parallel} × {artifact.hardware}: {what} is "
                f"{asked} in the scenario and {measured} in the artifact",
                remedy="Take an artifact of this model and hardware, or cost: {kind: roofline}.",
            )


def _weight_bits(model: Model) -> int:
    """Of a weight of its matrices, scales and zero points not counted."""
    return 8 * model.dtype_bytes if model.quantization is None else int(model.quantization.weight_bits)


def _bits_of(dtype: str) -> int | None:
    """What the name of a type ends in: 16 of bfloat16, 8 of fp8."""
    digits = re.search(r"\d+$", dtype)
    return int(digits[0]) if digits else None


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
