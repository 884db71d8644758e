"""Batch sizes that engines capture as CUDA graphs, for measurements that do not say theirs."""

VLLM_0_11_0 = [1, 2, 4, *range(8, 513, 8)]
"""By default, up to 512 (`vllm/config`, 0.11.0 and before)."""
VLLM_0_19_0 = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""By default, up to 512 (`vllm/config/vllm.py`, 0.19.0)."""
