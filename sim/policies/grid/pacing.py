"""When waiting requests may be admitted although there is room: the axis of admission pacing.

Each rule is asked before every candidate. `always` is most engines; the others trade time to first token
for longer stretches in which those who decode are not disturbed, and for larger prefills.

Sources: vLLM V0 `scheduler_delay_factor` (`delay_factor`); vLLM V1 `prefill_schedule_interval`, LightLLM
without aggressive scheduling, LMDeploy `prefill_interval` (`every_n_steps`); SGLang's prefill delayer
(`min_batch`); a bound on prefills in a row (`max_consecutive`, proposed for SGLang); TGI
`waiting_served_ratio` and `max_waiting_tokens` (`waiting_served_ratio`). `predicted_itl` is a module of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from sim.errors import ScenarioError
from sim.options import Count, NonNegative, Options, Positive
from sim.policies.base import StepPredictor
from sim.registry import Registry
from sim.step import StepShape


class PacingOptions(Options):
    """Base of every rule's options."""

    kind: str = Field(description="name of a pacing rule")


class Situation(NamedTuple):
    """What a rule may look at."""

    now_ns: int
    earliest_arrival_ns: int | None
    """Of those who wait; None when nobody does. Looked up only for rules that say they read the clock."""
    num_waiting: int
    num_running: int
    num_decoding: int
    num_admitted: int
    """In the step at hand."""
    next_decodes: StepShape | None = None
    """The step after the one at hand if it were one of decodes only, of all who run, those admitted in the step at
    hand and the next candidate, at the contexts that they will have then. None when nobody waits. Made only for rules
    that say they read the batch."""


Interval = Callable[[StepShape], int]
"""What passes from one step to the next when both have this shape, ns."""


class Pacing(ABC):
    """One rule with its memory of past steps."""

    Options: ClassVar[type[PacingOptions]]
    reads_clock: ClassVar[bool] = False
    """Whether the answer depends on the time."""
    reads_batch: ClassVar[bool] = False
    """Whether the answer depends on the contexts of all who run, and on what steps are predicted to take."""
    is_steady: ClassVar[bool] = False
    """Whether the answer stays the same over steps in which nobody comes, goes or is admitted."""
    must_be_asked = False
    """Whether the rule notes something the next time that it is asked, although nobody waits."""

    @classmethod
    @abstractmethod
    def build(cls, options: PacingOptions, interval_ns: Interval | None = None) -> Self:
        """A rule that has seen nothing yet. `options` is an instance of `cls.Options`.

        `interval_ns`: what steps are predicted to take; None where nothing is known of that. Raises ScenarioError
        where the rule needs it.
        """

    @abstractmethod
    def opens(self, situation: Situation) -> bool:
        """Whether one more request may be admitted now. May note that it was asked."""

    def planned(self, num_admitted: int, num_waiting: int, num_steps: int = 1) -> None:  # noqa: B027  # some rules remember nothing
        """So many steps were planned in which so many were admitted and so many stay behind. Mutates the memory."""


class AlwaysOptions(PacingOptions):
    """Nothing to choose."""

    kind: Literal["always"] = Field(default="always", description="admit whenever there is room")


class Always(Pacing):
    """No pacing."""

    Options = AlwaysOptions
    is_steady = True

    @classmethod
    def build(cls, options: PacingOptions, interval_ns: Interval | None = None) -> Self:
        return cls()

    def opens(self, situation: Situation) -> bool:
        return True


class DelayFactorOptions(PacingOptions):
    """vLLM V0's rule."""

    kind: Literal["delay_factor"] = Field(description="wait in proportion to how long the last prompts took")
    factor: NonNegative = Field(description="times the latency of the last step with prompts")


class DelayFactor(Pacing):
    """Open when the earliest arrival has waited longer than `factor` × the last prompts' latency, or nobody runs.

    That latency is the time from the plan that admitted prompts to the next plan.
    """

    Options = DelayFactorOptions
    reads_clock = True

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._previous_ns = 0
        self._latency_ns = 0

    @classmethod
    def build(cls, options: PacingOptions, interval_ns: Interval | None = None) -> Self:
        assert isinstance(options, DelayFactorOptions)
        return cls(options.factor)

    def opens(self, situation: Situation) -> bool:
        now_ns, earliest_ns = situation.now_ns, situation.earliest_arrival_ns
        if self.must_be_asked:
            self._latency_ns = now_ns - self._previous_ns
        self._previous_ns, self.must_be_asked = now_ns, False
        if earliest_ns is None or not situation.num_running:
            return True
        return now_ns - earliest_ns > self._factor * self._latency_ns

    def planned(self, num_admitted: int, num_waiting: int, num_steps: int = 1) -> None:
        self.must_be_asked |= num_admitted > 0


class EveryNStepsOptions(PacingOptions):
    """A fixed interval."""

    kind: Literal["every_n_steps"] = Field(description="admit in one step of n while anybody decodes")
    n: Count = Field(description="steps from one that prefills to the next")


class EveryNSteps(Pacing):
    """Open in the n-th step after the last one that prefilled, and while nobody decodes."""

    Options = EveryNStepsOptions

    def __init__(self, n: int) -> None:
        self._n = n
        self._num_steps_since = n

    @classmethod
    def build(cls, options: PacingOptions, interval_ns: Interval | None = None) -> Self:
        assert isinstance(options, EveryNStepsOptions)
        return cls(options.n)

    def opens(self, situation: Situation) -> bool:
        return not situation.num_decoding or self._num_steps_since + 1 >= self._n

    def planned(self, num_admitted: int, num_waiting: int, num_steps: int = 1) -> None:
        self._num_steps_since = 0 if num_admitted else self._num_steps_since + num_steps


