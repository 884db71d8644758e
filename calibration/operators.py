"""From a point to the call that is timed there: real tensors in the point's shapes, one layer's after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from calibration.attention import Batch, Row
from calibration.executor import Executor
from calibration.points import Point

Call = Callable[[int], object]
"""`call(i)` does the work once; `i` picks the layer whose weights and cache it uses."""


def call_of(point: Point, executor: Executor) -> Call:
    """The work of a point; what it needs is made here, so that only the work is timed."""
    if point.operator == "step":
        rows = rows_of(point, executor)
        return lambda _: executor.run(rows)
    num_layers = executor.decoder.shard.num_layers
    if point.operator.endswith("attention"):
        call = _attention(point, executor)
    elif point.operator == "rotary":
        call = _rotary(point, executor)
    else:
        call = _dense(point, executor)
    return lambda i: call(i % num_layers)


def rows_of(point: Point, executor: Executor) -> list[Row]:
    """A batch with the point's decodes, then its chunk: random tokens, pages scattered over the cache."""
    generator = torch.Generator().manual_seed(0)
    free = torch.randperm(executor.cache.num_pages - 1, generator=generator).add_(1).tolist()
    size, vocabulary = executor.page_size, executor.decoder.shard.vocab_size
    pieces = [(1, context) for context in point.contexts]
    if point.chunk_tokens:
        pieces.append((point.chunk_tokens, point.chunk_context_tokens))
    rows, taken = [], 0
    for num_tokens, context in pieces:
        num_pages = -(-(context + num_tokens) // size)
        tokens = torch.randint(vocabulary, (num_tokens,), generator=generator).tolist()
        rows.append(Row(tokens, context, free[taken : taken + num_pages]))
        taken += num_pages
    return rows


def pages_needed(point: Point, page_size: int) -> int:
    """Pages that `rows_of` hands out for a point."""
    lengths: Sequence[int] = [context + 1 for context in point.contexts]
    chunk = point.chunk_context_tokens + point.chunk_tokens
    return sum(-(-length // page_size) for length in (*lengths, chunk))


def _attention(point: Point, executor: Executor) -> Call:
    decoder, cache, backend = executor.decoder, executor.cache, executor.backend
    shard = decoder.shard
    batch: Batch = executor.batch(rows_of(point, executor))
    query = _random(executor, batch.num_tokens, shard.num_heads, shard.head_dim)
    backend.prepare(batch, shard.num_heads, shard.num_kv_heads, shard.head_dim, decoder.dtype)
    return lambda layer: backend.attend(query, cache.keys[layer], cache.values[layer], batch)


def _rotary(point: Point, executor: Executor) -> Call:
    decoder, cache = executor.decoder, executor.cache
    shard, num_rows = decoder.shard, point.num_tokens
    qkv = _random(executor, num_rows, (shard.num_heads + 2 * shard.num_kv_heads) * shard.head_dim)
    rotations = decoder.rotations(torch.arange(num_rows, device=decoder.device))
    slots = torch.randint(cache.num_pages * cache.page_size, (num_rows,)).to(decoder.device)
    return lambda layer: decoder.rotary(layer, qkv, rotations, cache, slots)


def _dense(point: Point, executor: Executor) -> Call:
    decoder = executor.decoder
    shard, name = decoder.shard, point.operator
    num_rows = point.num_tokens or point.num_seqs
    sizes = {
        "o_proj": shard.num_heads * shard.head_dim,
        "down_proj": shard.intermediate_size,
        "sampling": shard.vocab_size,
    }
    rows = _random(executor, num_rows, sizes.get(name, shard.hidden_size))
    if name == "norm":
        residual = torch.zeros_like(rows)
        return lambda _: decoder.norm(rows, residual)
    if name in ("lm_head", "sampling"):
        operator = getattr(decoder, name)
        return lambda _: operator(rows)
    of_layer = getattr(decoder, name)
    return lambda layer: of_layer(layer, rows)


def _random(executor: Executor, *size: int) -> torch.Tensor:
    return torch.randn(size, device=executor.decoder.device, dtype=executor.decoder.dtype)
