"""Where the runs of a study are made: in this process, on all cores, or on a cluster. The answers are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from sim.errors import UserError

Task = TypeVar("Task")
Answer = TypeVar("Answer")

CONNECT_TIMEOUT_S = 10


@dataclass(frozen=True)
class Workers:
    """`num_jobs` processes here (None: one per core), or the workers of a dask scheduler at an address.

    The workers of a cluster need the same release of servesim, and must find the files that a scenario
    names at the same paths.
    """

    num_jobs: int | None = None
    dask: str | None = None

    def each(self, function: Callable[[Task], Answer], tasks: Sequence[Task]) -> Iterator[tuple[int, Answer]]:
        """Position and answer of every task, as they are done; `function` must be importable by name.

        Raises what `function` raises, and UserError when a cluster cannot be reached or a worker dies.
        """
        num_jobs = self._num_jobs(len(tasks))
        if self.dask is None and num_jobs == 1:
            for position, task in enumerate(tasks):
                yield position, function(task)
            return
        with self._backend(num_jobs) as parallel, _explained():
            from joblib import delayed  # type: ignore[import-untyped]  # it ships no types

            numbered = (delayed(_numbered)(function, position, task) for position, task in enumerate(tasks))
            yield from parallel(numbered)

    def _num_jobs(self, num_tasks: int) -> int:
        from joblib import cpu_count

        return max(1, min(self.num_jobs or cpu_count(), num_tasks))

    @contextmanager
    def _backend(self, num_jobs: int) -> Iterator[Any]:
        from joblib import Parallel, parallel_config

        if self.dask is None:
            # Two tasks a worker ahead: runs take seconds, and what is handed out is lost with a worker.
            yield Parallel(n_jobs=num_jobs, return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs")
            return
        with _client(self.dask) as client, parallel_config(backend="dask", client=client):
            yield Parallel(n_jobs=-1, return_as="generator_unordered", batch_size=1)


def _numbered(function: Callable[[Task], Answer], position: int, task: Task) -> tuple[int, Answer]:
    return position, function(task)


@contextmanager
def _client(address: str) -> Iterator[Any]:
    """A connection to a dask scheduler. Raises UserError where there is none."""
    place = f"--dask {address}"
    try:
        from distributed import Client  # type: ignore[import-not-found,unused-ignore]  # an extra
    except ImportError:
        raise UserError(place, "dask is not installed", remedy="Install it: pip install 'servesim[cluster]'.") from None
    try:
        client = Client(address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UserError(
            place,
            f"no dask scheduler answers there ({error})",
            valid="expected the address that `dask scheduler` prints, such as tcp://10.0.0.1:8786",
        ) from error
    with client:
        if not client.scheduler_info()["workers"]:
            raise UserError(place, "the scheduler has no workers", remedy=f"Start some: dask worker {address}")
        yield client


@contextmanager
def _explained() -> Iterator[None]:
    """The death of a worker in the user's terms."""
    from joblib.externals.loky.process_executor import (  # type: ignore[import-untyped]  # it ships no types
        TerminatedWorkerError,
    )

    try:
        yield
    except TerminatedWorkerError as error:
        raise _died(str(error).splitlines()[0]) from error
    except Exception as error:
        if type(error).__name__ == "KilledWorker":  # dask's own, which need not be installed
            raise _died("the cluster gave up on a task whose workers died one after the other") from error
        raise


def _died(why: str) -> UserError:
    return UserError(
        "",
        f"a worker died ({why})",
        remedy="It may have run out of memory: try fewer with --jobs. What was finished in --out is kept.",
    )
