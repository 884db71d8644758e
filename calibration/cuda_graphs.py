"""Numbers of rows that vLLM captures as CUDA graphs: those to which an artifact's iterations are padded.

Artifacts of kernels that were timed one by one, for an engine that pads (Vidur, AIConfigurator), have the sizes of
the version that was current then; what is timed, served and fitted here captures the newer ones. Where padding was
compared with a real run and not seen in it (LLMServingSim), and in times of whole iterations, there is none.
"""

VLLM_0_11_0 = [1, 2, 4, *range(8, 513, 8)]
"""By default, up to 512 (`vllm/config`, 0.11.0 and before)."""
VLLM_0_19_0 = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""By default, up to 512 (`vllm/config/vllm.py`, 0.19.0)."""
