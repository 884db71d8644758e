"""What happens to those who run when a decode finds no free block: the axis of memory pressure.

`recompute`: a victim gives up its KV and waits; its prompt and its answer so far are prefilled again.
`swap`: a victim's KV moves to host memory and comes back later; both ways are paid for on PCIe.
`pause`: whoever finds no block sits out, its KV idle, until somebody leaves; the last one is recomputed when
nobody could run otherwise. `reject`: a victim is given up, and what was computed for it is lost. What
admission must find free decides how often any of this happens; a full reservation avoids it.

Victims stand last among those who were not yet looked at in the step, or are the requester itself.

Sources: vLLM V0 `_preempt_by_recompute` and `_preempt_by_swap`; DeepSpeed-FastGen skips a decode without a
block (`pause`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sim.errors import ScenarioError
from sim.request import Request, Status
from sim.step import Preemption

if TYPE_CHECKING:
    from sim.policies.grid.draft import Draft, GridState
    from sim.policies.grid.phases import Phases

PressureKind = Literal["recompute", "swap", "pause", "reject"]


def relieve(engine: Phases, victim: Request, beneficiary: Request, draft: Draft) -> None:
    """Make room by the engine's rule: `victim` does not run in this step. Mutates both and the pool."""
    RULES[engine.pressure](engine, victim, beneficiary, draft)


def recompute(engine: Phases, victim: Request, beneficiary: Request, draft: Draft) -> None:
    """Give up the victim's KV; it waits again and keeps its answer so far."""
    state: GridState = victim.policy_state
    state.stale_tokens = state.num_to_prefill if state.is_decoding else victim.num_computed_tokens
    engine.unseat(victim)
    draft.preempted.append(Preemption(victim, beneficiary, victim.num_computed_tokens))
    engine.release(victim)
    victim.num_computed_tokens = 0
    victim.status = Status.PREEMPTED
    state.is_decoding = False
    state.epoch += 1
    engine.requeue(victim, draft)


def swap(engine: Phases, victim: Request, beneficiary: Request, draft: Draft) -> None:
    """Move the victim's blocks to host memory. Raises ScenarioError when they do not fit there, as vLLM ends then."""
    engine.unseat(victim)
    num_blocks = victim.num_blocks
    if engine.touched_blocks(victim) > engine.free_cpu_blocks:
        raise ScenarioError(
            "engine.num_cpu_blocks",
            f"the {engine.num_cpu_blocks} blocks of host memory do not hold what is swapped out",
            valid="the engine would end here",
            remedy="Raise it, or choose another rule for preemption.",
        )
    engine.kv.free(victim)
    engine.free_cpu_blocks -= num_blocks
    victim.policy_state.num_cpu_blocks = num_blocks
    victim.status = Status.PREEMPTED
    draft.preempted.append(Preemption(victim, beneficiary, 0))
    draft.swapped_out.append(victim)
    draft.num_swapped_blocks += num_blocks


def reject(engine: Phases, victim: Request, beneficiary: Request, draft: Draft) -> None:
    """Give up the victim for good."""
    if victim in engine.members.lanes[draft.lane] and victim not in engine.members.joined[draft.lane]:
        draft.left.append(victim)
    engine.unseat(victim)
    draft.dropped.append(victim)
    engine.end(victim)


RULES = {"recompute": recompute, "swap": swap, "reject": reject}
"""Rules that choose a victim. `pause` chooses none."""
