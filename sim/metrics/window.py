"""The measurement window: which requests and which time a run is judged by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.clock import NS_PER_S, to_ns
from sim.metrics.distribution import Bools
from sim.record import Columns, Tables


@dataclass(frozen=True)
class Window:
    """Latencies are those of requests that arrive in it, followed to their end; rates and shares are over it."""

    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Its length; 0 when nothing was measured."""
        return self.end_ns - self.start_ns

    def has_arrival_of(self, requests: Columns) -> Bools:
        """Which requests arrive in it."""
        arrival_ns = requests["arrival_ns"]
        return (arrival_ns >= self.start_ns) & (arrival_ns <= self.end_ns)

    def per_second(self, amount: float) -> float | None:
        """The rate of what happened `amount` times in it."""
        return amount * NS_PER_S / self.duration_ns if self.duration_ns else None

    def per_time(self, amount_ns: float) -> float | None:
        """The time average of what adds up to `amount_ns` over it."""
        return amount_ns / self.duration_ns if self.duration_ns else None


def run_window(tables: Tables, stopped_ns: int | None = None) -> Window:
    """The whole run: from the first arrival to the last thing that happened (or to when it was stopped)."""
    if len(tables.requests["arrival_ns"]) == 0:
        return Window(0, 0)
    columns = [tables.requests[name] for name in ("arrival_ns", "finished_ns", "released_ns", "cancelled_ns")]
    last_ns = int(max(np.max(column, initial=0) for column in (*columns, tables.iterations["end_ns"])))
    return Window(int(tables.requests["arrival_ns"].min()), max(last_ns, stopped_ns or 0))


def measurement_window(tables: Tables, whole: Window, warmup_s: float, cut_drain: bool) -> Window:
    """The run without its first `warmup_s` seconds and, if asked, without what follows the last arrival."""
    end_ns = int(tables.requests["arrival_ns"].max(initial=0)) if cut_drain else whole.end_ns
    return Window(min(max(whole.start_ns, to_ns(warmup_s)), end_ns), end_ns)
