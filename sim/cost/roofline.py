"""Iteration time from first principles: FLOPs and bytes of every operator group against the GPU's peaks.

A group takes the longer of its compute and its memory time, each at a named part of the vendor's peak;
groups follow each other. No kernel of the user's own GPU was timed for it: it is for planning before
there is anything to measure. The default parts were read off published kernel timings of one H100-SXM
under vLLM 0.24 (AIConfigurator 0.12, NVIDIA, Apache-2.0); each option says which.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sim.cost.base import CostModel, CostOptions, Resource, Target, decode_contexts, prefill_sums, prefill_sums_of
from sim.options import NonNegative
from sim.step import StepArrays, StepShape

Efficiency = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
"""The part of a vendor's peak that real kernels reach."""


_Times = NDArray[np.floating[Any]]


class RooflineOptions(CostOptions):
    """Options of `kind: roofline`."""

    kind: Literal["roofline"] = "roofline"
    gemm_compute_efficiency: Efficiency = Field(
        default=0.80,
        description="matrix products, part of the bf16 peak "
        "(AIConfigurator H100 gemm: median 0.77 to 0.84 for m >= 512, n and k >= 4096)",
    )
    attention_compute_efficiency: Efficiency = Field(
        default=0.60,
        description="prefill attention, part of the bf16 peak "
        "(AIConfigurator H100 FlashAttention 3: 0.39 at 2k tokens, 0.53 at 4k, 0.61 at 8k, 0.67 at 16k)",
    )
    memory_efficiency: Efficiency = Field(
        default=0.83,
        description="reads of weights, KV and activations, part of the memory bandwidth "
        "(AIConfigurator H100 gemm: median 0.80 to 0.84 for m <= 128; "
        "decode attention: 0.67 to 0.93 from 32 rows of 1k)",
    )
    allreduce_efficiency: Efficiency = Field(
        default=0.55,
        description="tensor-parallel all-reduce, part of the link's rate in one direction "
        "(AIConfigurator H100 custom all-reduce: 0.41 to 0.73 for 8 to 34 MB on 2 to 8 GPUs)",
    )
    allreduce_latency_us: NonNegative = Field(
        default=5.0,
        description="each all-reduce, two per layer, µs "
        "(AIConfigurator H100 custom all-reduce in a CUDA graph: 4.2 to 5.6)",
    )
    layer_overhead_us: NonNegative = Field(
        default=20.0,
        description="each layer whatever its size, µs (AIConfigurator H100: 11.6 for the shortest decode attention, "
        "and its constant 3 for each of three small memory-bound kernels)",
    )
    step_overhead_us: NonNegative = Field(
        default=200.0, description="device side of sampling and copying token ids, each iteration, µs (an assumption)"
    )
    host_us: NonNegative = Field(
        default=300.0,
        description="host time to prepare an iteration, µs (Vidur's CPU timings on A100: 290 to 330 for 8 to 16 rows)",
    )
    host_us_per_request: NonNegative = Field(
        default=15.0,
        description="host time for each request in the iteration, µs "
        "(the scheduler of vLLM 0.33 took 14 to 18 on a slow cloud CPU; a server's is likely faster)",
    )


class _Gemm(NamedTuple):
    """A group of matrix products over n rows: max(n · compute_ns, weights_ns + n · rows_ns)."""

    compute_ns: float
    weights_ns: float
    rows_ns: float


