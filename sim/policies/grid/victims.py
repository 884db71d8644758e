"""Who is preempted when KV runs out, and where they wait then: two axes of memory pressure.

A rule other than the engine's own chooses among all who run, the one who needs the block included. A victim
that was already given its tokens in the step at hand is taken out of it again: its tokens go back to the
budget and its blocks to the pool, as under vLLM V1's priority scheduling. Ties go to the last in the order
in which the engine keeps those who run.

Two requests that drive each other out before either has yielded a token would do so for ever. The rules
exclude it: what they go by stays as it is while nobody gets a token (arrivals, priorities, answers so far),
so that somebody is never chosen; or they choose only among those who have yielded a token since they were
admitted (`most_blocks`, `itself`), and the last of those who run where nobody has.

Sources: SGLang `retract_decode` (`fewest_outputs`); vLLM V1 under `--scheduling-policy priority`
(`lowest_priority`); TensorRT-LLM MAX_UTILIZATION, LightLLM and LMDeploy preempt from the end as vLLM does.
SGLang's and DeepSpeed-FastGen's victims wait at the tail, vLLM's at the front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from sim.errors import ScenarioError
from sim.queues.base import QueueOrder
from sim.request import Request

VictimRule = Literal["own", "newest", "oldest", "fewest_outputs", "most_blocks", "lowest_priority", "itself"]
VictimPlace = Literal["front", "tail", "arrival_order"]

VICTIM_HELP = (
    "whom to preempt when KV runs out: own (the engine's rule), newest or oldest arrival, fewest_outputs (SGLang), "
    "most_blocks, lowest_priority (largest number), itself (who needs the block)"
)
PLACE_HELP = "where a recomputed victim waits under queue_order fcfs: front, tail or arrival_order"


class Standing(NamedTuple):
    """What a rule may look at, of one of those who run."""

    request: Request
    num_output_tokens: int
    """Of its answer so far, those before earlier preemptions included."""
    num_blocks: int
    has_yielded: bool
    """Whether a token of its answer came since it was admitted."""
    is_requester: bool
    """Whether it is the one who needs the block."""


def _newest(standing: Standing) -> tuple[Any, ...]:
    """Who arrived last, whenever it was admitted: the wait of the others is not made longer by it."""
    return standing.request.queued_ns, standing.request.index


def _oldest(standing: Standing) -> tuple[Any, ...]:
    """Who arrived first: what a scheduler without order does at worst."""
    return -standing.request.queued_ns, -standing.request.index


def _fewest_outputs(standing: Standing) -> tuple[Any, ...]:
    """Whose answer is shortest so far, and of these the longest prompt: who has streamed most goes on."""
    return -standing.num_output_tokens, standing.request.prompt_tokens


def _most_blocks(standing: Standing) -> tuple[Any, ...]:
    """Who holds most KV, so that few preemptions are needed; blocks that it shares are counted, but do not get free."""
    return standing.has_yielded, standing.num_blocks if standing.has_yielded else 0


def _lowest_priority(standing: Standing) -> tuple[Any, ...]:
    """The largest `priority` of the traffic's classes, and of these the latest arrival."""
    return standing.request.priority, standing.request.queued_ns, standing.request.index


def _itself(standing: Standing) -> tuple[Any, ...]:
    """Who needs the block, so that nobody loses KV for somebody else."""
    return (standing.is_requester and standing.has_yielded,)


RULES: dict[str, Callable[[Standing], tuple[Any, ...]]] = {
    "newest": _newest,
    "oldest": _oldest,
    "fewest_outputs": _fewest_outputs,
    "most_blocks": _most_blocks,
    "lowest_priority": _lowest_priority,
    "itself": _itself,
}
"""Rule -> key of one who runs: the largest key is the victim. `own` is the engine's matter."""


def choose(rule: VictimRule, running: Iterable[Standing]) -> Request:
    """The victim among those who run (at least one, in the engine's order). `rule` is not `own`. Pure."""
    key = RULES[rule]
    return max(reversed(list(running)), key=key).request


def put_back(queue: QueueOrder, victim: Request, place: VictimPlace, now_ns: int) -> None:
    """A victim waits again, at its place. Mutates the queue, which is fcfs unless `place` is `front`.

    `arrival_order`: behind those who arrived before it, that is before all but earlier victims.
    """
    if place == "tail":
        queue.add(victim, now_ns)
        return
    earlier: list[Request] = []
    if place == "arrival_order":
        earlier = list(takewhile(lambda r: (r.queued_ns, r.index) < (victim.queued_ns, victim.index), queue))
    queue.put_back(victim, now_ns)
    for request in reversed(earlier):
        queue.remove(request)
        queue.put_back(request, now_ns)


def refuse_pointless(victim: VictimRule, place: VictimPlace, preemption: str, queue_order: str) -> None:
    """Raise ScenarioError where a rule for victims would have nothing to say. `queue_order`: its kind."""
    if victim != "own" and preemption == "pause":
        raise ScenarioError(
            "engine.victim",
            "has no meaning with preemption 'pause'",
            valid="who finds no block sits out with its KV; the last one is recomputed when nobody could run otherwise",
            remedy="Leave victim out, or choose recompute, swap or reject.",
        )
    if place == "front":
        return
    if preemption != "recompute":
        raise ScenarioError(
            "engine.victim_goes_to",
            f"has no meaning with preemption {preemption!r}",
            valid="only victims that are recomputed wait in the queue",
            remedy="Leave victim_goes_to out, or choose recompute.",
        )
    if queue_order != "fcfs":
        raise ScenarioError(
            "engine.victim_goes_to",
            f"contradicts queue_order {queue_order!r}, which places a victim by its own key or account",
            valid="places to choose from: those of fcfs",
            remedy="Leave one of them out.",
        )
