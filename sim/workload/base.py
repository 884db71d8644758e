"""Contract of the workloads: who arrives, when, with how many tokens, and when they leave.

All of it is drawn before the run, from named streams, so that every policy meets the same requests.
A workload is columns, one row per request; requests are made from rows as they arrive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sim.options import Count, Options, Positive, PositiveSeconds, Seconds, Share
from sim.registry import Registry
from sim.request import NEVER, Request
from sim.tokens import UNIQUE, TokenRuns

Ints = NDArray[np.int64]
"""A column: one integer per request."""

_CHUNK_BITS = 10
_MAX_CHUNKS = 64


def no_shared_tokens(row: int) -> TokenRuns:
    """The token identity of requests that share nothing with one another."""
    return UNIQUE


@dataclass(frozen=True)
class ClientPool:
    """The clients of one request class, and what they allow themselves.

    `num_clients` is None for an open loop, where requests arrive by themselves. In a closed loop each
    client sends its next request `think_ns` after the answer to its last one (or after its own first
    think time). `max_connections` (None: no limit) is how many requests the class has at the server at
    once; further ones wait at the client, in arrival order. A call with several prompts is answered, and its
    connection free, when the last of them is over.
    """

    num_clients: int | None = None
    max_connections: int | None = None


_Facts = tuple[int, int, int, int, int, int, int]
"""What `Request` is told of a row, between its index and its tokens."""


@dataclass(frozen=True)
class Traffic:
    """Every request of a run, as columns of equal length. Row order is arrival order for open loops.

    Rows of closed-loop classes have `arrival_ns` NEVER (they are taken in row order as clients become
    free) and use `think_ns`; for the others `think_ns` is 0. The later turns of a conversation are the
    rows after its first one; they too have `arrival_ns` NEVER, and `think_ns` from the answer before.
    A row whose time does not come, because its conversation ended, is not a request of the run.
    """

    class_names: tuple[str, ...]
    pools: tuple[ClientPool, ...]
    """One per class."""
    class_index: Ints
    arrival_ns: Ints
    think_ns: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints
    priority: Ints
    """Smaller goes first, as in vLLM."""
    cancel_after_ns: Ints
    """The client leaves this long after its request arrived; NEVER: it stays."""
    cancel_after_tokens: Ints
    """The client leaves when it has received this many tokens; NEVER: it stays."""
    leaves_at_deadline: NDArray[np.bool_]
    """Whether leaving by time counts as a time-out (True) or a cancellation (False)."""
    tokens: Callable[[int], TokenRuns] = no_shared_tokens
    """Token identity of a row, for prefix caching."""
    has_next_turn: NDArray[np.bool_] | None = None
    """Whether the next row is the next turn of the row's conversation. None: there are no conversations."""
    call: Ints | None = None
    """The API call that a row is a prompt of, counted from 0; NEVER: the row is a request by itself. Prompts of a call
    are rows one after the other and arrive together. None: there are no calls."""
    _chunks: dict[int, list[_Facts]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def sessions(self) -> Ints:
        """The conversation of each row, numbered from 0; a request outside any is one by itself."""
        if self.has_next_turn is None:
            return np.arange(len(self))
        return np.cumsum(np.append(True, ~self.has_next_turn[:-1])[: len(self)]) - 1

    def is_first_of_call(self) -> NDArray[np.bool_]:
        """Which rows are the first prompt of their call; a request outside any is one by itself."""
        if self.call is None:
            return np.ones(len(self), dtype=np.bool_)
        is_first: NDArray[np.bool_] = self.call == NEVER
        is_first[:1] = True
        is_first[1:] |= self.call[1:] != self.call[:-1]
        return is_first

    def request(self, row: int) -> Request:
        """A fresh request for one row; `arrival_ns` of one that reacts to an answer is set by its client.

        Cheap when rows are asked for in runs (each class in its row order), which is how clients ask.
        """
        if row < 0:
            raise IndexError(f"row {row} of traffic")
        chunk = self._chunks.get(row >> _CHUNK_BITS) or self._load_chunk(row >> _CHUNK_BITS)
        return Request(row, *chunk[row & (1 << _CHUNK_BITS) - 1], self.tokens(row))

    def _load_chunk(self, number: int) -> list[_Facts]:
        """Rows as Python integers, a block at a time: per field, a numpy element costs more than the request."""
        rows = slice(number << _CHUNK_BITS, (number + 1) << _CHUNK_BITS)
        columns = (
            self.prompt_tokens,
            self.output_tokens,
            self.max_tokens,
            self.arrival_ns,
            self.class_index,
            self.priority,
            self.cancel_after_tokens,
        )
        if len(self._chunks) == _MAX_CHUNKS:
            del self._chunks[next(iter(self._chunks))]
        chunk = self._chunks[number] = list(zip(*(column[rows].tolist() for column in columns), strict=True))
        return chunk


class ArrivalOptions(Options):
    """Base of every arrival process's options."""

    kind: str = Field(description="name of an arrival process")


class Arrivals(ABC):
    """When requests arrive."""

    Options: ClassVar[type[ArrivalOptions]]
    is_closed: ClassVar[bool] = False
    """Whether arrivals are reactions of a fixed number of clients to their answers."""

    @classmethod
    @abstractmethod
    def build(cls, options: ArrivalOptions) -> Arrivals:
        """The process for its options."""

    @abstractmethod
    def draw(self, num_requests: int | None, duration_ns: int | None, rng: np.random.Generator) -> Ints:
        """Sorted arrival times, nanoseconds >= 0: at most `num_requests`, none after `duration_ns`.

        At least one of the two limits is given, except to a process that `ends_by_itself`. The requests
        of a smaller number or duration are the first ones of a larger. A closed loop returns think times
        instead, unsorted; it needs `num_requests`. Raises ScenarioError when the limits ask for more
        requests or a longer time than a run can hold.
        """

    @abstractmethod
    def scaled(self, factor: float) -> Arrivals:
        """The same process with `factor` (> 0) times the rate; for searches over load."""

    @property
    def ends_by_itself(self) -> bool:
        """Whether the process has a last request even without a limit."""
        return False

    @property
    def clients(self) -> int | None:
        """Number of clients of a closed loop; None for an open one."""
        return None


class LengthOptions(Options):
    """Base of every length distribution's options."""

    kind: str = Field(description="name of a length distribution")


class Lengths(ABC):
    """How long texts are."""

    Options: ClassVar[type[LengthOptions]]

    @classmethod
    @abstractmethod
    def build(cls, options: LengthOptions) -> Lengths:
        """The distribution for its options."""

    @abstractmethod
    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        """`num` lengths in tokens, each >= 1."""


class TraceOptions(Options):
    """Base of every trace format's options: the file, and the knobs that every trace has.

    The knobs work in this order: window, thinning, resampling, limit, rate.
    """

    kind: str = Field(description="name of a trace format")
    path: str = Field(
        description="the file, relative to the scenario's folder; ${NAME} is replaced from the environment"
    )
    fallback: str | None = Field(
        default=None, description="the file to play where there is no `path`, say a sample that ships with the scenario"
    )
    start_s: Seconds = Field(
        default=0.0, description="leave out what was recorded in the first so many seconds; play begins there"
    )
    duration_s: PositiveSeconds | None = Field(default=None, description="play so many recorded seconds; default: all")
    thin: Share = Field(default=1.0, gt=0, description="keep each request with this probability")
    resample_s: PositiveSeconds | None = Field(
        default=None,
        description="play blocks of so many recorded seconds (at most a tenth of all), drawn at random again and "
        "again, in place of the recording: as many as limit, num_requests or duration_s ask for, or else as long as "
        "recorded",
    )
    limit: Count | None = Field(default=None, description="play at most so many requests; default: all")
    rate_scale: Positive = Field(default=1.0, description="play so many times as fast as recorded")


@dataclass(frozen=True)
class TraceRows:
    """What a trace file holds: sorted arrivals (the first at 0) and lengths, one entry per request."""

    arrival_ns: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    tokens: Callable[[int], TokenRuns] = no_shared_tokens
    """Token identity by row of these columns."""

    def __len__(self) -> int:
        return len(self.arrival_ns)


class Trace(ABC):
    """A file of recorded requests."""

    Options: ClassVar[type[TraceOptions]]

    @classmethod
    @abstractmethod
    def build(cls, options: TraceOptions) -> Trace:
        """A reader for its options; the file is opened by `read`."""

    @abstractmethod
    def read(self) -> TraceRows:
        """All rows, at least one; the knobs of the options are not applied.

        Rows out of order are sorted by arrival, equal times in file order. Raises TraceError (file and
        line) for anything that is not a request.
        """


ARRIVALS: Registry[Arrivals] = Registry(
    "arrival process",
    "sim.workload.base:Arrivals",
    {
        "constant": "sim.workload.arrivals:Constant",
        "poisson": "sim.workload.arrivals:Poisson",
        "gamma": "sim.workload.arrivals:Gamma",
        "stages": "sim.workload.stages:Stages",
        "burst": "sim.workload.arrivals:Burst",
        "closed_loop": "sim.workload.arrivals:ClosedLoop",
    },
)

LENGTHS: Registry[Lengths] = Registry(
    "length distribution",
    "sim.workload.base:Lengths",
    {
        "constant": "sim.workload.lengths:Constant",
        "uniform": "sim.workload.lengths:Uniform",
        "lognormal": "sim.workload.lengths:Lognormal",
        "empirical": "sim.workload.lengths:Empirical",
    },
)

TRACES: Registry[Trace] = Registry(
    "trace format",
    "sim.workload.base:Trace",
    {
        "azure": "sim.workload.azure:AzureTrace",
        "mooncake": "sim.workload.mooncake:MooncakeTrace",
        "csv": "sim.workload.csv_trace:CsvTrace",
    },
)
