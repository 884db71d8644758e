"""Contract of the policies: who runs in the next iteration.

A policy owns the waiting queue, the running batch and the KV cache. It knows no clock of its own: the
driver hands it the time of planning, and most policies ignore it. Check, then act: "does not fit" is a
value; an exception means a bug.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from sim.doors.base import DOORS, DoorOptions
from sim.errors import InvariantError
from sim.gpu import Gpu
from sim.options import Count, OneOf, Options, PositiveSeconds, Share
from sim.queues.base import QueueOrder
from sim.registry import Registry
from sim.request import Request
from sim.step import Finished, SteadyRun, Step, StepShape


class EngineOptions(Options):
    """What every engine can be told, whatever its policy. Subclassed by each policy's own options."""

    policy: str = Field(description="name of a scheduling policy (see `servesim policies`)")
    max_model_len: Count | None = Field(
        default=None, description="longest prompt + output, tokens; default: what the model supports"
    )
    block_size: Annotated[Count, Field(le=65536)] = Field(default=16, description="tokens per KV block")
    num_gpu_blocks: Count | Literal["auto"] = Field(
        default="auto", description="KV blocks of the pool; auto: derived from the GPU's memory"
    )
    kv_cache_memory_bytes: Count | None = Field(
        default=None, description="memory for KV, bytes per GPU, instead of the derived one"
    )
    gpu_memory_utilization: Share = Field(default=0.9, description="part of the GPU's memory that the engine may use")
    kv_cache_dtype: Literal["auto", "bf16", "fp16", "fp8"] = Field(
        default="auto", description="element type of KV; auto: the model's own type"
    )
    admission_control: tuple[Annotated[DoorOptions, OneOf(DOORS)], ...] = Field(
        default=(), description="doors that turn requests away when they arrive, asked in this order"
    )
    queue_timeout_s: PositiveSeconds | None = Field(
        default=None, description="seconds that a request may wait for its first admission; then it is turned away"
    )
    abort_on_disconnect: bool = Field(
        default=True, description="free a request's KV when its client leaves; false: compute it to its end"
    )

    def on_gpu(self, gpu: Gpu) -> Self:
        """The same options with those defaults filled in that depend on the hardware. Pure."""
        return self

    def largest_pass(self, longest: int) -> tuple[int, int]:
        """Tokens and sampled rows of the largest forward pass, which memory must be kept free for.

        An engine without a token budget is taken to work through its prompts one after the other: its
        largest pass is then one prompt of `longest` tokens, the longest that it accepts.
        """
        return longest, 1

    def notes(self) -> Iterator[str]:
        """What a reader of the results should know about how these options were understood."""
        yield from ()


class StepPredictor(NamedTuple):
    """What steps are expected to take: as much of a cost model as a policy may know."""

    device_ns: Callable[[StepShape], int]
    """Time of the device for a step, ns, >= 1."""
    host_ns: Callable[[StepShape], int]
    """Time of the host before it, ns, >= 0."""

    def interval_ns(self, shape: StepShape, *, plans_ahead: bool) -> int:
        """From the end of one step to the end of the next when both have this shape, ns. Pure.

        Host and device work one after the other, or at once where a step is planned while the one before it runs.
        """
        device_ns, host_ns = self.device_ns(shape), self.host_ns(shape)
        return max(device_ns, host_ns) if plans_ahead else device_ns + host_ns


@dataclass(frozen=True)
class EngineLimits:
    """What an engine on given hardware has, resolved from options, model and GPU."""

    max_model_len: int
    block_size: int
    num_gpu_blocks: int
    """Blocks of the pool, counting a null block where the policy has one."""
    class_names: tuple[str, ...] = ()
    """Names of the traffic's request classes, by `request.class_index`."""
    block_bytes: int = 0
    """KV of one block on one GPU; 0 where no model is known."""
    predictor: StepPredictor | None = None
    """None where steps have no price: in the replay of logs."""


class About(NamedTuple):
    """What users are told of a policy, a line each."""

    batching: str = ""
    """What it does."""
    copies: str = ""
    """The engine and versions, or the paper, whose decisions it takes."""
    proof: str = ""
    """What shows that it takes them."""
    note: str = ""
    """What else one must know to use it."""


class Axes(NamedTuple):
    """Where a policy stands in the grid of all schedulers: on each axis on which they differ, in a few words."""

    batch: str
    """Who may join and leave, and when."""
    step: str
    """What a step consists of."""
    order: str
    """Who comes first in it."""
    kv_admission: str
    """KV that must be free for an admission."""
    preemption: str
    """What happens when KV runs out."""
    victim: str
    """Who that happens to, and where they go."""
    head_of_line: str
    """What happens when the next one does not fit."""
    prefill_pacing: str
    """When admissions are held back although there is room."""
    queue_order: str
    """Who is next."""
    limits: str
    """Units of the limits of a step."""


