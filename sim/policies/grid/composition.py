"""Which phases a step has, and in which order: the axis of step composition.

Sources: Sarathi-Serve's five schedulers and vLLM V0's `_schedule_default`; Orca's paper for whole prompts
beside decodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from sim.step import BlockedBy

if TYPE_CHECKING:
    from sim.policies.grid.draft import Draft
    from sim.policies.grid.phases import Phases


StepComposition = Literal["decodes_first", "prefill_first", "alternating", "closed_batch"]


class Composition(ABC):
    """Fills a step by asking the engine for its phases."""

    kind: ClassVar[StepComposition | None] = None
    """Its name in scenarios; None where it belongs to one engine."""
    batch: ClassVar[str]
    """Who may join and leave, and when, in a few words."""
    step: ClassVar[str]
    """What a step consists of, in a few words."""
    order: ClassVar[str]
    """Who comes first in it, in a few words."""
    wants_another_try = False
    """Whether the next plan may find something to compute although the last one found nothing."""

    def is_one_decode(self, engine: Phases) -> bool:
        """Whether a step in which all who run decode and nobody waits is just that and leaves no other trace. Pure."""
        return True

    @abstractmethod
    def fill(self, engine: Phases, draft: Draft) -> None:
        """Plan one step. Mutates the engine and the draft."""

    def steady_obstacle(self, engine: Phases, draft: Draft) -> BlockedBy | None:
        """What keeps those who wait out of steps in which the same requests decode; None when that is not certain.

        `draft` has the decodes' tokens and is not changed. Pure.
        """
        if engine.num_swapped:
            return engine.steady_obstacle_to_return(draft)
        return engine.steady_obstacle(draft)


class DecodesFirst(Composition):
    """Everybody who decodes, then ongoing prefills, then new ones, in one step. Chunked or with whole prompts."""

    kind = "decodes_first"
    batch = "every step"
    step = "prefills and decodes"
    order = "decodes, ongoing prefills, new prefills"

    def fill(self, engine: Phases, draft: Draft) -> None:
        engine.members.sort()
        engine.decode(draft)
        engine.continue_prefills(draft)
        if not draft.preempted:
            engine.swap_in(draft)
        if not engine.num_swapped:
            engine.admit(draft)


class PrefillFirst(Composition):
    """A step prefills or decodes, and prefills as long as it can: those who decode stall meanwhile."""

    kind = "prefill_first"
    batch = "every step"
    step = "prefills or decodes"
    order = "prefills, then decodes"

    def __init__(self, *, ends_on_drop: bool = False) -> None:
        """`ends_on_drop`: a step whose admission only dropped requests does not decode either."""
        self._ends_on_drop = ends_on_drop

    def fill(self, engine: Phases, draft: Draft) -> None:
        engine.continue_prefills(draft)
        if not engine.num_swapped:
            engine.admit(draft)
        if draft.chunks or (self._ends_on_drop and draft.dropped):
            return
        self.before_decodes(engine, draft)
        num_forced_out = len(draft.preempted)
        engine.members.sort()
        engine.decode(draft)
        if len(draft.preempted) == num_forced_out:
            engine.swap_in(draft)

    def before_decodes(self, engine: Phases, draft: Draft) -> None:
        """Room for an engine that makes some leave first."""

    def steady_obstacle(self, engine: Phases, draft: Draft) -> BlockedBy | None:
        if engine.num_swapped:
            return engine.steady_obstacle_to_return(draft)
        return engine.steady_obstacle(replace(draft, num_tokens=0))


class ClosedBatch(Composition):
    """Nobody joins until everybody who runs is done. Members that finish drop out of the computation."""

    kind = "closed_batch"
    batch = "when all are done"
    step = "prefills or decodes"
    order = "one batch at a time"

    def fill(self, engine: Phases, draft: Draft) -> None:
        if not engine.members and not engine.num_swapped:
            engine.admit(draft)
            return
        engine.members.sort()
        engine.continue_prefills(draft)
        engine.decode(draft)
        if not draft.preempted:
            engine.swap_in(draft)
        if not engine.num_swapped:
            draft.blocked_by = BlockedBy.ADMISSION

    def steady_obstacle(self, engine: Phases, draft: Draft) -> BlockedBy | None:
        if engine.num_swapped:
            return engine.steady_obstacle_to_return(draft)
        return BlockedBy.ADMISSION if engine.num_waiting else BlockedBy.NOTHING


class Alternating(Composition):
    """A step of prefills, then one of decodes. A turn that finds nothing to prefill decodes at once."""

    kind = "alternating"
    batch = "every step"
    step = "prefills or decodes"
    order = "prefills and decodes take turns"

    def __init__(self) -> None:
        self.is_prefill_turn = True
        """Whose turn the next step is."""

    def is_one_decode(self, engine: Phases) -> bool:
        return self.is_prefill_turn and not self.wants_another_try

    def fill(self, engine: Phases, draft: Draft) -> None:
        engine.members.sort()
        was_prefill_turn = self.is_prefill_turn
        self.wants_another_try = False
        if was_prefill_turn:
            engine.continue_prefills(draft)
            if not draft.chunks and not engine.num_swapped:
                engine.admit(draft)
            if draft.chunks or draft.dropped:
                self.is_prefill_turn = False
                return
        engine.decode(draft)
        if not draft.preempted:
            engine.swap_in(draft)
        self.wants_another_try = not (was_prefill_turn or draft.decodes)
        self.is_prefill_turn = True

    def steady_obstacle(self, engine: Phases, draft: Draft) -> BlockedBy | None:
        if not self.is_prefill_turn:
            return None
        if engine.num_swapped:
            return engine.steady_obstacle_to_return(draft)
        return engine.steady_obstacle(replace(draft, num_tokens=0))


COMPOSITIONS: dict[StepComposition, type[Composition]] = {
    "decodes_first": DecodesFirst,
    "prefill_first": PrefillFirst,
    "alternating": Alternating,
    "closed_batch": ClosedBatch,
}
"""Those that every engine of the grid can be given."""


def chosen(kind: StepComposition | None, own: Composition) -> Composition:
    """The composition that a scenario asks for, or the engine's own: also where both have one name."""
    return own if kind is None or kind == own.kind else COMPOSITIONS[kind]()
