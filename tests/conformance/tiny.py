"""A golden small enough to check by hand: two requests on three blocks, one refused, one that leaves."""

import copy
import gzip
import json
from pathlib import Path

INPUT = {
    "engine": "vllm",
    "version": "0.33.0",
    "mode": "sync",
    "covers": "self-preemption, a refusal and a cancellation",
    "config": {
        "num_gpu_blocks": 4,
        "block_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "max_model_len": 16,
        "enable_prefix_caching": False,
    },
    "requests": [
        {"id": "a", "arrival_step": 0, "prompt_tokens": 4, "output_tokens": 6, "max_tokens": 6},
        {"id": "b", "arrival_step": 1, "prompt_tokens": 3, "output_tokens": 3, "max_tokens": 3, "cancel_step": None},
        {"id": "c", "arrival_step": 2, "prompt_tokens": 16, "output_tokens": 1, "max_tokens": 1},
        {"id": "d", "arrival_step": 3, "prompt_tokens": 2, "output_tokens": 9, "max_tokens": 9, "cancel_step": 4},
    ],
}


def _line(step, scheduled, running, waiting, free_blocks, **more):
    line = {"step": step, "scheduled": scheduled, "new": [], "resumed": [], "preempted": [], "finished": []}
    more.setdefault("num_cached_tokens", {})
    return line | more | {"running": running, "waiting": waiting, "free_blocks": free_blocks}


STEPS = [
    _line(0, [["a", 4]], ["a"], [], 2, new=["a"], num_cached_tokens={"a": 0}),
    # a's fifth token starts a block, b's prompt takes the last one
    _line(1, [["a", 1], ["b", 3]], ["a", "b"], [], 0, new=["b"], num_cached_tokens={"b": 0}),
    _line(2, [["a", 1], ["b", 1]], ["a", "b"], [], 0, rejected=["c"]),
    # b needs a block and stands last: it is its own victim, and goes before d, who arrived meanwhile
    _line(3, [["a", 1]], ["a"], ["b", "d"], 1, preempted=["b"], preempted_for=["b"]),
    _line(4, [["a", 1]], ["a"], ["b"], 1, cancelled=["d"]),
    # a's ninth token takes the third block; its sixth answer ends it and frees all
    _line(5, [["a", 1]], [], ["b"], 3, finished=["a"]),
    # b's prompt and its two answers are recomputed at once, the third answer ends it
    _line(6, [["b", 5]], [], [], 3, resumed=["b"], num_cached_tokens={"b": 0}, finished=["b"]),
]
HEADER = {
    "format": 1,
    "engine": "vllm",
    "version": "0.33.0",
    "mode": "sync",
    "requests": 4,
    "lines": 7,
    "finished": 2,
    "cancelled": 1,
    "rejected": 1,
    "unfinished": 0,
    "preemptions": 1,
    "scheduled_tokens": 18,
    "cached_tokens": 0,
    "evicted_blocks": 0,
    "token_budget": 8,
    "usable_blocks": 3,
}


def golden():
    """A fresh copy of the input and of the log's lines, header first."""
    return copy.deepcopy((INPUT, [HEADER, *STEPS]))


def write(folder: Path, scenario, lines, name="tiny") -> Path:
    """Write a golden; returns its input."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(scenario))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{name}.log.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return path
