"""Scenario files as plain data: strict YAML, overrides from the command line, variants laid over a base."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sim.errors import ScenarioError, did_you_mean

KEPT_BY_ANOTHER_POLICY = (
    "max_model_len",
    "block_size",
    "num_gpu_blocks",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "kv_cache_dtype",
)
"""Keys of `engine` that describe the machine more than the policy: they survive a change of policy."""

_EITHER = {"num_gpu_blocks": "kv_cache_memory_bytes", "kv_cache_memory_bytes": "num_gpu_blocks"}
"""Two ways to say one thing: an overlay that says it one way takes back the other."""


_INDEX = re.compile(r"\[(\d+)\]")


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2, with keys that are text, and without duplicate keys.

    YAML 1.1, PyYAML's own, reads `1e3` as text, `12:30` as 750 and `on` as true. A key is text as it is
    written: `0.5` and `32` need no quotes.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        # Contents before containers: what contains itself is then an error rather than a cycle.
        self.deep_construct = True

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            # PyYAML's own constructors fail so on a value that its explicit tag does not fit
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            raise _refusal(f"not a value of the kind {kind!r} ({error})", node) from error

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        value = super().construct_scalar(node)
        value.encode()  # fails for half a character, which the escape \ud800 makes
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refusal("a key is not text", key_node)
            key = key_node.value
            if key in lines:
                raise _refusal(f"key {key!r} is given twice, first in line {lines[key]}", key_node)
            lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                key_node.tag = "tag:yaml.org,2002:str"


def _refusal(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))
_Loader.yaml_implicit_resolvers[""] = _Loader.yaml_implicit_resolvers["\0"]
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value.replace("_", "")))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ScenarioError (with the line) for anything else."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ScenarioError(str(path), "no such file", remedy=_remedy_for_missing(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ScenarioError(str(path), f"cannot be read: {reason}") from None
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        found = "is empty" if data is None else f"holds {_kind(data)}"
        raise ScenarioError(str(path), found, valid="a scenario is a mapping with at least model, hardware and traffic")
    return data


def parse_yaml(text: str, place: str) -> Any:
    """The value of a YAML text. Raises ScenarioError at `place:line`."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ScenarioError(place + line, f"not valid YAML: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ScenarioError(place, f"not valid YAML: {error}") from None
    except RecursionError:
        raise ScenarioError(place, "not valid YAML: nested too deeply") from None


def overlay_from_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["engine.max_num_seqs=64", ...]` as one nested overlay. Values are YAML; a later one wins."""
    overlay: dict[str, Any] = {}
    for override in overrides:
        place = f"--set {override}"
        path, equals, text = override.partition("=")
        if not equals:
            raise ScenarioError(place, "is not an override", valid="expected key.key=value")
        put(overlay, path, parse_yaml(text, place), place)
    return overlay


def put(overlay: dict[str, Any], path: str, value: Any, place: str) -> None:
    """Set `value` at `path` (`traffic[0].share`, `engine.max_num_seqs`) of a nested overlay, which is mutated."""
    keys = _INDEX.sub(r".\1", path.strip()).split(".")
    if not all(keys):
        raise ScenarioError(place, "is not an override", valid="expected key.key=value")
    target = overlay
    for key in keys[:-1]:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ScenarioError(place, f"{key!r} was set to a plain value by an override before it")
        target = inner
    target[keys[-1]] = value


def lay_over(base: Any, overlay: Any, place: str) -> Any:
    """`base` changed by `overlay`; neither is mutated.

    Mappings are merged key by key, a null takes the key back to its default, and everything else replaces.
    Entries of a list are addressed by position or by their `name`. An overlay that names a `kind` starts
    that mapping afresh, and so does one that names a `policy`, but for `KEPT_BY_ANOTHER_POLICY`.
    """
    if isinstance(base, list) and isinstance(overlay, dict):
        return _lay_over_list(base, overlay, place)
    if not (isinstance(base, dict) and isinstance(overlay, dict)):
        return overlay
    if "kind" in overlay and "kind" in base:
        base = {}
    elif "policy" in overlay and "policy" in base:
        base = {key: value for key, value in base.items() if key in KEPT_BY_ANOTHER_POLICY}
    taken_back = {key for key, value in overlay.items() if value is None}
    taken_back |= {_EITHER[key] for key in overlay if key in _EITHER and _EITHER[key] not in overlay}
    merged = {key: value for key, value in base.items() if key not in taken_back}
    for key, value in overlay.items():
        if value is not None:
            below = merged.get(key, {} if isinstance(value, dict) else None)
            merged[key] = lay_over(below, value, _inside(place, key))
    return merged


def idle_nulls(base: Any, overlay: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths at which `lay_over` finds a null for a key that `base` does not have: a default, or a typo."""
    if not isinstance(overlay, dict):
        return
    for name, value in overlay.items():
        key = _position(base, name) if isinstance(base, list) else name
        inner = base[key] if isinstance(key, int) else base.get(name) if isinstance(base, dict) else None
        if value is None and inner is None:
            yield (*path, name)
        yield from idle_nulls(inner, value, (*path, name if key is None else key))


def _lay_over_list(base: list[Any], overlay: Mapping[str, Any], place: str) -> list[Any]:
    merged = list(base)
    for key, value in overlay.items():
        index = _position(base, key)
        if index is None:
            known = [*_names(base), *map(str, range(len(base)))]
            raise ScenarioError(
                _inside(place, key),
                "no such entry",
                valid=f"known: {', '.join(filter(None, known))}",
                remedy=did_you_mean(key, known),
            )
        merged[index] = lay_over(merged[index], value, _inside(place, key))
    return merged


def _names(entries: list[Any]) -> list[str]:
    return [str(entry.get("name", "")) if isinstance(entry, dict) else "" for entry in entries]


def _position(entries: list[Any], key: str) -> int | None:
    """The entry of a list that an overlay means by `key`: by its name, or else by its number."""
    names = _names(entries)
    if key in names:
        return names.index(key)
    return int(key) if key.isdecimal() and int(key) < len(entries) else None


def _inside(place: str, key: str) -> str:
    """`x.yaml: engine`, `x.yaml: engine.policy`."""
    return f"{place}.{key}" if ": " in place else f"{place}: {key}"


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "a plain text" if isinstance(value, str) else repr(value)


def _remedy_for_missing(path: Path) -> str:
    try:
        siblings = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")]
    except OSError:
        return f"There is no folder {str(path.parent)!r}."
    return did_you_mean(path.name, siblings)
