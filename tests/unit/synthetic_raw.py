"""Raw files of made-up hardware, whose physics are known: what a fit of them must find."""

import numpy as np
import pandas as pd

from calibration.raw import COLUMNS, KEY, Metadata, RawFile
from sim.model.config import parse_config

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
MODEL = parse_config("tiny", CONFIG, "here")
METADATA = Metadata(
    hardware={"name": "made up", "memory_bytes": 2**33},
    device="cpu",
    driver=None,
    versions={"python": "3.11"},
    backends={"decode_attention": "paper"},
    dtype="bfloat16",
    model="tiny",
    config=CONFIG,
    tensor_parallel=1,
    num_layers=4,
    date="2026-01-01",
    seed=0,
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (15, 127, 511, 1023, 2047, 4095)
CHUNKS = (16, 64, 256, 1024, 2048)
PROMPT_CONTEXTS = (0, 256, 1024, 4096)
GAP_NS, SEQUENCE_NS, PROMPT_NS = 80e3, 4e3, 50e3
DENSE_IN_COMPANY, ATTENTION_IN_COMPANY = 0.9, 1.1


def dense_ns(operator, rows):
    """A product: weights are read, rows are computed; smooth operators cost less."""
    scale = {"qkv_proj": 1.0, "o_proj": 0.7, "gate_up_proj": 3.0, "down_proj": 1.5, "norm": 0.1, "rotary": 0.1}
    return scale[operator] * (20e3 + 180.0 * rows)


def sampled_ns(operator, rows):
    return {"lm_head": 400e3 + 3e3 * rows, "sampling": 30e3 + 1e3 * rows}[operator]


def prompt_ns(tokens, context):
    return 9e3 + 30 * tokens + 0.05 * (tokens * context + tokens * (tokens + 1) / 2)


def decode_ns(batch, total_context, spread=0.0):
    return 6e3 + 200 * batch + 2.0 * (total_context + batch) + 3.0 * spread


def mixed_ns(batch, total_context, tokens, context):
    return 0.85 * (prompt_ns(tokens, context) + decode_ns(batch, total_context))


def step_ns(batch, total_context, tokens, context):
    """A whole iteration of the four layers."""
    rows, sampled = batch + tokens, batch + (tokens > 0)
    dense = sum(dense_ns(name, rows) for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "rotary")) * 4
    dense += 9 * dense_ns("norm", rows) + sum(sampled_ns(name, sampled) for name in ("lm_head", "sampling"))
    attention = mixed_ns(batch, total_context, tokens, context) if batch and tokens else 0.0
    if not (batch and tokens):
        attention = decode_ns(batch, total_context) if batch else prompt_ns(tokens, context)
    left = GAP_NS + sampled * SEQUENCE_NS + (tokens > 0) * PROMPT_NS
    return DENSE_IN_COMPANY * dense + ATTENTION_IN_COMPANY * 4 * attention + left


def decode_columns(contexts):
    return {
        "num_tokens": len(contexts),
        "num_seqs": len(contexts),
        "num_decodes": len(contexts),
        "decode_context_tokens": sum(contexts),
        "decode_context_max": max(contexts),
        "decode_context_sq": float(sum(c * c for c in contexts)),
    }


def points(noise=0.0, seed=0):
    """A profile's points; times are off by a normal error of so much, and say so."""
    rows = [{"operator": name, "num_tokens": n, "ns": dense_ns(name, n)} for n in ROWS for name in DENSE]
    rows += [{"operator": name, "num_seqs": n, "ns": sampled_ns(name, n)} for n in BATCHES for name in SAMPLED]
    rows += [
        {"operator": "prefill_attention", "chunk_tokens": n, "chunk_context_tokens": c, "ns": prompt_ns(n, c)}
        for n in CHUNKS
        for c in PROMPT_CONTEXTS
    ]
    rows += [
        {"operator": "decode_attention", **decode_columns([c] * n), "ns": decode_ns(n, n * c)}
        for n in BATCHES
        for c in CONTEXTS
    ]
    rows += [
        {
            "operator": "decode_attention",
            **decode_columns(own),
            "ns": decode_ns(len(own), sum(own), max(own) - min(own)),
        }
        for n in BATCHES[1:]
        for c in CONTEXTS[1:4]
        if (own := [c] * (n // 2) + [2 * c] * (n - n // 2))
    ]
    together = [(n, c, t, p) for n in (2, 16, 64) for c in (127, 2047) for t in (64, 512, 2048) for p in (0, 2048)]
    for n, c, t, p in together:
        both = decode_columns([c] * n) | {"chunk_tokens": t, "chunk_context_tokens": p}
        rows.append({"operator": "mixed_attention", **both, "ns": mixed_ns(n, n * c, t, p)})
        both |= {"num_tokens": n + t, "num_seqs": n + 1}
        rows.append({"operator": "step", **both, "ns": step_ns(n, n * c, t, p)})
    rows += [
        {"operator": "step", **decode_columns([c] * n), "ns": step_ns(n, n * c, 0, 0)}
        for n in BATCHES
        for c in CONTEXTS[::2]
    ]
    rows += [
        {"operator": "step", "num_tokens": t, "num_seqs": 1, "chunk_tokens": t, "chunk_context_tokens": p, "ns": ns}
        for t in CHUNKS
        for p in PROMPT_CONTEXTS[::2]
        if (ns := step_ns(0, 0, t, p))
    ]
    return as_frame(rows, noise, seed)


DENSE = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "norm", "rotary")
SAMPLED = ("lm_head", "sampling")


def as_frame(rows, noise=0.0, seed=0):
    """Rows with their true `ns` as a raw file has them."""
    rng = np.random.default_rng(seed)
    blank = dict.fromkeys(KEY, 0) | {
        "mode": "eager",
        "repeats": 20,
        "outliers": 0,
        "clock_mhz": None,
        "throttled": None,
    }
    made = []
    for row in rows:
        median = row["ns"] * (1 + noise * rng.standard_normal())
        times = {
            "median_ns": median,
            "ci_low_ns": median * (1 - 1.96 * noise),
            "ci_high_ns": median * (1 + 1.96 * noise),
        }
        made.append(blank | {key: value for key, value in row.items() if key != "ns"} | times)
    return pd.DataFrame(made, columns=list(COLUMNS)).astype(COLUMNS)


def raw_file(frame, **metadata):
    return RawFile(frame, METADATA.model_copy(update=metadata))
