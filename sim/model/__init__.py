"""Models as HF `config.json` describes them, and the arithmetic that follows: parameters, bytes, KV.

Decoders of the Llama family (Llama, Mistral, Qwen2, Qwen3, Granite, Phi-3) and OPT; mixtures of experts
(Mixtral, Qwen2-MoE, Qwen3-MoE, Llama 4); multi-head latent attention (DeepSeek-V2, DeepSeek-V3, Kimi-K2);
local attention in some or all layers; weights in 16 bit, fp8, AWQ, GPTQ and compressed-tensors. What is
not modelled is refused by the name of the field that asks for it, never approximated in silence.
"""

from sim.model.config import parse_config
from sim.model.decoder import Model
from sim.model.experts import Experts
from sim.model.files import load_model, models, read_config
from sim.model.latent import LatentAttention
from sim.model.products import Product, Rows
from sim.model.quantization import Quantization

__all__ = [
    "Experts",
    "LatentAttention",
    "Model",
    "Product",
    "Quantization",
    "Rows",
    "load_model",
    "models",
    "parse_config",
    "read_config",
]
