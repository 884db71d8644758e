"""Iteration time from first principles: FLOPs and bytes of every operator group against the GPU's peaks.

A group takes the longer of its compute and its memory time, each at a named part of the vendor's peak;
groups follow each other. What is read of experts is what uniform routing is expected to touch; latent
attention expands for prefills and absorbs for decodes; local attention counts its window, exactly for
prefills and as an upper bound over decodes; weights in few bits save bytes, and time of computing only
where fp8 tensor cores multiply them.

No kernel of the user's own GPU was timed for it: it is for planning before there is anything to measure.
The default parts were read off published kernel timings of one H100-SXM under vLLM 0.24 (AIConfigurator
0.12, NVIDIA, Apache-2.0); each option says which. Beside the same tables, for one layer without overheads:
experts bound by memory (Mixtral-8x7B and Qwen3-30B-A3B, balanced, 64 and 256 tokens) cost 0.96 to 1.05 of
what was measured; DeepSeek-V3's attention on 128 heads with its projections 0.90 to 1.00 for 128 decodes
at 8k and 16k tokens, 1.01 to 1.12 for prompts of 8k and 16k. Small launches cost less here than there.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sim.cost.base import CostModel, CostOptions, Resource, Target, decode_contexts, prefill_sums, prefill_sums_of
from sim.cost.roofline_groups import Gemm, RoutedGemm, Window, sides
from sim.model import Product, Rows
from sim.options import NonNegative
from sim.step import StepArrays, StepShape

Efficiency = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
"""The part of a vendor's peak that real kernels reach."""


