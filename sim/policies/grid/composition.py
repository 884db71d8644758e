"""Which phases a step has, and in which order: the axis of step composition.

Sources: Sarathi-Serve's five schedulers and vLLM V0's `_schedule_default`; Orca's paper for whole prompts
beside decodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.policies.grid.draft import Draft
    from sim.policies.grid.engine import GridPolicy


class Composition(ABC):
    """Fills a step by asking the engine for its phases."""

    wants_another_try = False
    """Whether the next plan may find something to compute although the last one found nothing."""

    @abstractmethod
    def fill(self, engine: GridPolicy, draft: Draft) -> None:
        """Plan one step. Mutates the engine and the draft."""


class DecodesFirst(Composition):
    """Everybody who decodes, then ongoing prefills, then new ones, in one step. Chunked or with whole prompts."""

    def fill(self, engine: GridPolicy, draft: Draft) -> None:
        engine.members.sort()
        engine.decode(draft)
        engine.continue_prefills(draft)
        if not draft.preempted:
            engine.swap_in(draft)
        if not engine.num_swapped:
            engine.admit(draft)


class PrefillFirst(Composition):
    """A step prefills or decodes, and prefills as long as it can: those who decode stall meanwhile."""

    def __init__(self, *, ends_on_drop: bool = False) -> None:
        """`ends_on_drop`: a step whose admission only dropped requests does not decode either."""
        self._ends_on_drop = ends_on_drop

    def fill(self, engine: GridPolicy, draft: Draft) -> None:
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

    def before_decodes(self, engine: GridPolicy, draft: Draft) -> None:
        """Room for an engine that makes some leave first."""


class ClosedBatch(Composition):
    """Nobody joins until everybody who runs is done. Members that finish drop out of the computation."""

    def fill(self, engine: GridPolicy, draft: Draft) -> None:
        if not engine.members and not engine.num_swapped:
            engine.admit(draft)
            return
        engine.members.sort()
        engine.continue_prefills(draft)
        engine.decode(draft)
        if not draft.preempted:
            engine.swap_in(draft)


class Alternating(Composition):
    """A step of prefills, then one of decodes. A turn that finds nothing to prefill decodes at once."""

    def __init__(self) -> None:
        self.is_prefill_turn = True
        """Whose turn the next step is."""

    def fill(self, engine: GridPolicy, draft: Draft) -> None:
        engine.members.sort()
        self.wants_another_try = not self.is_prefill_turn
        if self.is_prefill_turn:
            engine.continue_prefills(draft)
            if not draft.chunks and not engine.num_swapped:
                engine.admit(draft)
            if draft.chunks or draft.dropped:
                self.is_prefill_turn = False
                return
        engine.decode(draft)
        if not draft.preempted:
            engine.swap_in(draft)
        self.is_prefill_turn = True