class Policy(ABC):
    """Decides each iteration. One instance serves one engine for one run."""

    Options: ClassVar[type[EngineOptions]]
    about: ClassVar[About] = About()
    own_axes: ClassVar[Axes | None] = None
    """Its place in the grid with default options, where no preset says it."""
    max_in_flight: int = 1
    """Batches that may be planned before the oldest one's results are processed."""
    follows_arrival_order: bool = True
    """Whether an earlier arrival is never admitted first after a later one (a law reads this)."""
    reads_clock: bool = False
    """Whether decisions depend on how long steps take: cheaper steps may then end later (a law reads this)."""
    streams_answers: bool = True
    """Whether clients get tokens as they come; False: the whole answer when the request is released."""
    num_stages: int = 1
    """Pipeline stages that a batch passes through."""
    runs_in_passes: bool = False
    """Whether an iteration runs as several passes, one after the other: the shapes of its steps are `PassesShape`s."""
    may_swap: bool = False
    """Whether steps may move blocks between GPU and host memory."""
    deadlines: QueueOrder | None = None
    """Its waiting queue, where that `drops_late`: the engine turns away who is not admitted when it says."""
    longest_overrun: int = 0
    """Tokens that an answer may go beyond `max_model_len`, where the engine ends it late or not (a law reads this)."""

    @classmethod
    def axes(cls) -> Axes | None:
        """Its place in the grid with default options; None for a policy that does not say."""
        return cls.own_axes

    @classmethod
    @abstractmethod
    def build(cls, options: EngineOptions, limits: EngineLimits) -> Policy:
        """A fresh policy with an empty KV cache. `options` is an instance of `cls.Options`."""

    @abstractmethod
    def never_fits(self, request: Request) -> str | None:
        """Why this request could not run even alone on an empty engine, or None. Pure.

        The reason is a sentence for the user that names the limit and its value.
        """

    @abstractmethod
    def add(self, request: Request) -> None:
        """Put a request at its place in the waiting queue. Mutates the queue and the request.

        Cuts `request.num_target_tokens` where the engine's own limits end the answer earlier.
        """

    @abstractmethod
    def cancel(self, request: Request) -> bool:
        """Drop a request wherever it is; False when it must stay (the batch it is in cannot let go of it).

        On True its KV is free at once, even when a step with it is in flight: its result is ignored when
        it comes. On False it keeps its KV until `update` names it in `released`. Never called for a request
        that is over.
        """

    @abstractmethod
    def plan(self, now_ns: int) -> Step:
        """Decide one batch and advance the counters of its members. An empty step is a valid answer.

        `now_ns` is the time of planning; only policies with a rule that reads the clock look at it.
        """

    @abstractmethod
    def update(self, step: Step) -> Finished:
        """Take in the results of the oldest step in flight: tokens exist, requests end, their KV is freed."""

    @abstractmethod
    def batch(self, step: Step) -> list[tuple[Request, int]]:
        """`(request, tokens)` of the step just planned, in batch order. O(batch), for logs and tests only."""

    @abstractmethod
    def running(self) -> list[Request]:
        """Members of the running batch in the engine's own order. O(batch), for logs and tests only."""

    @abstractmethod
    def waiting(self) -> list[Request]:
        """The waiting queue, head first. O(queue), for logs and tests only."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Requests in the engine: waiting, running or finished but not yet released."""

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """Length of the waiting queue."""

    @property
    @abstractmethod
    def free_blocks(self) -> int:
        """KV blocks that nobody holds."""

    @property
    @abstractmethod
    def usable_blocks(self) -> int:
        """KV blocks that requests can hold at most."""

    def share_queue(self, other: Policy) -> bool:
        """Wait for requests in the queue of `other` from now on. Both are fresh, and alike but for what they run on.

        Whatever one of them adds, both may admit, and both count as waiting. False, and nothing changed, where a
        policy or its queue order cannot be one of several.
        """
        return False

    def steady_run(self, min_steps: int, max_steps: int) -> SteadyRun | None:
        """The next plans, at most `max_steps`, if all they do for certain is to let the same requests decode. Pure.

        Certain means: whatever the results of steps in flight, provided that nothing arrives and nobody
        leaves. None when they are fewer than `min_steps`, or where a policy does not look ahead.
        """
        return None

    def advance_steady(self, num_steps: int) -> None:
        """Do what `num_steps` pairs of plan and update would do, within what `steady_run` has just promised.

        Called with nothing in flight but what is completed before its last step ends.
        """
        raise InvariantError(f"{type(self).__name__} promises no steady steps")

    def wake_ns(self) -> int | None:
        """When an empty step should be tried again although nothing arrives; None: only on an event."""
        return None

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise InvariantError if queue, batch and KV contradict each other. For tests."""


POLICIES: Registry[Policy] = Registry(
    "policy",
    "sim.policies.base:Policy",
    {
        "vllm-v1": "sim.policies.vllm_v1:VllmV1",
        "vllm-v0": "sim.policies.vllm_v0:VllmV0",
        "sarathi": "sim.policies.sarathi:Sarathi",
        "sarathi-vllm": "sim.policies.sarathi:SarathiVllm",
        "sarathi-orca": "sim.policies.sarathi:SarathiOrca",
        "sarathi-faster-transformer": "sim.policies.sarathi:SarathiFasterTransformer",
        "sarathi-simple-chunking": "sim.policies.sarathi:SarathiSimpleChunking",
        "orca": "sim.policies.orca:Orca",
        "static": "sim.policies.static:StaticBatching",
        "vtc": "sim.policies.vtc:Vtc",
        "fastserve": "sim.policies.fastserve:FastServe",
    },
)
