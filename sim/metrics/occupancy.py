"""Which iteration owns which stretch of a run, and the stretches that none owns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.metrics.distribution import Ints
from sim.metrics.window import Window
from sim.record import Columns


@dataclass(frozen=True)
class Spans:
    """A partition of a window: iteration i owns `[start_ns[i], end_ns[i])`, idle time lies before and after.

    An iteration owns the device's work and what the host spent to plan it, as far as the device stood
    still meanwhile (`host_ns`). Where iterations overlap (a pipeline), the one that ends first owns the
    common part.
    """

    start_ns: Ints
    end_ns: Ints
    host_ns: Ints
    window: Window

    @property
    def owned_ns(self) -> Ints:
        """How long each iteration's stretch is."""
        return self.end_ns - self.start_ns

    def idle(self) -> tuple[Ints, Ints]:
        """Start and end of the stretches between (possibly empty), one more than there are iterations."""
        return np.append(self.window.start_ns, self.end_ns), np.append(self.start_ns, self.window.end_ns)


def owned_spans(iterations: Columns, window: Window) -> Spans:
    """The partition of `window`; iterations outside it own nothing."""
    end_ns = np.maximum.accumulate(iterations["end_ns"])
    free_ns = np.concatenate([[0], end_ns[:-1]]) if len(end_ns) else end_ns
    device_ns = np.clip(np.maximum(iterations["start_ns"], free_ns), None, end_ns)
    start_ns = np.clip(np.maximum(iterations["start_ns"] - iterations["host_ns"], free_ns), None, end_ns)
    clipped = [np.clip(column, window.start_ns, window.end_ns) for column in (start_ns, device_ns, end_ns)]
    return Spans(clipped[0], clipped[2], clipped[1] - clipped[0], window)
