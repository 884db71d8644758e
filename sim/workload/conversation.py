"""Conversations: requests whose prompts quote all that was said before."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from sim.errors import ScenarioError
from sim.options import Options
from sim.workload.base import Ints
from sim.workload.fields import DurationField, LengthField

MAX_TURNS = 10_000
"""A longer conversation is taken for a mistake: each of its prompts is made from all turns before it."""


class Conversation(Options):
    """Turns that follow one another, in place of single requests.

    The prompt of a turn is everything said before it, prompts and answers, and its own new tokens, whose
    number the class's prompt lengths give. Arrivals start conversations; each later turn is sent when its
    client has read the whole answer before it and thought. Answers are quoted as they were drawn, so a
    conversation ends early when a turn is refused, its client leaves, or `max_model_len` cuts its answer;
    the turns that it still had never arrive.
    """

    turns: LengthField = Field(description=f"turns of a conversation, 1 to {MAX_TURNS:,}")
    think_time_s: DurationField = Field(description="from an answer to the conversation's next turn, seconds")


def check_turns(num_turns: Ints) -> Ints:
    """The same numbers, unless one is too large for a conversation: then ScenarioError."""
    longest = int(num_turns.max(initial=0))
    if longest > MAX_TURNS:
        raise ScenarioError("", f"a conversation of {longest} turns", valid=f"it may have 1 to {MAX_TURNS}")
    return num_turns


def whole_prompts(new_tokens: Ints, answer_tokens: Ints, turn: Ints) -> Ints:
    """Prompt lengths of turns, each with all that was said before it.

    Columns have one entry per turn, conversation by conversation; `turn` counts from 0 in each.
    """
    before = np.cumsum(new_tokens + answer_tokens) - new_tokens - answer_tokens
    first = np.arange(len(turn)) - turn
    prompt_tokens: Ints = before - before[first] + new_tokens
    return prompt_tokens
