"""How long a call takes: repeated until the median is known well enough, or the time for it is up."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

MIN_REPEATS = 5
MAX_REPEATS = 400
NUM_WARMUPS = 2
PRECISION = 0.01
"""Half of the median's interval, as a part of the median, at which a point is known well enough."""
OUTLIER_DEVIATIONS = 5.0
"""Repeats so many (normal) standard deviations above the median are set aside: something else ran then."""
_NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation."""
_FLUSH_BYTES = 256 * 2**20
"""More than the L2 cache of any GPU: writing so much leaves nothing else in it."""
_CLOCK_AGE_S = 1.0
_SLOWDOWNS = 0x8 | 0x20 | 0x40 | 0x80
"""Bits of NVML's clock event reasons that mean throttling: hardware or software, thermal or power brake."""


class Timing(NamedTuple):
    """What was found of one call. Fields are the raw file's columns of the same names."""

    median_ns: float
    ci_low_ns: float
    ci_high_ns: float
    repeats: int
    outliers: int
    clock_mhz: float | None
    throttled: bool | None


class Timer:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if self._on_gpu else None
        self._clocks = _Clocks(device) if self._on_gpu else None

    def time(self, call: Callable[[int], object], limit_s: float, *, is_whole: bool = False) -> Timing:
        """Call `call(0)`, `call(1)`, ... for `limit_s` at most (warm-up and the least repeats are always made).

        The argument lets calls take turns over buffers, so that none finds its own still in a cache; on a GPU the
        L2 cache is flushed before each, which also lets the host run ahead, so that what is timed is the device.
        `is_whole`: the call is a whole iteration that ends with its results on the host, and its time is the host's.
        """
        stop_s = time.perf_counter() + limit_s
        self._warm_up(call)
        once = self._once if is_whole or not self._on_gpu else self._once_on_gpu
        times_ns: list[float] = []
        while len(times_ns) < MAX_REPEATS:
            times_ns.append(once(call, NUM_WARMUPS + len(times_ns)))
            if len(times_ns) >= MIN_REPEATS and (
                time.perf_counter() > stop_s or (len(times_ns) % MIN_REPEATS == 0 and _is_known(times_ns))
            ):
                break
        return self._timing(times_ns)

    def time_exactly(self, call: Callable[[int], object], repeats: int) -> Timing:
        """The same with a given number of repeats: for calls that wait for those of other processes."""
        self._warm_up(call)
        once = self._once_on_gpu if self._on_gpu else self._once
        return self._timing([once(call, NUM_WARMUPS + i) for i in range(repeats)])

    @staticmethod
    def _warm_up(call: Callable[[int], object]) -> None:
        for i in range(NUM_WARMUPS):
            call(i)

    def _timing(self, times_ns: list[float]) -> Timing:
        clock_mhz, throttled = self._clocks.read() if self._clocks else (None, None)
        return Timing(*summarize(times_ns), clock_mhz=clock_mhz, throttled=throttled)

    @staticmethod
    def _once(call: Callable[[int], object], i: int) -> float:
        start_ns = time.perf_counter_ns()
        call(i)
        return float(time.perf_counter_ns() - start_ns)

    def _once_on_gpu(self, call: Callable[[int], object], i: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()  # type: ignore[union-attr]  # a GPU's timer has one
        start.record()
        call(i)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e6


def summarize(times_ns: Sequence[float]) -> tuple[float, float, float, int, int]:
    """Median, its 95 % interval, repeats, outliers among them. The interval is that of order statistics.

    The median's 95 % interval spans 0.98 sqrt(n) ranks on either side (binomial; Conover, Practical Nonparametric
    Statistics, 3.2). Outliers count for nothing else.
    """
    values = np.sort(np.asarray(times_ns, dtype=float))
    median = float(np.median(values))
    deviation = _NORMAL_MAD * float(np.median(np.abs(values - median)))
    # a clock's own grain is no deviation to judge by
    kept = values[values <= median + OUTLIER_DEVIATIONS * max(deviation, 0.01 * median)]
    num = len(kept)
    middle, half = (num - 1) / 2, 0.98 * num**0.5
    low, high = max(0, math.floor(middle - half)), min(num - 1, math.ceil(middle + half))
    return float(np.median(kept)), float(kept[low]), float(kept[high]), len(values), len(values) - num


def _is_known(times_ns: Sequence[float]) -> bool:
    median, low, high, _, _ = summarize(times_ns)
    return high - low <= 2 * PRECISION * median


class _Clocks:
    """The clock of a GPU and whether it is throttled, as `nvidia-smi` tells; asked once a second at most."""

    def __init__(self, device: torch.device) -> None:
        self._program = shutil.which("nvidia-smi")
        self._index = device.index or 0
        self._asked_s = float("-inf")
        self._answer: tuple[float | None, bool | None] = (None, None)

    def read(self) -> tuple[float | None, bool | None]:
        now_s = time.monotonic()
        if self._program is not None and now_s - self._asked_s > _CLOCK_AGE_S:
            self._asked_s = now_s
            self._answer = parse_clocks(query(self._program, "clocks.sm,clocks_event_reasons.active", self._index))
        return self._answer


def query(program: str, fields: str, index: int) -> str:
    """What `nvidia-smi` says of a GPU's `fields`, comma-separated; empty where it says nothing."""
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={index}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_clocks(answer: str) -> tuple[float | None, bool | None]:
    """Clock in MHz and whether it is throttled, from `1410, 0x0000000000000004`; None for what is not said."""
    clock, _, reasons = (part.strip() for part in answer.partition(","))
    found: list[Any] = []
    for text, read in ((clock, float), (reasons, lambda text: bool(int(text, 16) & _SLOWDOWNS))):
        try:
            found.append(read(text))
        except ValueError:
            found.append(None)
    return found[0], found[1]
