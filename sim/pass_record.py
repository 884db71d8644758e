"""Recording iterations that run as several passes: what they cost cannot be told from their sums."""

from __future__ import annotations

from dataclasses import replace

from sim.record import Recorder, Table, Tables
from sim.step import Finished, Pass, PassesShape, Step


class PassRecorder(Recorder):
    """A recorder that keeps one row per pass as well."""

    def __init__(self) -> None:
        super().__init__()
        self._passes = Table(("iteration", *Pass._fields))

    def record(self, step: Step, start_ns: int, end_ns: int, host_ns: int, finished: Finished) -> None:
        """As without passes, and the passes of a step that says them."""
        if isinstance(step.shape, PassesShape):
            for one in step.shape.passes:
                self._passes.rows += self._passes.pack(len(self.iterations), *one)
        super().record(step, start_ns, end_ns, host_ns, finished)

    def _take_tables(self) -> Tables:
        return replace(super()._take_tables(), passes=self._passes.take_columns())
