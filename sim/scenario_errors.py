"""What pydantic finds wrong with a scenario, in the user's words: place, finding, what is valid, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from sim.errors import ScenarioError, did_you_mean
from sim.options import OneOf

Path = tuple[str | int, ...]

MOST_KEYS_SHOWN = 14
"""Longer lists of known keys are left out when one of them is surely meant."""

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "nothing",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_too_short": "text",
    "string_pattern_mismatch": "text that matches {pattern}",
}


class SeveralScenarioError(ScenarioError):
    """Several findings in one scenario: one line each, the first one's fields."""

    def __init__(self, errors: Sequence[ScenarioError]) -> None:
        first = errors[0]
        super().__init__(first.place, first.found, valid=first.valid, remedy=first.remedy)
        self.errors = tuple(errors)
        self.args = (self.errors,)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


def scenario_error(error: ValidationError, data: Any, model: type[BaseModel], place: str) -> ScenarioError:
    """One exception for all that is wrong with `data`, which was validated as `model` and comes from `place`."""
    by_path: dict[Path, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_path.setdefault(_path(details, data), []).append(details)
    # An alternative that was not meant (a number where a mapping stands) only adds noise to what is wrong inside it.
    outer = [path for path in by_path if not any(len(p) > len(path) and p[: len(path)] == path for p in by_path)]
    errors = [_explain(path, by_path[path], data, model, place) for path in outer]
    return errors[0] if len(errors) == 1 else SeveralScenarioError(errors)


def check_known(paths: Iterable[Path], data: Any, model: type[BaseModel], place: str) -> None:
    """Raise ScenarioError for a path that leads to no key of valid `data`, given or not."""
    for path in paths:
        owner = _owner(path[:-1], data, model)
        where = f"{place}: {_dotted(path)}"
        if owner is None:
            raise ScenarioError(where, "no such key to take back")
        if path[-1] not in owner.model_fields:
            raise _unknown_key(where, str(path[-1]), list(owner.model_fields))


def _path(details: ErrorDetails, data: Any) -> Path:
    """The keys that lead to the finding, without the names of alternatives that pydantic mixes in."""
    path: list[str | int] = []
    here = data
    loc = details["loc"]
    for i, key in enumerate(loc):
        inside = _inside(here, key)
        if inside is not None:
            here = inside[0]
            path.append(key)
        elif i == len(loc) - 1 and details["type"] == "missing":
            path.append(key)
    return tuple(path)


def _inside(here: Any, key: str | int) -> tuple[Any] | None:
    """What lies under `key`, wrapped; None when nothing does."""
    if isinstance(here, Mapping) and key in here:
        return (here[key],)
    if isinstance(here, (list, tuple)) and isinstance(key, int) and key < len(here):
        return (here[key],)
    return None


def _explain(path: Path, found: list[ErrorDetails], data: Any, model: type[BaseModel], place: str) -> ScenarioError:
    first = found[0]
    ctx: dict[str, Any] = first.get("ctx", {})
    if first["type"] == "union_tag_invalid":
        ctx = _unknown_kind(ctx)
    if "key" in ctx:
        path = (*path, ctx["key"])
    where = f"{place}: {_dotted(path)}" if path else place
    if "found" in ctx:
        return ScenarioError(where, ctx["found"], valid=ctx.get("valid", ""), remedy=ctx.get("remedy", ""))
    owner = _owner(path[:-1], data, model) if path else None
    fields = owner.model_fields if owner else {}
    if first["type"] == "extra_forbidden":
        return _unknown_key(where, str(path[-1]), list(fields))
    field = fields.get(str(path[-1])) if path else None
    if first["type"] == "union_tag_not_found" and field:
        known = [kind for model in _alternatives([field.annotation, *field.metadata]) for kind in _kinds(model)]
        return ScenarioError(where, f"{ctx['discriminator']} is missing", valid=f"known: {', '.join(known)}")
    meaning = f" ({field.description})" if field and field.description else ""
    if first["type"] == "missing":
        return ScenarioError(where, f"is missing{meaning}")
    expected = " or ".join(dict.fromkeys(_expected(details) for details in found))
    return ScenarioError(where, f"expected {expected}, got {_shown(first['input'])}{meaning}")


def _dotted(path: Path) -> str:
    """`traffic[0].arrivals`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _unknown_key(where: str, key: str, known: list[str]) -> ScenarioError:
    remedy = did_you_mean(key, known)
    shown = known if len(known) <= MOST_KEYS_SHOWN or not remedy else []
    return ScenarioError(where, "unknown key", valid=f"known: {', '.join(shown)}" if shown else "", remedy=remedy)


def _unknown_kind(ctx: dict[str, Any]) -> dict[str, Any]:
    """What pydantic knows about a name that selects none of several options, in the terms of `OneOf`."""
    key, name = ctx["discriminator"].strip("'"), ctx["tag"]
    known = [tag.strip("'") for tag in ctx["expected_tags"].split(", ")]
    return {
        "key": key,
        "found": f"unknown {key} {name!r}",
        "valid": f"known: {', '.join(known)}",
        "remedy": did_you_mean(name, known),
    }


def _expected(details: ErrorDetails) -> str:
    if details["type"] in _EXPECTED:
        return _EXPECTED[details["type"]].format(**details.get("ctx", {}))
    return details["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _shown(value: Any) -> str:
    """A value as the user wrote it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (dict, list)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _owner(path: Path, data: Any, model: type[BaseModel]) -> type[BaseModel] | None:
    """The options class of the mapping at `path`."""
    owner: type[BaseModel] | None = model
    here = data
    field: FieldInfo | None = None
    for key in path:
        here = here[key]
        if isinstance(key, str) and owner is not None:
            field = owner.model_fields.get(key)
        owner = _options_class([field.annotation, *field.metadata], here) if field else None
    return owner


def _options_class(annotations: Sequence[Any], value: Any) -> type[BaseModel] | None:
    """The options class that `value` is validated with, somewhere in a field's annotations."""
    found = _alternatives(annotations)
    if found and isinstance(found[0], OneOf):
        return found[0].options_class(value)
    kind = value.get("kind") if isinstance(value, Mapping) else None
    return next((model for model in found if len(found) == 1 or kind in _kinds(model)), None)


def _alternatives(annotations: Sequence[Any]) -> list[Any]:
    """A `OneOf`, or else the options classes to choose from, where annotations first name any."""
    choices = [annotation for annotation in annotations if isinstance(annotation, OneOf)]
    models = [a for a in annotations if isinstance(a, type) and issubclass(a, BaseModel)]
    return choices or models or next(filter(None, (_alternatives(get_args(a)) for a in annotations)), [])


def _kinds(model: type[BaseModel]) -> tuple[str, ...]:
    """The names that select `model` among its alternatives."""
    return get_args(model.model_fields["kind"].annotation)