class RooflineOptions(CostOptions):
    """Options of `kind: roofline`."""

    kind: Literal["roofline"] = "roofline"
    gemm_compute_efficiency: Efficiency = Field(
        default=0.80,
        description="matrix products, part of the bf16 peak "
        "(AIConfigurator H100 gemm: median 0.77 to 0.84 for m >= 512, n and k >= 4096)",
    )
    expert_compute_efficiency: Efficiency = Field(
        default=0.50,
        description="matrix products of experts, part of the peak (AIConfigurator H100 moe, vLLM's Triton kernel in "
        "bf16, 4k and 16k tokens: 0.52 for Mixtral-8x7B, 0.42 for Qwen3-30B-A3B)",
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


class Roofline(CostModel):
    """Every decoder of `sim.model`, tensor parallel within one server."""

    Options = RooflineOptions

    def __init__(self, options: RooflineOptions, target: Target) -> None:
        self._options, self._target = options, target
        self._memory_ns = 1e9 / (target.gpu.bandwidth_bytes_per_s * options.memory_efficiency)
        self._set_gemms()
        self._set_attention(1e9 / (target.gpu.bf16_flops * options.attention_compute_efficiency))
        self._set_communication()
        layers = target.model.num_hidden_layers
        self._overhead_ns = options.step_overhead_us * 1e3 + layers * options.layer_overhead_us * 1e3
        self._fixed_ns = self._overhead_ns + self._allreduce_fixed_ns
        self._token_ns = self._elementwise_token_ns + self._allreduce_token_ns
        self._host_ns = options.host_us * 1e3
        self._host_request_ns = options.host_us_per_request * 1e3
        self._context_free_decode_ns = cache(lambda decodes, sampled: self._context_free_ns(decodes, (), sampled))
        """Batches that only decode are few by size and many by number; so are, next to their number, the sizes of
        batches that prefill."""
        self._tokens_ns, self._sampled_ns = cache(self._count_tokens_ns), cache(self._lm_head.ns)

    @classmethod
    def build(cls, options: CostOptions, target: Target) -> Roofline:
        """Raises ScenarioError when the model's heads cannot be split over the GPUs."""
        target.model.check_tensor_parallel(target.tensor_parallel)
        return cls(cast(RooflineOptions, options), target)

    def price(self, shape: StepShape) -> int:
        """The sum of the groups, rounded to ns; at least 1."""
        num_decode, context_sum, _, _, prefills, num_sampled, _, _, _ = shape
        if prefills:
            ns = self._context_free_ns(num_decode, prefills, num_sampled)
        else:
            ns = self._context_free_decode_ns(num_decode, num_sampled)
        kv_tokens = context_sum + num_decode
        ns += kv_tokens * self._decode_kv_token_ns
        if self._window is not None:
            ns += min(kv_tokens, num_decode * self._window.num_tokens) * self._window.decode_kv_token_ns
        return int(ns + 0.5) or 1

    def price_decode_run(self, shape: StepShape, num_steps: int) -> NDArray[np.int64]:
        """As `price`: while the batch decodes on, only the KV that it reads grows."""
        num_decode = shape.num_decode
        ns = self._context_free_decode_ns(num_decode, shape.num_sampled)
        kv_tokens = decode_contexts(shape, num_steps) + num_decode
        run = ns + kv_tokens * self._decode_kv_token_ns
        if self._window is not None:
            run += np.minimum(kv_tokens, num_decode * self._window.num_tokens) * self._window.decode_kv_token_ns
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
        groups = [sides(gemm, num_tokens) for gemm in self._layer_gemms]
        groups += [routed.sides(num_tokens) for routed in self._routed]
        groups += [
            sides(gemm, num_rows, num_rows > 0)
            for gemm, num_rows in (
                (self._lm_head, steps.num_sampled),
                *((gemm, steps.num_decode) for gemm in self._decode_gemms),
                *((gemm, kv_tokens) for gemm in self._prefill_gemms),
            )
        ]
        groups.append((pairs * self._pair_ns, kv_tokens * self._kv_token_ns))
        decode_kv_tokens = steps.decode_context_sum + steps.num_decode
        groups.append((decode_kv_tokens * self._decode_pair_ns, decode_kv_tokens * self._decode_kv_read_ns))
        if self._window is not None:
            groups += self._window.sides(steps)
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
        num_tokens, kv_tokens, ns = num_decode, 0, 0.0
        if prefills:
            prefill_tokens, pairs, kv_tokens = prefill_sums(prefills)
            num_tokens += prefill_tokens
            arithmetic, memory = pairs * self._pair_ns, kv_tokens * self._kv_token_ns
            ns = arithmetic if arithmetic > memory else memory
        ns += self._tokens_ns(num_tokens)
        if num_sampled:
            ns += self._sampled_ns(num_sampled)
        return ns if self._is_plain else ns + self._special_ns(num_tokens, num_decode, kv_tokens, prefills)

    def _count_tokens_ns(self, num_tokens: int) -> float:
        """What every iteration costs, and what its tokens cost wherever they belong."""
        ns = self._fixed_ns + num_tokens * self._token_ns
        for gemm in self._layer_gemms:
            ns += gemm.ns(num_tokens)
        return ns

    def _special_ns(
        self, num_tokens: int, num_decode: int, prefill_kv_tokens: int, prefills: tuple[tuple[int, int], ...]
    ) -> float:
        """What only some families have: experts, the products of latent attention, windows of prefills."""
        ns = 0.0
        for routed in self._routed:
            ns += routed.ns(num_tokens)
        if num_decode:
            for gemm in self._decode_gemms:
                ns += gemm.ns(num_decode)
        if prefills:
            for gemm in self._prefill_gemms:
                ns += gemm.ns(prefill_kv_tokens)
            if self._window is not None:
                ns += self._window.prefill_ns(prefills)
        return ns

    def _set_gemms(self) -> None:
        model, tp = self._target.model, self._target.tensor_parallel
        by_rows: dict[Rows, list[Product]] = {rows: [] for rows in Rows}
        for product in model.products(tp):
            by_rows[product.rows].append(product)
        self._layer_gemms = tuple(self._gemm(product) for product in by_rows[Rows.TOKENS])
        self._decode_gemms = tuple(self._gemm(product) for product in by_rows[Rows.DECODES])
        self._prefill_gemms = tuple(self._gemm(product) for product in by_rows[Rows.PREFILL_CONTEXTS])
        (self._lm_head,) = (self._gemm(product) for product in by_rows[Rows.SAMPLED])
        self._routed = tuple(
            RoutedGemm.of(model.experts, self._gemm(product)) for product in by_rows[Rows.ROUTED] if model.experts
        )
        # two norms, each reading and writing hidden state and residual, and the activations between products
        elements = model.num_hidden_layers * 8 * model.hidden_size
        for product in by_rows[Rows.TOKENS] + by_rows[Rows.ROUTED]:
            times = model.experts.num_experts_per_tok if model.experts and product.rows == Rows.ROUTED else 1
            elements += product.num_layers * times * product.activation_elements
        self._elementwise_token_ns = elements * model.dtype_bytes * self._memory_ns

    def _gemm(self, product: Product) -> Gemm:
        """Of one copy of the product's weights, over all layers that have it."""
        model, gpu = self._target.model, self._target.gpu
        flops, quantization = gpu.bf16_flops, model.quantization
        if quantization and quantization.has_fp8_activations and product.is_quantized and gpu.fp8_flops:
            flops = gpu.fp8_flops
        is_routed, options = product.rows == Rows.ROUTED, self._options
        efficiency = options.expert_compute_efficiency if is_routed else options.gemm_compute_efficiency
        compute_ns = 1e9 / (flops * efficiency)
        layers = product.num_layers
        return Gemm(
            compute_ns=layers * 2 * product.parameters * compute_ns,
            weights_ns=layers * product.parameters * model.parameter_bytes(product) * self._memory_ns,
            rows_ns=layers * product.row_elements * model.dtype_bytes * self._memory_ns,
        )

    def _set_attention(self, flop_ns: float) -> None:
        """Per (query, key) pair 2 FLOPs for its score and 2 for its value, in every element of every head."""
        model, tp = self._target.model, self._target.tensor_parallel
        heads, latent = -(-model.num_attention_heads // tp), model.latent
        decode_kv_bytes = model.kv_elements_per_layer(tp) * self._target.kv_dtype_bytes
        if latent is None:
            pair_flops = decode_pair_flops = 4 * model.head_dim
            kv_bytes = decode_kv_bytes
        else:
            # prefills read what they expanded, not the cache
            pair_flops, decode_pair_flops = latent.prefill_pair_flops, latent.decode_pair_flops
            kv_bytes = heads * latent.expanded_elements * model.dtype_bytes
        full, sliding = model.num_hidden_layers - model.num_sliding_layers, model.num_sliding_layers
        pair_flops, decode_pair_flops = heads * pair_flops, heads * decode_pair_flops
        self._pair_ns, self._kv_token_ns = full * pair_flops * flop_ns, full * kv_bytes * self._memory_ns
        self._decode_pair_ns = full * decode_pair_flops * flop_ns
        self._decode_kv_read_ns = full * decode_kv_bytes * self._memory_ns
        # a decode row has one pair per token of KV, so which side binds never changes
        self._decode_kv_token_ns = max(self._decode_pair_ns, self._decode_kv_read_ns)
        self._window = None
        if model.sliding_window is not None:
            pair_ns, kv_token_ns = sliding * pair_flops * flop_ns, sliding * kv_bytes * self._memory_ns
            self._window = Window(model.sliding_window, pair_ns, kv_token_ns)
        self._is_plain = latent is None and self._window is None and not self._routed

    def _set_communication(self) -> None:
        """Two ring all-reduces of the hidden states per layer: each GPU sends 2(tp - 1)/tp of them."""
        model, tp = self._target.model, self._target.tensor_parallel
        link_ns = 1e9 / (self._target.gpu.link_bytes_per_s * self._options.allreduce_efficiency)
        row_bytes = model.hidden_size * model.dtype_bytes * 2 * (tp - 1) / tp
        times = 2 * model.num_hidden_layers if tp > 1 else 0
        self._allreduce_token_ns = times * row_bytes * link_ns
        self._allreduce_fixed_ns = times * self._options.allreduce_latency_us * 1e3
