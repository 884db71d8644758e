"""Groups of operators of the roofline: their compute and memory times, for one iteration or for many."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.model import Experts
from sim.step import StepArrays

Times = NDArray[np.floating[Any]]


class Gemm(NamedTuple):
    """A group of matrix products over n rows: max(n · compute_ns, weights_ns + n · rows_ns)."""

    compute_ns: float
    weights_ns: float
    rows_ns: float

    def ns(self, num_rows: int) -> float:
        """Time of the group in one iteration."""
        return max(num_rows * self.compute_ns, self.weights_ns + num_rows * self.rows_ns)


def sides(gemm: Gemm, num_rows: NDArray[np.int64], runs: NDArray[np.bool_] | bool = True) -> tuple[Times, Times]:
    """Compute and memory time of a group for many iterations, ns; `runs` says which of them have it at all."""
    return num_rows * gemm.compute_ns, np.where(runs, gemm.weights_ns + num_rows * gemm.rows_ns, 0.0)


class RoutedGemm(NamedTuple):
    """The products of experts: every token passes some of them, and those that any token passes are read.

    A batch of T tokens touches E - E·missed^T of E experts (see `Experts.missed`). All rows of all experts
    are one group, as in vLLM's fused kernel.
    """

    num_experts: int
    missed: float
    compute_ns: float
    """Of one token in all of its experts, as `rows_ns`."""
    weights_ns: float
    """Of one expert."""
    rows_ns: float

    @classmethod
    def of(cls, experts: Experts, gemm: Gemm) -> RoutedGemm:
        """From the group of one expert."""
        times = experts.num_experts_per_tok
        return cls(experts.num_experts, experts.missed, times * gemm.compute_ns, gemm.weights_ns, times * gemm.rows_ns)

    def ns(self, num_tokens: int) -> float:
        """Time of the group in one iteration."""
        touched = self.num_experts - self.num_experts * self.missed**num_tokens
        return max(num_tokens * self.compute_ns, touched * self.weights_ns + num_tokens * self.rows_ns)

    def sides(self, num_tokens: NDArray[np.int64]) -> tuple[Times, Times]:
        """Compute and memory time for many iterations, ns."""
        touched = self.num_experts - self.num_experts * self.missed**num_tokens
        return num_tokens * self.compute_ns, touched * self.weights_ns + num_tokens * self.rows_ns


class Window(NamedTuple):
    """Attention in the layers that see only the last `num_tokens` tokens.

    Exact for prefills. For decodes only sums of contexts are known: the sum of min(context, window) is
    counted as the smaller of the sum of contexts and of as many windows as there are decodes, which is
    exact while all contexts are on one side of the window and never too low.
    """

    num_tokens: int
    pair_ns: float
    kv_token_ns: float

    @property
    def decode_kv_token_ns(self) -> float:
        """Per token that a decode attends to."""
        return max(self.pair_ns, self.kv_token_ns)

    def prefill_ns(self, prefills: tuple[tuple[int, int], ...]) -> float:
        """Time of the prefill chunks of one iteration."""
        window, pairs, kv_tokens = self.num_tokens, 0, 0
        for num_tokens, context in prefills:
            # the first queries still see everything before them
            num_growing = min(max(window - context, 0), num_tokens)
            pairs += num_growing * (2 * context + num_growing + 1) // 2 + (num_tokens - num_growing) * window
            kv_tokens += min(context, window - 1) + num_tokens
        return max(pairs * self.pair_ns, kv_tokens * self.kv_token_ns)

    def sides(self, steps: StepArrays) -> list[tuple[Times, Times]]:
        """Compute and memory times of prefills and of decodes for many iterations, ns."""
        window, num_tokens, context = self.num_tokens, steps.prefill_num_tokens, steps.prefill_context
        num_growing = np.minimum(np.maximum(window - context, 0), num_tokens)
        chunk_pairs = num_growing * (2 * context + num_growing + 1) // 2 + (num_tokens - num_growing) * window
        pairs, kv_tokens = (np.zeros(len(steps.num_decode), dtype=np.int64) for _ in range(2))
        np.add.at(pairs, steps.prefill_iteration, chunk_pairs)
        np.add.at(kv_tokens, steps.prefill_iteration, np.minimum(context, window - 1) + num_tokens)
        decode = np.minimum(steps.decode_context_sum + steps.num_decode, steps.num_decode * window)
        return [
            (pairs * self.pair_ns, kv_tokens * self.kv_token_ns),
            (decode * self.pair_ns, decode * self.kv_token_ns),
        ]
