"""Sweeps on a real dask cluster of two local workers, one of which is killed on the way."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.errors import UserError
from sim.planning.sweep import sweep
from sim.planning.workers import Workers
from tests.unit.test_sweep import GRID, files, scenario

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="needs servesim[cluster]")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster


def test_a_killed_worker_loses_nothing(cluster: Any, tmp_path: Path):
    grid = GRID | {"seed": [1, 2, 3, 4], "run.num_requests": [500]}
    killed: list[int] = []

    def kill_one(num_finished: int, num_points: int) -> None:
        if num_finished == 2 and not killed:
            killed.append(next(iter(cluster.workers.values())).pid)
            os.kill(killed[0], signal.SIGKILL)

    on_cluster = sweep(
        scenario(grid), tmp_path / "dask", workers=Workers(dask=cluster.scheduler_address), progress=kill_one
    )
    assert killed
    assert len(on_cluster.answers) == 16
    on_cluster.save(tmp_path / "dask")
    sweep(scenario(grid), tmp_path / "here", workers=Workers(1)).save(tmp_path / "here")
    assert files(tmp_path / "dask") == files(tmp_path / "here")


def test_a_cluster_that_is_not_there_is_explained():
    pytest.importorskip("distributed", reason="needs servesim[cluster]")
    with pytest.raises(UserError, match="no dask scheduler answers there"):
        sweep(scenario(), workers=Workers(dask="tcp://127.0.0.1:1"))
    with pytest.raises(UserError, match="no dask scheduler answers there"):
        sweep(scenario(), workers=Workers(dask="nonsense://"))


def test_a_cluster_without_workers_is_explained(cluster: Any):
    cluster.scale(0)
    cluster.sync(cluster._correct_state)
    with pytest.raises(UserError, match="the scheduler has no workers"):
        sweep(scenario(), workers=Workers(dask=cluster.scheduler_address))
