"""Where AIConfigurator's tables lie: in the package `aiconfigurator-core`, or as CSV files in a folder.

The package (0.12.0 was read) has `systems/GPU.yaml` and `systems/data/GPU/FAMILY/vllm/VERSION/TABLE_perf.parquet`,
with several head sizes and windows in one table. The folder has `GPU_system.yaml` and `GPU_vllmVERSION_TABLE.csv`,
cut to one head size. In both, latencies are in ms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from calibration import csv_table
from sim.errors import ArtifactError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

DISTRIBUTION = "aiconfigurator-core"
_FAMILIES = {
    "gemm": "gemm",
    "context_attention": "attention",
    "generation_attention": "attention",
    "custom_allreduce": "comm",
}
_TEXT = ("gemm_dtype", "kv_cache_dtype", "backend")
_POSITIVE = ("batch_size", "isl", "m", "n", "k", "message_size")
"""Sizes; of contexts, `step` may be zero."""
GPU_YAML = ("{gpu}_system.yaml", "{gpu}_system.yaml.txt", "{gpu}.yaml")


@dataclass(frozen=True)
class Files:
    """The tables of one GPU. `package_version` is None for a folder that was not installed as a package."""

    folder: Path
    gpu: str
    package_version: str | None = None

    @property
    def source(self) -> str:
        """Where they come from, as artifacts say it."""
        version = self.package_version or "0.12.0"
        return f"AIConfigurator, {DISTRIBUTION} {version} on PyPI, systems/data"

    def system(self) -> tuple[Path, Any]:
        """The data sheet of the GPU and its corrections, as the file states them. Raises ArtifactError."""
        path = csv_table.find([self.folder / name.format(gpu=self.gpu) for name in GPU_YAML], str(self.folder))
        try:
            return path, yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ArtifactError(str(path), f"cannot be read as YAML ({error})") from error

    def read(self, table: str, columns: list[str], head_dim: int | None = None) -> pd.DataFrame:
        """One of `gemm`, `context_attention`, `generation_attention`, `custom_allreduce`, with these columns.

        Attention is that of one head size without a window. Latencies stand in `latency_ms`. Raises
        ArtifactError for a table that is missing or no such table.
        """
        if self._is_package:
            path = self._newest(table) / f"{table}_perf.parquet"
            more = [] if head_dim is None else ["head_dim"]
            rows = csv_table.read(path, [*columns, *more, "latency"], ["latency", *_POSITIVE], _TEXT)
            rows = rows.rename(columns={"latency": "latency_ms"})
            if head_dim is not None:
                is_windowed = rows["window_size"] > 0 if "window_size" in rows else False
                rows = rows[(rows["head_dim"] == head_dim) & ~is_windowed]
            return rows
        latency = "latency" if table == "custom_allreduce" else "latency_ms"
        ending = table if head_dim is None else f"{table}_hd{head_dim}"
        path = self._one(f"{self.gpu}_vllm*_{ending}.csv")
        return csv_table.read(path, [*columns, latency], [latency, *_POSITIVE], _TEXT).rename(
            columns={latency: "latency_ms"}
        )

    def vllm_version(self) -> str:
        """The version whose kernels were timed."""
        if self._is_package:
            return self._newest("gemm").name
        return self._one(f"{self.gpu}_vllm*_gemm.csv").name.removeprefix(f"{self.gpu}_vllm").partition("_")[0]

    @property
    def _is_package(self) -> bool:
        return (self.folder / "data").is_dir()

    def _newest(self, table: str) -> Path:
        folder = self.folder / "data" / self.gpu / _FAMILIES[table] / "vllm"
        versions = sorted(folder.glob(f"*/{table}_perf.parquet"), key=lambda path: _numbers(path.parent.name))
        if not versions:
            known = sorted(path.name for path in (self.folder / "data").iterdir() if path.is_dir())
            raise ArtifactError(
                "--gpu",
                f"{self.folder} has no {table} of vLLM on {self.gpu!r}",
                valid=f"it has {', '.join(known) or 'no GPU'}",
                remedy=did_you_mean(self.gpu, known),
            )
        return versions[-1].parent

    def _one(self, pattern: str) -> Path:
        found = sorted([*self.folder.glob(pattern), *self.folder.glob(pattern + ".gz")])
        if not found:
            raise ArtifactError(
                str(self.folder),
                f"there is no {pattern}",
                remedy="Name the folder of AIConfigurator tables, and --gpu.",
            )
        return found[0]


def installed(gpu: str) -> Files:
    """The tables of the installed package, found without importing it. Raises ArtifactError when there is none."""
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise ArtifactError(
            "PATHS",
            f"none given, and {DISTRIBUTION} is not installed",
            valid="expected the folder of AIConfigurator tables",
            remedy=f"Name it, or `pip install {DISTRIBUTION}`.",
        ) from error
    return Files(Path(str(found.locate_file("aiconfigurator_core/systems"))), gpu, found.version)


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)]
