"""Timed iterations from a running server: from what its clients saw, or from a log of its iterations.

`vllm bench serve --save-result --save-detailed` writes when every request was sent and when each of its tokens
arrived (seconds). Tokens of one iteration arrive together, so that the times between such arrivals are the
iterations' times, their number says who decoded, and where a first token is among them, a prompt ended. Prompts are
taken to be computed first come, first served, in full and in chunks that fill the token budget: with prefix caching
a benchmark needs prompts that share nothing. Times include the work of the host and the way to the client.

A log of iterations is CSV or JSON lines (`.jsonl`), one row each, with `num_prefills`, `num_prefill_tokens`,
`prefill_context_tokens` (what is cached before them, the mean over prompts), `num_decodes`, `decode_context_tokens`
(the sum over decodes) and `time_ms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration import csv_table
from calibration.grids import Floats
from calibration.json_file import read_json
from calibration.whole_steps import NUM_FOLDS, Step
from sim.errors import ArtifactError

Ints = NDArray[np.int64]

LISTS = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
LOG_COLUMNS = ("num_prefills", "num_prefill_tokens", "prefill_context_tokens", "num_decodes", "decode_context_tokens")
UNITS = {
    "base_ms": 1.0,
    "per_decode_us": 1e3,
    "per_context_token_ns": 1e6,
    "per_prefill_token_us": 1e3,
    "per_prefill_pair_ns": 1e6,
}
"""Coefficient of each feature of a `Step` -> from ms to its unit."""
LEAST_ITERATIONS = 10
"""Fewer do not tell five coefficients apart."""
LEAST_PREDICTED = 0.1
"""Part of its time below which a prediction is no measure of an error."""
LEADS = (1, 2)
"""Iterations until what was sent can be computed: with asynchronous scheduling the next one is planned already."""
TOGETHER = 0.5
"""Tokens closer than this part of a short inter-token time are of one iteration."""
MOST_LOST = 0.02
"""Part of the tokens that may be missing from the arrivals before they are refused."""
STALLED, FAR_LONGER = 5.0, 0.5
"""An iteration this many typical errors above the others, and by this part, did something else meanwhile."""


class Tokens(NamedTuple):
    """Every token that arrived, in order: when (s), of which request, the how manieth, in which iteration."""

    time_s: Floats
    request: Ints
    position: Ints
    iteration: Ints


class Requests(NamedTuple):
    """The requests of a benchmark that were answered."""

    start_s: Floats
    prompt_tokens: Ints
    ttft_s: Floats
    itl_s: list[list[float]]


class ServerFit(NamedTuple):
    """A linear cost fitted to a server's iterations."""

    options: dict[str, float]
    """Of `cost: {kind: linear}`."""
    errors: Floats
    """Relative, one for each iteration that it was fitted to."""
    held_out_error: float
    """Typical (root mean square) relative error at iterations that the fit did not see."""
    num_stalled: int
    """Iterations that were left out because they did something else meanwhile."""


def fit_bench(path: Path, max_num_batched_tokens: int) -> ServerFit:
    """The linear cost behind a result of `vllm bench serve`, under the lead of planning that explains it best.

    Raises ArtifactError as `bench_steps` and `fit_steps` do.
    """
    fits = [fit_steps(bench_steps(path, max_num_batched_tokens, lead), str(path)) for lead in LEADS]
    return min(fits, key=lambda found: found.held_out_error)


def fit_steps(steps: Sequence[Step], place: str) -> ServerFit:
    """The linear cost of iterations, without those that stalled. Raises ArtifactError when there are too few."""
    if len(steps) < LEAST_ITERATIONS:
        raise ArtifactError(place, f"{len(steps)} timed iterations", valid=f"expected {LEAST_ITERATIONS} or more")
    table = np.array(steps, dtype=float)
    relative = np.column_stack([np.ones(len(table)), table[:, :4]]) / table[:, 4:]
    kept = relative[_goes_on(relative @ _coefficients(relative) - 1)]
    coefficients = _coefficients(kept)
    folds = np.arange(len(kept)) % NUM_FOLDS
    unseen = [kept[folds == fold] @ _coefficients(kept[folds != fold]) - 1 for fold in range(NUM_FOLDS)]
    options = {
        name: float(f"{value * unit:.6g}") for (name, unit), value in zip(UNITS.items(), coefficients, strict=True)
    }
    held_out_error = float(np.sqrt(np.mean(np.concatenate(unseen) ** 2)))
    return ServerFit(options, kept @ coefficients - 1, held_out_error, len(table) - len(kept))