class Roofline(CostModel):
    """Dense and GQA decoders, 16-bit weights, tensor parallel within one server."""

    Options = RooflineOptions

    def __init__(self, options: RooflineOptions, target: Target) -> None:
        self._memory_ns = 1e9 / (target.gpu.bandwidth_bytes_per_s * options.memory_efficiency)
        self._compute_ns = 1e9 / (target.gpu.bf16_flops * options.gemm_compute_efficiency)
        self._set_gemms(target)
        self._set_attention(target, 1e9 / (target.gpu.bf16_flops * options.attention_compute_efficiency))
        self._set_communication(options, target)
        layers = target.model.num_hidden_layers
        self._overhead_ns = options.step_overhead_us * 1e3 + layers * options.layer_overhead_us * 1e3
        self._fixed_ns = self._overhead_ns + self._allreduce_fixed_ns
        self._token_ns = self._elementwise_token_ns + self._allreduce_token_ns
        self._host_ns = options.host_us * 1e3
        self._host_request_ns = options.host_us_per_request * 1e3

    @classmethod
    def build(cls, options: CostOptions, target: Target) -> Roofline:
        """Raises ScenarioError when the model's heads cannot be split over the GPUs."""
        target.model.check_tensor_parallel(target.tensor_parallel)
        return cls(cast(RooflineOptions, options), target)

    def price(self, shape: StepShape) -> int:
        """The sum of the groups, rounded to ns; at least 1."""
        num_decode = shape.num_decode
        ns = self._context_free_ns(num_decode, shape.prefills, shape.num_sampled)
        ns += (shape.decode_context_sum + num_decode) * self._decode_kv_token_ns
        return int(ns + 0.5) or 1

    def price_decode_run(self, shape: StepShape, num_steps: int) -> NDArray[np.int64]:
        """As `price`: while the batch decodes on, only the KV that it reads grows."""
        num_decode = shape.num_decode
        ns = self._context_free_ns(num_decode, (), shape.num_sampled)
        run = ns + (decode_contexts(shape, num_steps) + num_decode) * self._decode_kv_token_ns
        return np.maximum((run + 0.5).astype(np.int64), 1)

    def host_ns(self, shape: StepShape) -> int:
        """Fixed part and a part per request."""
        num_requests = shape.num_decode + len(shape.prefills)
        return int(self._host_ns + num_requests * self._host_request_ns + 0.5)

    def breakdown(self, steps: StepArrays) -> dict[Resource, NDArray[np.float64]]:
        """Each group under the resource that bounds it in that iteration."""
        prefill_tokens, pairs, kv_tokens = prefill_sums_of(steps)
        num_tokens = steps.num_decode + prefill_tokens
        compute, bandwidth = np.zeros(len(num_tokens)), num_tokens * self._elementwise_token_ns
        groups = [_sides(gemm, num_tokens) for gemm in self._layer_gemms]
        arithmetic, memory = _sides(self._lm_head, steps.num_sampled)
        groups.append((arithmetic, np.where(steps.num_sampled > 0, memory, 0.0)))
        groups.append((pairs * self._pair_ns, kv_tokens * self._kv_token_ns))
        decode_kv_tokens = steps.decode_context_sum + steps.num_decode
        groups.append((decode_kv_tokens * self._pair_ns, decode_kv_tokens * self._kv_token_ns))
        for arithmetic, memory in groups:
            compute += np.where(arithmetic > memory, arithmetic, 0.0)
            bandwidth += np.where(arithmetic > memory, 0.0, memory)
        return {
            Resource.COMPUTE: compute,
            Resource.BANDWIDTH: bandwidth,
            Resource.COMMUNICATION: self._allreduce_fixed_ns + num_tokens * self._allreduce_token_ns,
            Resource.OVERHEAD: np.full(len(num_tokens), self._overhead_ns),
        }

    def _context_free_ns(self, num_decode: int, prefills: tuple[tuple[int, int], ...], num_sampled: int) -> float:
        """All but the attention of the decodes: what stays the same while a batch decodes on."""
        num_tokens, ns = num_decode, self._fixed_ns
        if prefills:
            prefill_tokens, pairs, kv_tokens = prefill_sums(prefills)
            num_tokens += prefill_tokens
            arithmetic, memory = pairs * self._pair_ns, kv_tokens * self._kv_token_ns
            ns += arithmetic if arithmetic > memory else memory
        ns += num_tokens * self._token_ns
        for compute_ns, weights_ns, rows_ns in self._layer_gemms:
            arithmetic, memory = num_tokens * compute_ns, weights_ns + num_tokens * rows_ns
            ns += arithmetic if arithmetic > memory else memory
        if num_sampled:
            compute_ns, weights_ns, rows_ns = self._lm_head
            arithmetic, memory = num_sampled * compute_ns, weights_ns + num_sampled * rows_ns
            ns += arithmetic if arithmetic > memory else memory
        return ns

    def _set_gemms(self, target: Target) -> None:
        model, tp = target.model, target.tensor_parallel
        parameters, hidden = model.matmul_parameters(tp), model.hidden_size
        intermediate = -(-model.intermediate_size // tp)
        layers = model.num_hidden_layers
        # elements read and written per row: inputs and outputs of each product
        self._layer_gemms = (
            self._gemm(target, layers, parameters.qkv, hidden + parameters.qkv // hidden),
            self._gemm(target, layers, parameters.o, parameters.o // hidden + hidden),
            self._gemm(target, layers, parameters.mlp, 2 * hidden + (model.num_mlp_inputs + 1) * intermediate),
        )
        self._lm_head = self._gemm(target, 1, parameters.lm_head, hidden + parameters.lm_head // hidden)
        # two norms, each reading and writing hidden state and residual, and the activation between the products
        elements = 8 * hidden + (model.num_mlp_inputs + 1) * intermediate
        self._elementwise_token_ns = layers * elements * model.dtype_bytes * self._memory_ns

    def _gemm(self, target: Target, times: int, parameters: int, row_elements: int) -> _Gemm:
        dtype_bytes = target.model.dtype_bytes
        return _Gemm(
            compute_ns=times * 2 * parameters * self._compute_ns,
            weights_ns=times * parameters * dtype_bytes * self._memory_ns,
            rows_ns=times * row_elements * dtype_bytes * self._memory_ns,
        )

    def _set_attention(self, target: Target, flop_ns: float) -> None:
        """Per (query, key) pair 2 FLOPs for its score and 2 for its value, in every element of every head."""
        model, tp = target.model, target.tensor_parallel
        heads = -(-model.num_attention_heads // tp)
        self._pair_ns = 4 * model.num_hidden_layers * heads * model.head_dim * flop_ns
        self._kv_token_ns = model.kv_bytes_per_token(target.kv_dtype_bytes, tp) * self._memory_ns
        # a decode row has one pair per token of KV, so which side binds never changes
        self._decode_kv_token_ns = max(self._pair_ns, self._kv_token_ns)

    def _set_communication(self, options: RooflineOptions, target: Target) -> None:
        """Two ring all-reduces of the hidden states per layer: each GPU sends 2(tp - 1)/tp of them."""
        model, tp = target.model, target.tensor_parallel
        link_ns = 1e9 / (target.gpu.link_bytes_per_s * options.allreduce_efficiency)
        row_bytes = model.hidden_size * model.dtype_bytes * 2 * (tp - 1) / tp
        times = 2 * model.num_hidden_layers if tp > 1 else 0
        self._allreduce_token_ns = times * row_bytes * link_ns
        self._allreduce_fixed_ns = times * options.allreduce_latency_us * 1e3


def _sides(gemm: _Gemm, num_rows: NDArray[np.int64]) -> tuple[_Times, _Times]:
    """Compute and memory time of a group for many iterations, ns."""
    return num_rows * gemm.compute_ns, gemm.weights_ns + num_rows * gemm.rows_ns
