"""Fields of a log's input, checked: unknown keys and values of a wrong kind are named by their place in the file."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import StrictInt, StrictStr, ValidationError

from sim.conformance.golden import Golden
from sim.errors import GoldenError, did_you_mean
from sim.options import Count, CountOrZero, Options

M = TypeVar("M", bound=Options)


class LoggedRequest(Options):
    """One of a log's `requests`, as far as all formats agree."""

    id: StrictStr
    arrival_step: CountOrZero
    prompt_tokens: CountOrZero
    output_tokens: Count
    max_tokens: Count
    priority: StrictInt = 0
    cancel_step: CountOrZero | None = None
    prefix: tuple[tuple[StrictInt, CountOrZero], ...] | None = None
    """Shared beginnings of the prompt: `(stream, tokens)`."""


R = TypeVar("R", bound=LoggedRequest)


def read_rows(golden: Golden, model: type[R]) -> list[R]:
    """The requests as the file has them. Raises GoldenError."""
    rows: list[R] = []
    ids: set[str] = set()
    for index, given in enumerate(golden.field("requests", list)):
        place = f"{golden.path}: requests[{index}]"
        if not isinstance(given, dict):
            raise GoldenError(place, f"is {reprlib.repr(given)}", valid="a JSON object is expected")
        refuse_unknown(place, given, model.model_fields)
        row = validated(model, given, place)
        _check_row(row, ids, place)
        ids.add(row.id)
        rows.append(row)
    if not rows:
        raise GoldenError(f"{golden.path}: requests", "is empty: such a log shows nothing")
    return rows


def validated(model: type[M], given: Mapping[str, Any], place: str, renamed: Mapping[str, str] | None = None) -> M:
    """`given` as a `model`; `renamed` maps keys of the file to those of the model. Raises GoldenError at `place`."""
    try:
        return model.model_validate_json(json.dumps(given), strict=True)  # lists are tuples in JSON alone
    except ValidationError as error:
        raise _translate(error, place, renamed or {}) from error


def refuse_unknown(place: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise GoldenError for a key that is not `known`: it could change decisions."""
    for key in given:
        if key not in known:
            raise GoldenError(
                place,
                f"unknown key {key!r}",
                valid=f"known: {', '.join(sorted(known))}",
                remedy=did_you_mean(key, known),
            )


def _check_row(row: LoggedRequest, ids: Collection[str], place: str) -> None:
    if row.id in ids:
        raise GoldenError(f"{place}.id", f"{row.id!r} is the id of an earlier request, too")
    shared_tokens = sum(length for _, length in row.prefix or ())
    if shared_tokens > row.prompt_tokens:
        raise GoldenError(
            f"{place}.prefix", f"has {shared_tokens} tokens", valid=f"the prompt has only {row.prompt_tokens}"
        )


def _translate(error: ValidationError, place: str, renamed: Mapping[str, str]) -> GoldenError:
    """The first of pydantic's findings, in the words of the file."""
    details = error.errors(include_url=False)[0]
    in_file = {ours: logged for logged, ours in renamed.items()}
    for key in details["loc"]:
        place += f"[{key}]" if isinstance(key, int) else f".{in_file.get(key, key)}"
    if details["type"] == "missing":
        return GoldenError(place, "is missing")
    valid = details["msg"][:1].lower() + details["msg"][1:]
    return GoldenError(place, f"is {reprlib.repr(details['input'])}", valid=valid)