def bench_steps(path: Path, max_num_batched_tokens: int, lead: int = 1) -> list[Step]:
    """The iterations behind a result of `vllm bench serve`, idle time and the first step after it left out.

    `lead`: iterations between the one in which a request is sent and the first that can have it. Raises
    ArtifactError for a file without the detailed lists, and for tokens that did not arrive one by one.
    """
    requests = _read_bench(path)
    tokens = _tokens(requests)
    num = int(tokens.iteration[-1]) + 1
    end_s = np.full(num, np.inf)
    np.minimum.at(end_s, tokens.iteration, tokens.time_s)
    decodes = tokens.position > 0
    num_decode = np.bincount(tokens.iteration[decodes], minlength=num)
    read = requests.prompt_tokens[tokens.request] + tokens.position
    context = np.bincount(tokens.iteration[decodes], weights=read[decodes], minlength=num)
    follows = _follows(requests, tokens, end_s)
    prompt_tokens, pairs = _prompts(requests, tokens, end_s, follows * lead, num_decode, max_num_batched_tokens)
    steps = []
    for k in np.flatnonzero(follows):
        # where nobody decodes, the chunks of a prompt pass unseen until its first token
        count = max(1, -(-int(prompt_tokens[k]) // max_num_batched_tokens)) if not num_decode[k] else 1
        time_ms = float(end_s[k] - end_s[k - 1]) * 1e3
        row = (float(context[k]), prompt_tokens[k] / count, float(pairs[k]) / count, time_ms / count)
        steps.append(Step(int(num_decode[k]), row[0], round(row[1]), row[2], row[3]))
    return steps


def log_steps(path: Path) -> list[Step]:
    """The iterations of a log. Raises ArtifactError for columns that are missing and times that are none."""
    columns = [*LOG_COLUMNS, "time_ms"]
    rows = csv_table.read(path, columns, ["time_ms"])
    steps = []
    for prompts, tokens, cached, decodes, context, time_ms in rows[columns].itertuples(index=False):
        pairs = tokens * cached + tokens * (tokens / max(prompts, 1) + 1) / 2
        steps.append(Step(int(decodes), float(context + decodes), int(tokens), float(pairs), float(time_ms)))
    return steps


def _coefficients(relative: Floats) -> Floats:
    """Coefficients, none below zero, with which the features of each iteration add up to one.

    Errors count relative to what a first fit says rather than to the times: noise makes some of them short, and
    those would weigh more.
    """
    from scipy.optimize import nnls

    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0
    weight = np.ones(len(relative))
    for _ in range(2):
        found, _ = nnls(relative / scale * weight[:, None], weight)
        weight = 1 / np.maximum(relative / scale @ found, LEAST_PREDICTED)
    coefficients: Floats = found / scale
    return coefficients


def _goes_on(errors: Floats) -> NDArray[np.bool_]:
    """Which iterations did not take far longer than a fit says; `errors` are its relative ones."""
    slower = -errors / (1 + errors)
    above = slower - np.median(slower)
    typical = 1.4826 * float(np.median(np.abs(above)))
    going: NDArray[np.bool_] = above < max(STALLED * typical, FAR_LONGER)
    return going


def _read_bench(path: Path) -> Requests:
    content = read_json(path)
    lists: dict[str, Any] = {name: content.get(name) if isinstance(content, dict) else None for name in LISTS}
    absent = [name for name, values in lists.items() if not isinstance(values, list)]
    if absent:
        raise ArtifactError(
            str(path),
            f"has no list {', '.join(absent)}",
            valid="expected the result of `vllm bench serve`",
            remedy="Run it with --save-result --save-detailed.",
        )
    if len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{name} {len(values)}" for name, values in lists.items())
        raise ArtifactError(str(path), f"its lists are of different lengths: {lengths}")
    answered = [i for i, length in enumerate(lists["output_lens"]) if length > 0 and lists["ttfts"][i] > 0]
    expected = sum(lists["output_lens"][i] for i in answered)
    arrived = sum(1 + len(lists["itls"][i]) for i in answered)
    if not answered or arrived < (1 - MOST_LOST) * expected:
        raise ArtifactError(
            str(path),
            f"{expected} tokens were answered and {arrived} arrived one by one",
            remedy="Measure without speculative decoding, with every token streamed by itself.",
        )
    return Requests(
        np.array([lists["start_times"][i] for i in answered], dtype=float),
        np.array([lists["input_lens"][i] for i in answered], dtype=np.int64),
        np.array([lists["ttfts"][i] for i in answered], dtype=float),
        [lists["itls"][i] for i in answered],
    )


def _tokens(requests: Requests) -> Tokens:
    """All tokens, put into iterations: a new one begins after a pause, and with a second token of one request."""
    times, owners, positions = [], [], []
    first_s = requests.start_s + requests.ttft_s
    for row, gaps in enumerate(requests.itl_s):
        times.append(first_s[row] + np.concatenate([[0.0], np.cumsum(gaps)]))
        owners.append(np.full(len(gaps) + 1, row))
        positions.append(np.arange(len(gaps) + 1))
    time_s, request, position = np.concatenate(times), np.concatenate(owners), np.concatenate(positions)
    order = np.lexsort((request, time_s))
    time_s, request, position = time_s[order], request[order], position[order]
    pooled = np.concatenate([np.asarray(own, dtype=float) for own in requests.itl_s])
    pause_s = TOGETHER * float(np.percentile(pooled, 10)) if len(pooled) else 0.0
    iteration, current = np.zeros(len(time_s), dtype=np.int64), 0
    seen: set[int] = set()
    pauses = np.diff(time_s, prepend=time_s[0]) > pause_s
    for i, owner in enumerate(request.tolist()):
        if pauses[i] or owner in seen:
            current += 1
            seen.clear()
        seen.add(owner)
        iteration[i] = current
    return Tokens(time_s, request, position, iteration)


def _follows(requests: Requests, tokens: Tokens, end_s: Floats) -> NDArray[np.bool_]:
    """Whether each iteration began where the one before ended: somebody was being served already."""
    last = np.zeros(len(requests.start_s), dtype=np.int64)
    np.maximum.at(last, tokens.request, tokens.iteration)
    num_started = np.searchsorted(np.sort(requests.start_s), end_s, side="left")
    num_done = np.cumsum(np.bincount(last, minlength=len(end_s)))
    return np.concatenate([[False], (num_started > num_done)[:-1]])


def _prompts(
    requests: Requests,
    tokens: Tokens,
    end_s: Floats,
    lead: Ints,
    num_decode: Ints,
    max_num_batched_tokens: int,
) -> tuple[Ints, Floats]:
    """Prompt tokens of each iteration, and their (query, key) pairs.

    A prompt ends where its first token is. It filled the budget until then, from the first iteration that was
    planned after it was sent, unless it would have been done sooner: then it waited for something else.
    """
    free = np.where(num_decode > 0, np.maximum(max_num_batched_tokens - num_decode, 0), np.iinfo(np.int64).max)
    prompt_tokens, pairs = np.zeros(len(end_s), dtype=np.int64), np.zeros(len(end_s))
    firsts = np.flatnonzero(tokens.position == 0)
    for i in firsts[np.lexsort((requests.start_s[tokens.request[firsts]], tokens.iteration[firsts]))]:
        row, k = int(tokens.request[i]), int(tokens.iteration[i])
        sent_in = int(np.searchsorted(end_s, requests.start_s[row], side="right"))
        earliest = sent_in + int(lead[sent_in])
        length, first, room = int(requests.prompt_tokens[row]), k, 0
        while first > earliest and room + free[first - 1] < length:
            first -= 1
            room += int(free[first])
        done = 0
        for j in range(first, k + 1):
            num = min(length - done, int(free[j])) if j < k else length - done
            prompt_tokens[j] += num
            pairs[j] += num * done + num * (num + 1) / 2
            free[j] = max(0, free[j] - num) if num_decode[j] else free[j]
            done += num
    return prompt_tokens, pairs
