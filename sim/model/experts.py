"""Mixtures of experts: which layers have them, how large they are, how many of them a batch touches."""

from __future__ import annotations

from dataclasses import dataclass

from sim.model.products import Product, Rows


@dataclass(frozen=True)
class Experts:
    """The experts that stand for the MLP in some or all layers.

    Without expert parallelism, as vLLM runs them by default: every GPU holds its share of every expert.
    """

    num_layers: int
    """Layers with experts; the others have an MLP."""
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Of each expert."""
    shared_intermediate_size: int = 0
    """Of what every token passes beside its experts: all shared experts together."""
    has_shared_gate: bool = False
    """A learned weight of the shared experts for each token (Qwen2-MoE)."""
    has_router_bias: bool = False
    """A learned bias for each expert when experts are chosen (DeepSeek-V3)."""

    @property
    def missed(self) -> float:
        """Probability that one token is not sent to a given expert, each being as likely.

        A batch of T tokens, routed independently, is expected to touch E - E·missed^T of E experts
        (linearity of expectation). 1 - (1 - p)^T is concave in p, so any routing that prefers some experts
        to others touches fewer: it is an upper bound on the weights that are read.
        """
        return 1 - self.num_experts_per_tok / self.num_experts

    @property
    def vector_parameters(self) -> int:
        """Biases of the routers of all layers."""
        return self.num_layers * self.num_experts if self.has_router_bias else 0

    def products(self, hidden_size: int, tensor_parallel: int) -> tuple[Product, ...]:
        """The router (replicated and never quantized), the experts, and the shared ones where there are any."""
        router = self.num_experts + self.has_shared_gate
        products = [
            Product(
                "router",
                Rows.TOKENS,
                self.num_layers,
                hidden_size * router,
                hidden_size + router,
                is_quantized=False,
            ),
            gated_mlp(
                "experts",
                self.num_layers,
                hidden_size,
                -(-self.intermediate_size // tensor_parallel),
            )._replace(rows=Rows.ROUTED, num_copies=self.num_experts),
        ]
        if self.shared_intermediate_size:
            shared = -(-self.shared_intermediate_size // tensor_parallel)
            products.append(gated_mlp("shared experts", self.num_layers, hidden_size, shared))
        return tuple(products)


def gated_mlp(name: str, num_layers: int, hidden_size: int, intermediate_size: int, *, num_inputs: int = 2) -> Product:
    """An MLP of `num_inputs` matrices that read the hidden state (gate and up, or up alone) and one back."""
    inner = (num_inputs + 1) * intermediate_size
    return Product(
        name,
        Rows.TOKENS,
        num_layers,
        parameters=hidden_size * inner,
        row_elements=2 * hidden_size + inner,
        activation_elements=inner,
    )
