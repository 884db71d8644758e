"""What happens when the next one does not fit: the axis of the head of the line.

`stop`: nobody passes it, so that it is admitted as soon as it fits. `skip`: those behind it are tried in their
order, so that what it cannot use is used. A large request may then starve for as long as small ones keep
coming. In a step that preempts nobody is passed, or newcomers would take what a victim just gave up.

Sources: all engines of the grid stop. TensorRT-LLM's `beneficial to skip` and old versions of vLLM V1 without
chunked prefill pass a request for reasons of their own.
"""

from __future__ import annotations

from typing import Literal

from sim.errors import ScenarioError
from sim.step import BlockedBy

HeadOfLine = Literal["stop", "skip"]
HEAD_OF_LINE_HELP = "when the next one does not fit: stop admitting, or skip it (large requests may then starve)"

MISFITS = (BlockedBy.KV, BlockedBy.BUDGET)
"""Reasons that may stop one request and not a smaller one."""


def refuse_skipping(head_of_line: HeadOfLine, queue_order: str) -> None:
    """Raise ScenarioError where a queue has no line of which somebody could be passed. `queue_order`: its kind."""
    if head_of_line == "skip" and queue_order != "fcfs":
        raise ScenarioError(
            "engine.head_of_line",
            f"'skip' contradicts queue_order {queue_order!r}",
            valid="such an order says who is next, by keys or accounts that an admission changes; fcfs keeps a line",
            remedy="Leave one of them out.",
        )
