"""Executes one iteration for real: rows in, a sampled token for each of them out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from calibration.attention import Backend, Batch, Row, choose_backend
from calibration.cuda_graphs import VLLM_0_19_0
from calibration.kernels import Decoder, KVCache, Shard
from sim.errors import ArtifactError
from sim.model import Model

DTYPE = torch.bfloat16
_CACHE_SHARE = 0.9
"""Part of the free memory for weights and cache; the rest is for activations."""
_MIN_LAYERS_CACHE_TOKENS = 4096
"""A cache that holds less measures no long contexts: rather fewer layers."""


class Executor:
    """A decoder, its cache and an attention backend. Page 0 belongs to nobody: padding writes there."""

    def __init__(self, decoder: Decoder, num_pages: int, backend: Backend) -> None:
        self.decoder, self.backend = decoder, backend
        self.cache = KVCache(decoder.shard, num_pages, backend.page_size, decoder.device, decoder.dtype)
        self._graphs: dict[int, _Graph] = {}

    @property
    def page_size(self) -> int:
        """Tokens per page of its cache."""
        return self.cache.page_size

    def batch(self, rows: Sequence[Row]) -> Batch:
        """The tensors of an iteration."""
        return Batch(rows, self.page_size, self.decoder.device)

    def run(self, rows: Sequence[Row]) -> list[int]:
        """One iteration, until its tokens are known: those of the rows that are sampled, in order.

        Decodes run as a CUDA graph where one was captured for at least so many.
        """
        batch = self.batch(rows)
        graph = self._graph_for(batch)
        tokens = self.decoder.forward(batch, self.cache, self.backend) if graph is None else graph.run(batch)
        sampled: list[int] = tokens.tolist()
        return sampled

    def capture(self, sizes: Sequence[int], max_model_len: int) -> None:
        """Have CUDA graphs for decodes in batches of just these sizes, largest first, as vLLM captures them."""
        self._graphs = {size: graph for size, graph in self._graphs.items() if size in sizes}
        for size in sorted(set(sizes) - self._graphs.keys(), reverse=True):
            self._graphs[size] = _Graph(self, size, -(-max_model_len // self.page_size))

    @property
    def captures(self) -> bool:
        """Whether it can run decodes as CUDA graphs at all."""
        return self.decoder.device.type == "cuda" and self.backend.can_capture

    def _graph_for(self, batch: Batch) -> _Graph | None:
        if not self._graphs or max(batch.lengths) > 1:
            return None
        size = next((size for size in sorted(self._graphs) if size >= len(batch.lengths)), None)
        return None if size is None else self._graphs[size]


class _Graph:
    """The captured iteration of a number of decodes; what it reads is copied into its own tensors."""

    def __init__(self, executor: Executor, size: int, max_pages: int) -> None:
        self._batch = executor.batch([Row([0], 0, [0] * max_pages)] * size)
        decoder, cache, backend = executor.decoder, executor.cache, executor.backend
        decoder.forward(self._batch, cache, backend)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._tokens = decoder.forward(self._batch, cache, backend)

    def run(self, batch: Batch) -> torch.Tensor:
        """Tokens of the batch's rows."""
        own, num = self._batch, len(batch.lengths)
        own.pages.zero_()
        own.pages[:num, : batch.pages.shape[1]].copy_(batch.pages)
        for name, padding in (("token_ids", 0), ("positions", 0), ("slots", 0), ("key_lengths", 1)):
            tensor = getattr(own, name)
            tensor[num:].fill_(padding)
            tensor[:num].copy_(getattr(batch, name))
        self._graph.replay()
        return self._tokens[:num]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Captured batch sizes for so many sequences: enough that all of them fit into one, if 512 do."""
    return [size for smaller, size in pairwise([0, *VLLM_0_19_0]) if smaller < max_num_seqs]


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses: of the GPU, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ArtifactError("--device cpu", "this system does not say how much memory is free", valid="expected Linux")


def build_executor(
    model: Model,
    device: torch.device,
    *,
    tensor_parallel: int,
    cache_tokens: int,
    max_num_seqs: int,
    attention: str,
    seed: int,
) -> Executor:
    """One GPU's share of a model with room for `cache_tokens` tokens of `max_num_seqs` sequences, or for what fits.

    Layers are left out where the weights of all of them do not fit beside a cache of some use. Raises
    ArtifactError where not even one does.
    """
    backend = choose_backend(device, attention)
    shard = Shard.of(model, tensor_parallel)
    size, memory = DTYPE.itemsize, _CACHE_SHARE * free_bytes(device)
    tokens = min(cache_tokens, _MIN_LAYERS_CACHE_TOKENS)
    layer_bytes = size * (shard.layer_elements + tokens * shard.kv_elements)
    num_layers = min(shard.num_layers, int((memory - size * shard.other_elements) // layer_bytes))
    if num_layers < 1:
        raise ArtifactError(
            "--model",
            f"one layer of {model.name} needs {layer_bytes / 2**30:.1f} GiB beside its embeddings, and "
            f"{memory / 2**30:.1f} GiB are free",
            remedy="Free memory, split the model (--tp), or take a smaller one.",
        )
    shard = Shard.of(model, tensor_parallel, num_layers)
    left = memory - size * (shard.other_elements + num_layers * shard.layer_elements)
    # each sequence leaves a page partly empty
    wanted = cache_tokens + max_num_seqs * backend.page_size
    num_tokens = min(wanted, int(left // (size * num_layers * shard.kv_elements)))
    num_pages = 1 + -(-num_tokens // backend.page_size)
    return Executor(Decoder(shard, device, DTYPE, seed), num_pages, backend)
