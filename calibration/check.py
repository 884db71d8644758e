"""Whether an artifact is what its raw file says, and whether it is of what somebody wants to price."""

from __future__ import annotations

from typing import Any

import numpy as np

from calibration.raw import Metadata
from sim.cost.artifact import Artifact, Term
from sim.errors import ArtifactError

SHOWN = 60
"""Characters of a value in a difference."""


def differences(refitted: Artifact, artifact: Artifact) -> list[str]:
    """What differs, a line each; empty for equal ones. Times that differ are given as the largest part."""
    ours, theirs = refitted.model_dump(mode="json"), artifact.model_dump(mode="json")
    found = [
        f"{name}: {_short(ours[name])} from the raw file, {_short(theirs[name])} in the artifact"
        for name in ours
        if name != "terms" and ours[name] != theirs[name]
    ]
    terms = [{own.name: own for own in each.terms} for each in (refitted, artifact)]
    for name in sorted(terms[0].keys() | terms[1].keys()):
        one, other = terms[0].get(name), terms[1].get(name)
        if one is None or other is None:
            found.append(f"{name}: only {'in the artifact' if one is None else 'from the raw file'}")
        elif one != other:
            found.append(f"{name}: {_term_difference(one, other)}")
    return found


def check_asked(metadata: Metadata, model: str | None, dtype: str | None, tensor_parallel: int | None) -> None:
    """Raise ArtifactError unless a profile is of what was asked for; None asks for nothing."""
    for option, asked, timed in (
        ("--model", model, metadata.model),
        ("--dtype", dtype, metadata.dtype),
        ("--tp", tensor_parallel, metadata.tensor_parallel),
    ):
        if asked is not None and asked != timed:
            raise ArtifactError(
                option,
                f"{asked} is asked for, and the raw file is of {timed}",
                remedy="Take the raw file of that, or leave the option out.",
            )


def _term_difference(one: Term, other: Term) -> str:
    if one.points != other.points:
        return "other points"
    if one.us == other.us:
        return "the same times, described otherwise"
    ratio = np.array(other.us) / np.maximum(np.array(one.us), np.finfo(float).tiny)
    return f"times up to {100 * np.abs(ratio - 1).max():.2g} % apart"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
