"""What a measured run of vLLM was: its settings, and the link between its GPUs, as its folder says them.

`meta.json` gives `engine_kwargs` (the engine's arguments, spelled as in Python or on the command line) and
`kv_cache` (what the engine found at start; it goes first); `cluster_config.json` the link. A setting that
changes what a step computes and cannot be simulated is refused rather than left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.json_file import read_json
from calibration.models import bundled_name
from calibration.ring import Link
from sim.errors import ArtifactError

_UNSET = (None, "", "auto")
_COPIED = {
    "async_scheduling": bool,
    "enable_chunked_prefill": bool,
    "scheduling_policy": str,
    "long_prefill_token_threshold": int,
}
"""Settings that a scenario calls the same, and their types."""
_SIMULATED = {
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "dtype": ("bfloat16", "float16", "half"),
    "kv_cache_dtype": ("bfloat16", "float16"),
    "quantization": (),
    "speculative_config": (),
    "cpu_offload_gb": (0,),
    "enable_lora": (False,),
}
"""Settings that a replay has no place for, and at which values it is the same run. Unset, or `auto`, is one."""


@dataclass(frozen=True)
class MeasuredRun:
    """The settings of a run. `engine` is that section of a scenario, but for what only a scenario says."""

    model: str
    tensor_parallel: int
    engine: dict[str, Any]
    published: str
    """Summary of another simulator; empty if there is none."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block."""
        return int(self.engine["block_size"])


def read_run(folder: Path) -> MeasuredRun:
    """The settings of the run in a folder. Raises ArtifactError that names the file, what was found and what is valid.

    What the run does not say is vLLM's default: 256 requests, 2,048 tokens a step, blocks of 16, 90 % of the memory.
    """
    path = folder / "meta.json"
    meta = _read_object(path)
    _check_sections(path, meta)
    kwargs, kv_cache = _spelled(meta["engine_kwargs"]), _spelled(meta.get("kv_cache") or {})
    _refuse_others(path, kwargs)
    own, either = _Settings(path, [kwargs]), _Settings(path, [kv_cache, kwargs])
    engine = {
        "policy": "vllm-v1",
        "vllm_version": _version(path, meta["vllm_version"]),
        "max_num_seqs": own.whole("max_num_seqs", 256),
        "max_num_batched_tokens": own.whole("max_num_batched_tokens", 2048),
        "block_size": either.whole("block_size", 16),
        "enable_prefix_caching": either.flag("enable_prefix_caching", True),
        "num_gpu_blocks": either.whole("num_gpu_blocks", 0) or own.whole("num_gpu_blocks_override", 0) or "auto",
        "gpu_memory_utilization": either.share("gpu_memory_utilization", 0.9),
    }
    if kwargs.get("max_model_len") != -1 and (max_model_len := own.whole("max_model_len", 0)):
        engine["max_model_len"] = max_model_len
    engine |= own.copied()
    return MeasuredRun(
        model=bundled_name(_model(path, meta, kwargs)),
        tensor_parallel=own.whole("tensor_parallel_size", 1),
        engine=engine,
        published=str(meta.get("published_sim_summary") or ""),
    )


def read_link(folder: Path) -> Link | None:
    """The link between the GPUs as `cluster_config.json` gives it, in GB/s and ns; None where there is no such file.

    Raises ArtifactError.
    """
    path = folder / "cluster_config.json"
    if not path.is_file():
        return None
    config = _read_object(path)
    values = [config.get("link_bw"), config.get("link_latency")]
    if not all(isinstance(value, int | float) and 0 <= value < 1e12 for value in values) or not values[0]:
        raise ArtifactError(
            str(path),
            f"link_bw is {values[0]!r} and link_latency {values[1]!r}",
            valid="expected GB/s above zero and ns, zero or more",
        )
    return Link(bytes_per_us=float(config["link_bw"]) * 1e3, latency_us=float(config["link_latency"]) * 1e-3)


class _Settings:
    """Settings of several sections, the first that has one going first."""

    def __init__(self, path: Path, sections: Sequence[Mapping[str, Any]]) -> None:
        self._path = path
        self._sections = sections

    def whole(self, name: str, default: int) -> int:
        """A whole number, at least 1."""
        value = self._find(name)
        if value is None:
            return default
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (value >= 1 and float(value).is_integer())
        ):
            raise self._error(name, value, "a whole number, at least 1")
        return int(value)

    def share(self, name: str, default: float) -> float:
        """A part of a whole."""
        value = self._find(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise self._error(name, value, "a number above 0, at most 1")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._find(name)
        if value is not None and not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return default if value is None else value

    def copied(self) -> dict[str, Any]:
        """Those that a scenario calls the same, where they are set."""
        found = {name: self._find(name) for name in _COPIED}
        for name, value in found.items():
            if value is not None and not isinstance(value, _COPIED[name]):
                raise self._error(name, value, f"a value of type {_COPIED[name].__name__}")
        return {name: value for name, value in found.items() if value is not None}

    def _find(self, name: str) -> Any:
        return next((own[name] for own in self._sections if own.get(name) not in _UNSET), None)

    def _error(self, name: str, value: Any, valid: str) -> ArtifactError:
        return ArtifactError(str(self._path), f"{name} is {value!r}", valid=f"expected {valid}")


def _read_object(path: Path) -> dict[str, Any]:
    content = read_json(path, valid="expected a measured run")
    if not isinstance(content, dict):
        raise ArtifactError(str(path), f"holds a {type(content).__name__}", valid="expected a JSON object")
    return content


def _check_sections(path: Path, meta: dict[str, Any]) -> None:
    absent = [name for name in ("engine_kwargs", "vllm_version") if not meta.get(name)]
    if absent:
        raise ArtifactError(
            str(path),
            f"does not say {' and '.join(absent)}",
            valid="expected a measured run",
            remedy=f"It has {', '.join(map(str, meta)) or 'nothing'}.",
        )
    for name in ("engine_kwargs", "kv_cache"):
        if not isinstance(meta.get(name) or {}, dict):
            raise ArtifactError(str(path), f"{name} is {meta[name]!r}", valid="expected a JSON object")


def _spelled(section: dict[str, Any]) -> dict[str, Any]:
    """The settings by vLLM's names in Python: `--max-num-seqs` is `max_num_seqs`."""
    return {name.removeprefix("--").replace("-", "_"): value for name, value in section.items()}


def _refuse_others(path: Path, kwargs: Mapping[str, Any]) -> None:
    for name, simulated in _SIMULATED.items():
        value = kwargs.get(name)
        if value not in _UNSET and value not in simulated:
            valid = " or ".join(map(str, simulated)) or "none"
            raise ArtifactError(str(path), f"{name} is {value!r}", valid=f"can be replayed: {valid}")


def _version(path: Path, version: Any) -> str:
    """The release of a version such as `0.19.0rc1+cu130`."""
    release = re.match(r"v?(\d+\.\d+(?:\.\d+)?)(?![\d.]*\d)", str(version))
    if release is None:
        raise ArtifactError(str(path), f"vllm_version is {version!r}", valid="expected a version such as 0.19.0")
    return release[1]


def _model(path: Path, meta: dict[str, Any], kwargs: Mapping[str, Any]) -> str:
    name = meta.get("model") or kwargs.get("model")
    if not isinstance(name, str):
        raise ArtifactError(str(path), f"model is {name!r}", valid="expected a model's name")
    return name.rstrip("/")
