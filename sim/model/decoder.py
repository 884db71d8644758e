"""A decoder and its arithmetic: parameters, products, bytes of weights and of KV, per GPU."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import ScenarioError
from sim.model.experts import Experts, gated_mlp
from sim.model.latent import LatentAttention
from sim.model.products import Product, Rows
from sim.model.quantization import Quantization


@dataclass(frozen=True)
class Model:
    """A decoder. Field names are those of HF `config.json`."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    """Of the MLP in layers without experts."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    dtype_bytes: int
    """Per element of activations and of weights that are not quantized."""
    max_position_embeddings: int
    source: str
    gated_mlp: bool = True
    """Three matrices (gate, up, down) rather than two."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of the queries and of the keys (Qwen3)."""
    norm_bias: bool = False
    """LayerNorm (scale and shift) rather than RMS norm."""
    num_learned_positions: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    """Shapes of multi-head latent attention, which takes the place of KV heads."""
    quantization: Quantization | None = None
    sliding_window: int | None = None
    """Tokens that the sliding layers attend to, the query's own included; always less than the model's context."""
    num_sliding_layers: int = 0

    @property
    def num_mlp_inputs(self) -> int:
        """Matrices that read the hidden state: gate and up, or up alone."""
        return 2 if self.gated_mlp else 1

    @property
    def num_parameters(self) -> int:
        """All parameters, however they are stored; without modules that only predict several tokens ahead."""
        embeddings = self.vocab_size * self.hidden_size
        lm_head = -embeddings if self.tie_word_embeddings else 0
        products = sum(_num_weights(product) for product in self.products())
        return products + lm_head + embeddings + self._vector_parameters

    def check_tensor_parallel(self, tensor_parallel: int, place: str = "hardware.tensor_parallel") -> None:
        """Raise ScenarioError unless the model can be split over `tensor_parallel` GPUs as vLLM does it.

        Attention heads must divide evenly; KV heads divide evenly or are replicated evenly (the latents of
        latent attention always are); each GPU's share of a quantized matrix holds whole groups of it.
        """
        heads, kv_heads = self.num_attention_heads, 1 if self.latent else self.num_key_value_heads
        if heads % tensor_parallel:
            raise ScenarioError(
                place,
                f"{tensor_parallel} does not divide the {heads} attention heads of {self.name}",
                valid=f"possible: {self._splits(kv_heads)}",
            )
        if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
            raise ScenarioError(
                place,
                f"the {kv_heads} KV heads of {self.name} cannot be split or replicated evenly over {tensor_parallel}",
                valid=f"possible: {self._splits(kv_heads)}",
            )
        for size in self._ungrouped(tensor_parallel):
            raise ScenarioError(
                place,
                f"{tensor_parallel} GPUs split {size} inputs of a matrix of {self.name} within its quantization groups",
                valid=f"possible: {self._splits(kv_heads)}",
            )

    def kv_heads_per_gpu(self, tensor_parallel: int = 1) -> int:
        """KV heads that each GPU holds; at least one, so that few heads are replicated."""
        return -(-self.num_key_value_heads // tensor_parallel)

    def products(self, tensor_parallel: int = 1) -> tuple[Product, ...]:
        """All matrix products of a forward pass, per GPU, the LM head last."""
        vocabulary = -(-self.vocab_size // tensor_parallel)
        lm_head = Product(
            "lm_head",
            Rows.SAMPLED,
            num_layers=1,
            parameters=self.hidden_size * vocabulary,
            row_elements=self.hidden_size + vocabulary,
            is_quantized=False,
        )
        return (*self._attention_products(tensor_parallel), *self._mlp_products(tensor_parallel), lm_head)

    def parameter_bytes(self, product: Product) -> float:
        """Bytes in which each weight of a product is stored."""
        if self.quantization is None or not product.is_quantized:
            return self.dtype_bytes
        return self.quantization.weight_bits / 8

    def weight_bytes(self, tensor_parallel: int = 1) -> int:
        """Weights per GPU: matrices and embeddings split, vectors and learned positions replicated.

        With quantized weights, vLLM keeps a 16-bit copy of what latent attention absorbs; it is counted.
        """
        *layers, lm_head = self.products(tensor_parallel)
        stored = sum(
            product.num_layers * product.num_copies * product.parameters * self.parameter_bytes(product)
            for product in layers
            if not product.is_derived or self.quantization is not None
        )
        vocabulary = lm_head.parameters if self.tie_word_embeddings else 2 * lm_head.parameters
        return round(stored) + (vocabulary + self._vector_parameters) * self.dtype_bytes

    def kv_bytes_per_token(self, kv_dtype_bytes: float, tensor_parallel: int = 1) -> int:
        """KV per token and GPU: keys and values, all layers, this GPU's heads; or the latents of all layers."""
        return round(self.num_hidden_layers * self.kv_elements_per_layer(tensor_parallel) * kv_dtype_bytes)

    def kv_elements_per_layer(self, tensor_parallel: int = 1) -> int:
        """Elements that the cache holds per token, layer and GPU."""
        if self.latent is not None:
            return self.latent.cached_elements
        return 2 * self.kv_heads_per_gpu(tensor_parallel) * self.head_dim

    def _attention_products(self, tensor_parallel: int) -> tuple[Product, ...]:
        hidden, layers = self.hidden_size, self.num_hidden_layers
        heads = -(-self.num_attention_heads // tensor_parallel)
        if self.latent is not None:
            return self.latent.products(hidden, heads, layers)
        inner = heads * self.head_dim
        qkv = inner + 2 * self.kv_heads_per_gpu(tensor_parallel) * self.head_dim
        return (
            Product("qkv", Rows.TOKENS, layers, hidden * qkv, hidden + qkv),
            Product("o", Rows.TOKENS, layers, inner * hidden, inner + hidden),
        )

    def _mlp_products(self, tensor_parallel: int) -> tuple[Product, ...]:
        products: tuple[Product, ...] = ()
        if self._num_mlp_layers:
            intermediate = -(-self.intermediate_size // tensor_parallel)
            mlp = gated_mlp("mlp", self._num_mlp_layers, self.hidden_size, intermediate, num_inputs=self.num_mlp_inputs)
            products = (mlp,)
        return products + (self.experts.products(self.hidden_size, tensor_parallel) if self.experts else ())

    @property
    def _num_mlp_layers(self) -> int:
        return self.num_hidden_layers - (self.experts.num_layers if self.experts else 0)

    @property
    def _vector_parameters(self) -> int:
        """Norms, biases and learned positions: a few in ten thousand, but counts are exact."""
        hidden, head_dim = self.hidden_size, self.head_dim
        norm = 2 * hidden if self.norm_bias else hidden
        layer = 2 * norm
        layer += (self.num_attention_heads + 2 * self.num_key_value_heads) * head_dim if self.qkv_bias else 0
        layer += hidden if self.o_bias else 0
        layer += 2 * head_dim if self.qk_norm else 0
        layer += self.latent.norm_parameters if self.latent else 0
        mlp = self.num_mlp_inputs * self.intermediate_size + hidden if self.mlp_bias else 0
        experts = self.experts.vector_parameters if self.experts else 0
        layers = self.num_hidden_layers * layer + self._num_mlp_layers * mlp + experts
        return layers + norm + self.num_learned_positions * hidden

    def _ungrouped(self, tensor_parallel: int) -> list[int]:
        """Input sizes of matrices that `tensor_parallel` GPUs would split inside a quantization group."""
        if tensor_parallel == 1 or self.quantization is None or self.quantization.group_size is None:
            return []
        head_dim = self.latent.v_head_dim if self.latent else self.head_dim
        sizes = [self.num_attention_heads * head_dim]
        sizes += [self.intermediate_size] if self._num_mlp_layers else []
        if self.experts:
            sizes += [self.experts.intermediate_size, self.experts.shared_intermediate_size]
        return [size for size in sizes if size % (tensor_parallel * self.quantization.group_size)]

    def _splits(self, kv_heads: int) -> str:
        heads = self.num_attention_heads
        return ", ".join(
            str(tp)
            for tp in range(1, heads + 1)
            if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) and not self._ungrouped(tp)
        )


def _num_weights(product: Product) -> int:
    return 0 if product.is_derived else product.num_layers * product.num_copies * product.parameters