class MinBatchOptions(PacingOptions):
    """Company before a prefill."""

    kind: Literal["min_batch"] = Field(description="admit when enough requests wait, or after some steps")
    k: Count = Field(description="requests that must wait")
    max_wait_steps: Count = Field(description="steps after which fewer are enough")


class MinBatch(Pacing):
    """Open when k wait, when they have waited `max_wait_steps` steps, and while nobody decodes."""

    Options = MinBatchOptions

    def __init__(self, k: int, max_wait_steps: int) -> None:
        self._k, self._max_wait_steps = k, max_wait_steps
        self._num_waited = 0

    @classmethod
    def build(cls, options: PacingOptions, interval_ns: Interval | None = None) -> Self:
        assert isinstance(options, MinBatchOptions)
        return cls(options.k, options.max_wait_steps)

    def opens(self, situation: Situation) -> bool:
        if situation.num_admitted or not situation.num_decoding:
            return True
        return situation.num_waiting >= self._k or self._num_waited >= self._max_wait_steps

    def planned(self, num_admitted: int, num_waiting: int, num_steps: int = 1) -> None:
        self._num_waited = 0 if num_admitted or not num_waiting else self._num_waited + num_steps


class MaxConsecutiveOptions(PacingOptions):
    """A bound on stalls."""

    kind: Literal["max_consecutive"] = Field(description="a step without prefills after so many with them")
    n: Count = Field(description="steps with prefills in a row at most while anybody decodes")


class MaxConsecutive(Pacing):
    """Closed for a step after n steps in a row that prefilled while somebody decoded."""

    Options = MaxConsecutiveOptions

    def __init__(self, n: int) -> None:
        self._n = n
        self._num_in_a_row = 0

    @classmethod
    def build(cls, options: PacingOptions, interval_ns: Interval | None = None) -> Self:
        assert isinstance(options, MaxConsecutiveOptions)
        return cls(options.n)

    def opens(self, situation: Situation) -> bool:
        return not situation.num_decoding or self._num_in_a_row < self._n

    def planned(self, num_admitted: int, num_waiting: int, num_steps: int = 1) -> None:
        self._num_in_a_row = self._num_in_a_row + 1 if num_admitted else 0


class WaitingServedRatioOptions(PacingOptions):
    """TGI's rule."""

    kind: Literal["waiting_served_ratio"] = Field(description="admit when enough wait in proportion to those who run")
    ratio: Positive = Field(description="waiting requests per running one")
    max_steps: Count = Field(description="steps after which fewer are enough")


class WaitingServedRatio(Pacing):
    """Open when floor(ratio × running) requests wait, or `max_steps` steps after the last prefill."""

    Options = WaitingServedRatioOptions

    def __init__(self, ratio: float, max_steps: int) -> None:
        self._ratio, self._max_steps = ratio, max_steps
        self._num_steps_since = 0

    @classmethod
    def build(cls, options: PacingOptions, interval_ns: Interval | None = None) -> Self:
        assert isinstance(options, WaitingServedRatioOptions)
        return cls(options.ratio, options.max_steps)

    def opens(self, situation: Situation) -> bool:
        if situation.num_admitted or not situation.num_running or self._num_steps_since >= self._max_steps:
            return True
        return situation.num_waiting >= int(self._ratio * situation.num_running)

    def planned(self, num_admitted: int, num_waiting: int, num_steps: int = 1) -> None:
        self._num_steps_since = 0 if num_admitted else self._num_steps_since + num_steps


PACINGS: Registry[Pacing] = Registry(
    "pacing rule",
    "sim.policies.grid.pacing:Pacing",
    {
        "always": "sim.policies.grid.pacing:Always",
        "delay_factor": "sim.policies.grid.pacing:DelayFactor",
        "every_n_steps": "sim.policies.grid.pacing:EveryNSteps",
        "min_batch": "sim.policies.grid.pacing:MinBatch",
        "max_consecutive": "sim.policies.grid.pacing:MaxConsecutive",
        "waiting_served_ratio": "sim.policies.grid.pacing:WaitingServedRatio",
        "predicted_itl": "sim.policies.grid.predicted_itl:PredictedItl",
    },
)


PACING_MEANING = f"when waiting requests may be admitted although there is room: {', '.join(PACINGS)}"
"""What the option is called in every engine that has it."""


def build_pacing(
    options: PacingOptions, predictor: StepPredictor | None, *, plans_ahead: bool, num_stages: int
) -> Pacing:
    """The rule of an engine whose `prefill_pacing` says `options`. Raises ScenarioError at `engine.prefill_pacing`."""
    rule = PACINGS.load(options.kind, place="engine.prefill_pacing.kind")
    if rule.reads_batch and num_stages > 1:
        raise ScenarioError(
            "engine.prefill_pacing",
            f"{options.kind} predicts the step of one batch, and with {num_stages} pipeline stages there are several",
            remedy="Set pipeline_parallel_size: 1, or choose another rule.",
        )
    if predictor is None:
        return rule.build(options)
    return rule.build(options, lambda shape: predictor.interval_ns(shape, plans_ahead=plans_ahead))
