"""Admission for latency: fewer requests than memory would hold, so that those who run keep their pace.

The more requests decode together, and the longer their contexts, the longer a step takes. Engines admit while
slots and KV last; this rule also asks the scenario's own cost model, host time included, what the next step would
take with the candidate in it, and holds the candidate back where that is more than a target. A smaller
`max_num_seqs`, found by hand, does the same for one length of contexts.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from sim.errors import ScenarioError
from sim.options import CountOrZero, Positive
from sim.policies.grid.pacing import Interval, Pacing, PacingOptions, Situation
from sim.step import longer


class PredictedItlOptions(PacingOptions):
    """A target, and how far ahead it must hold."""

    kind: Literal["predicted_itl"] = Field(
        description="admit while steps in which all decode are predicted to stay within a target"
    )
    max_itl_ms: Positive = Field(description="longest step that only decodes, host time included, ms")
    lookahead_tokens: CountOrZero = Field(
        default=0, description="count every context so many tokens longer: answers grow after they are admitted"
    )


class PredictedItl(Pacing):
    """Open while the step of decodes that would follow is predicted to take no longer than `max_itl_ms`.

    In that step everybody who runs decodes, those still in their prefill and the candidate included, each at the
    context that it will have then. Nobody runs: open, whatever the prediction, so that no target stops an engine.
    Afterwards contexts grow, and nobody is sent back for that: the target holds for as long as no context has
    grown by more than `lookahead_tokens`.

    Steps that also carry prompts do not count, although those who decode wait for them. Holding a request back does
    not spare its prefill, which disturbs whoever runs then instead; how long such a step may get is the matter of the
    token budget of a step (and of every_n_steps how often it comes).
    """

    Options = PredictedItlOptions
    reads_batch = True

    def __init__(self, options: PredictedItlOptions, interval_ns: Interval) -> None:
        self._max_itl_ns = round(options.max_itl_ms * 1e6)
        self._lookahead_tokens = options.lookahead_tokens
        self._interval_ns = interval_ns

    @classmethod
    def build(cls, options: PacingOptions, interval_ns: Interval | None = None) -> Self:
        assert isinstance(options, PredictedItlOptions)
        if interval_ns is None:
            raise ScenarioError(
                "engine.prefill_pacing",
                "predicted_itl asks a cost model what steps will take, and the replay of a log has none",
                remedy="Choose another rule, or simulate a scenario.",
            )
        return cls(options, interval_ns)

    def opens(self, situation: Situation) -> bool:
        decodes = situation.next_decodes
        if decodes is None or decodes.num_decode == 1:
            return True
        return self._interval_ns(longer(decodes, self._lookahead_tokens)) <= self._max_itl_ns
