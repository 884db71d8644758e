"""The shape of `summary.json`: every key, its meaning and unit. The JSON Schema is generated from it.

Counts are of the whole run, latencies of the requests that arrived in the measurement window, rates, means
and shares of the window. A number that was not observed is null.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from sim.options import Options


class Stats(Options):
    """A distribution in milliseconds; percentiles interpolate linearly, as numpy.percentile does."""

    count: int = Field(description="values observed")
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p999: float | None
    max: float | None


class Metrics(Options):
    """Latencies."""

    ttft_ms: Stats = Field(
        description="time to first token: from the request's arrival at its client to its first token (to the whole "
        "answer, if answers are not streamed); of all requests that got one"
    )
    ttft_after_client_queue_ms: Stats = Field(
        description="time to first token from when the request was sent to the engine, after waiting for the "
        "client's own limit on requests at the server"
    )
    itl_ms: Stats = Field(
        description="inter-token latency: every gap between consecutive tokens of a request, pooled over all "
        "requests (those that left early included); none if answers are not streamed"
    )
    tpot_ms: Stats = Field(
        description="time per output token after the first: (last token - first token) / (output tokens - 1), of "
        "finished requests with two tokens or more; none if answers are not streamed"
    )
    ntpot_ms: Stats = Field(
        description="normalized time per output token: end-to-end latency / output tokens, of finished requests"
    )
    e2e_ms: Stats = Field(
        description="end-to-end latency: from the request's arrival at its client to the end of its answer, of "
        "finished requests"
    )
    queue_ms: Stats = Field(
        description="time in the engine's queue: from reaching the engine to the start of the step that first "
        "admits the request"
    )
    client_queue_ms: Stats = Field(
        description="time at the client: from arrival to being sent, because of the client's own limit on requests at "
        "the server"
    )


class Throughput(Options):
    """Rates over the measurement window."""

    requests_per_s: float | None = Field(description="answers completed")
    output_tokens_per_s: float | None = Field(
        description="output tokens received by clients, those of requests that left early included"
    )
    goodput_requests_per_s: float | None = Field(
        description="answers completed by requests that keep every limit of the SLO by themselves; null without an SLO"
    )
    good_share: float | None = Field(
        description="requests that keep every limit, as a share of all that arrived in the window; null without an SLO"
    )


class Outcomes(Options):
    """How the requests of the whole run ended; the counts add up to those that arrived."""

    finished: int
    cancelled: int = Field(description="the client left")
    rejected: int = Field(description="turned away: can never fit, or a door refused it")
    timed_out: int = Field(description="the client left at its deadline, or the request waited longer than it may")
    unfinished: int = Field(description="the run ended first")


class KVSplit(Options):
    """Where the KV pool goes: shares of the usable blocks over the time of iterations; the rest is free, unasked for.

    As in Kwon et al. 2023 (PagedAttention), figure 2, but that a stretch's rounding counts as internal.
    """

    token_share: float | None = Field(description="tokens in KV")
    reserved_share: float | None = Field(description="held for tokens to come of the requests that hold it")
    internal_fragmentation_share: float | None = Field(
        description="held, and never to be filled: answers shorter than what was reserved, rounding"
    )
    external_fragmentation_share: float | None = Field(
        description="free while the head of the queue waits for KV: too little of it, or in too small pieces"
    )


class KVUse(Options):
    """The KV pool. Usage is a share of the usable blocks; means are over time, idle time included."""

    num_blocks: int = Field(description="blocks of the pool, the null block (where there is one) included")
    usable_blocks: int
    block_size: int = Field(description="tokens per block")
    peak_usage: float
    mean_usage: float | None
    mean_reserved_unused_tokens: float | None = Field(
        description="what held blocks had room for beyond the tokens in them: reservations and rounding"
    )
    reserved_unused_share: float = Field(description="the same as a share of what held blocks had room for")
    split: KVSplit
    num_preemptions: int
    max_preemptions: int = Field(description="most that one request was preempted")
    recomputed_tokens: int = Field(description="tokens whose KV preemptions threw away")
    prefill_tokens: int = Field(description="tokens computed as prefill, those computed anew included")
    recomputed_share: float = Field(description="recomputed tokens as a share of the prefill tokens: wasted prefill")
    cached_prompt_tokens: int = Field(description="prompt tokens that a prefix cache supplied")


class Iterations(Options):
    """Batches and queues. Requests are averaged over time (idle time: none running), tokens over iterations."""

    count: int = Field(description="iterations that computed something")
    mean_num_running: float | None
    peak_num_running: int
    mean_num_waiting: float | None = Field(description="requests in the engine that were never admitted yet, exact")
    peak_num_waiting: int = Field(description="longest queue that a step met, preempted requests included")
    mean_scheduled_tokens: float | None = Field(description="tokens computed per iteration")
    mean_prefill_tokens: float | None
    mean_decode_tokens: float | None
    busy_share: float | None = Field(description="share of time in which an iteration was planned for or ran")


class Waste(Options):
    """Work and room for nobody, over the whole run."""

    padding_tokens: int = Field(description="rows computed for no request")
    padding_share: float = Field(description="the same as a share of all tokens computed")
    finished_slot_s: float = Field(description="time that finished requests held a place in the batch, summed, seconds")
    finished_slot_share: float = Field(description="the same as a share of all time that requests held places")


class ClientQueue(Options):
    """Requests that waited at their client, because of its own limit on requests at the server."""

    mean_num_waiting: float | None
    num_delayed: int = Field(description="requests that waited there at all")


class Calls(Options):
    """API calls with several prompts, each of which is a request of its own."""

    num_calls: int = Field(description="calls that arrived, whole run")
    num_answered: int = Field(description="those whose prompts were all answered")
    mean_prompts: float = Field(description="prompts of a call, on average")
    call_latency_ms: Stats = Field(
        description="from a call's arrival at its client to the end of the last answer to its prompts, of calls whose "
        "prompts were all answered"
    )


class Cancellation(Options):
    """What it took to notice that clients had left, and what was computed for them meanwhile."""

    num_departed: int = Field(description="requests whose client left")
    to_free_ms: Stats = Field(description="from the departure to the KV being free, of requests that held some")
    to_reuse_ms: Stats = Field(description="from the departure to the first step after it that takes new blocks")
    tokens_for_departed: int = Field(description="tokens computed by steps that ended after the departure")


class ReplicaSummary(Options):
    """One replica of a fleet: how much came to it, and how busy it was."""

    name: str
    num_requests: int = Field(description="requests that were sent to it")
    output_tokens: int = Field(description="tokens that the clients of these received")
    cached_prompt_tokens: int
    num_preemptions: int
    mean_num_running: float | None
    mean_num_waiting: float | None
    busy_share: float | None
    mean_kv_usage: float | None
    binds: str = Field(description="what limits it")


class Slowdown(Options):
    """End-to-end latency over the time since the first admission, of finished requests; 1: it never waited."""

    count: int
    mean: float | None
    p50: float | None
    p99: float | None
    max: float | None


class ClientService(Options):
    """What one client, that is one request class, got."""

    service: int = Field(
        description="prompt tokens of requests admitted in the window, and twice the output tokens received in it"
    )
    service_per_s: float | None
    longest_wait_ms: float | None = Field(
        description="longest time in the engine's queue before the first admission, of requests that arrived in the "
        "window; those who left before it and those who wait still count with the time until then"
    )
    slowdown: Slowdown


class SlowdownBucket(Options):
    """Finished requests with `low` to `high` tokens, prompt and answer."""

    low: int
    high: int
    slowdown: Slowdown


class Fairness(Options):
    """How service and waits are spread over several clients."""

    by_client: dict[str, ClientService]
    jain_index: float | None = Field(
        description="(sum of services)² / (clients × sum of their squares): 1 if all got the same, 1 / clients if one "
        "got everything"
    )
    service_difference: int = Field(description="service of the client that got most less that of the one with least")
    peak_service_difference: int = Field(description="the largest such difference from the window's start on")
    slowdown_by_tokens: list[SlowdownBucket]


class LimitsReport(Options):
    """What limits the run."""

    shares: dict[str, float] = Field(description="time shares that partition the window; they add up to 1")
    binds: str = Field(description="the share that the verdict names")
    verdict: str


class CauseBand(Options):
    """The mean latency between two percentiles, and what it was spent on."""

    low_percent: float
    high_percent: float
    mean_ms: float
    parts_ms: dict[str, float] = Field(description="cause -> its part of the mean, largest first; they add up to it")


class CausesReport(Options):
    """What latencies are made of, by cause (`sim.metrics.causes` says what each means)."""

    ttft: dict[str, CauseBand] = Field(description="band of percentiles (all, p50, p90, p99) -> causes of TTFT")
    itl: dict[str, CauseBand] = Field(description="the same of the gaps between tokens; empty if there are none")
    verdicts: list[str] = Field(description="for each of the two, what sets its p99 apart from its median")


class SloTermReport(Options):
    """One term of an SLO against the run."""

    term: str = Field(description="as in the scenario: statistic, metric and unit (p99_ttft_ms), or goodput")
    limit: float
    value: float | None
    met: bool | None = Field(description="null: nothing was observed")
    is_censored: bool = Field(description="requests that had not ended could change the value")


TurnedAway = Annotated[
    dict[str, int],
    Field(
        description="requests that the engine itself rejected or timed out, by reason: never_fits, the kind of a door, "
        "queue_timeout (queue_timeout_s, or drop_late of the order edf)"
    ),
]


class ClassSummary(Options):
    """The requests of one class."""

    metrics: Metrics
    throughput: Throughput
    outcomes: Outcomes
    turned_away: TurnedAway
    slo: list[SloTermReport]


class PromptBucket(Options):
    """Requests with prompts of `low` to `high` tokens."""

    low: int
    high: int
    ttft_ms: Stats


class OutputBucket(Options):
    """Finished requests with answers of `low` to `high` tokens."""

    low: int
    high: int
    e2e_ms: Stats


class ActiveBucket(Options):
    """Gaps that ended in a step in which `low` to `high` sequences decoded."""

    low: int
    high: int
    itl_ms: Stats


class WindowReport(Options):
    """The measurement window and what it leaves out."""

    start_s: float
    end_s: float
    warmup_s: float = Field(description="asked for; time from 0 that is not measured")
    drain: str = Field(
        description="measured; cut: the window ends with the last arrival; stopped: the run did not go on to its end"
    )
    num_measured: int = Field(description="requests that arrived in the window")
    num_cut: int = Field(description="requests that arrived before it")
    description: str


class SteadyReport(Options):
    """Whether the run's figures would stay what they are if it went on."""

    is_stable: bool | None = Field(description="false: waits grow with the run; null: cannot be judged")
    offered_requests_per_s: float | None = Field(description="arrivals over the time of arrivals; null: not judged")
    sustainable_requests_per_s: float | None = Field(description="what an unstable run would bear; null for others")
    warmup_requests: int = Field(
        description="first arrivals that met a system still filling up, by MSER-5 on the requests in it; they are "
        "measured here all the same, unless warmup_s cuts them"
    )
    warmup_s: float = Field(description="the same in seconds from the first arrival")
    is_settled: bool = Field(description="false: MSER-5 finds no place in the first half from which the run is steady")
    verdict: str


class Summary(Options):
    """`summary.json`."""

    metrics: Metrics
    throughput: Throughput
    outcomes: Outcomes
    turned_away: TurnedAway
    kv: KVUse
    iterations: Iterations
    replicas: list[ReplicaSummary] = Field(description="of a fleet, in order; empty for one engine without a router")
    limits: LimitsReport
    causes: CausesReport
    makespan_s: float = Field(description="from the first arrival to the last event of the whole run")
    slo: list[SloTermReport]
    waste: Waste
    client: ClientQueue
    calls: Calls | None = Field(description="client batching; null where no request is one of a call's prompts")
    cancellation: Cancellation
    window: WindowReport
    steady: SteadyReport
    censored: dict[str, list[str]] = Field(
        description="metric -> statistics that requests which had not ended when the run did could move by over 1 %"
    )
    fairness: Fairness | None = Field(description="null for a single request class")
    by_class: dict[str, ClassSummary]
    by_prompt_tokens: list[PromptBucket]
    by_output_tokens: list[OutputBucket]
    by_active_sequences: list[ActiveBucket]
    definitions: dict[str, str] = Field(description="metric -> what it means here")
    aliases: dict[str, dict[str, str]] = Field(description="tool -> its own metric name -> ours")
    cost: dict[str, Any] | None = Field(
        description="the measurements that prices rest on, and the shares of iterations and of time at measured "
        "points, interpolated between them and extrapolated beyond; `uncertainty`, where it was asked for: metric -> "
        "statistic -> between which values it lies when costs are off as their fit was; null where nothing is known"
    )
    provenance: dict[str, Any] = Field(description="what reproduces this run")


DEFINITIONS = {name: str(field.description) for name, field in Metrics.model_fields.items()}
"""Metric -> definition."""

ALIASES = {
    "vllm bench serve": {
        "ttft": "ttft_after_client_queue_ms",
        "tpot": "tpot_ms",
        "itl": "itl_ms",
        "e2el": "e2e_ms (less client_queue_ms, where a client limits itself)",
    },
    "sglang bench_serving": {
        "ttft": "ttft_after_client_queue_ms",
        "tpot": "tpot_ms",
        "itl": "itl_ms",
        "e2e_latency": "e2e_ms (less client_queue_ms, where a client limits itself)",
    },
    "aiperf": {
        "time_to_first_token": "ttft_after_client_queue_ms",
        "inter_token_latency": "tpot_ms",
        "inter_chunk_latency": "itl_ms",
        "request_latency": "e2e_ms (less client_queue_ms, where a client limits itself)",
    },
    "guidellm": {
        "time_to_first_token_ms": "ttft_after_client_queue_ms",
        "time_per_output_token_ms": "ntpot_ms (it includes the first token)",
        "inter_token_latency_ms": "tpot_ms (weighted by tokens there)",
    },
    "inference-perf": {
        "time_to_first_token": "ttft_after_client_queue_ms",
        "time_per_output_token": "tpot_ms",
        "inter_token_latency": "itl_ms",
        "normalized_time_per_output_token": "ntpot_ms",
        "request_latency": "e2e_ms (less client_queue_ms, where a client limits itself)",
    },
    "vllm server metrics": {
        "time_to_first_token_seconds": "ttft_after_client_queue_ms",
        "inter_token_latency_seconds": "itl_ms",
        "request_time_per_output_token_seconds": "tpot_ms",
        "e2e_request_latency_seconds": "e2e_ms (less client_queue_ms, where a client limits itself)",
        "request_queue_time_seconds": "queue_ms (there: to the most recent admission)",
    },
}
"""Tool -> its metric -> ours: the same word means different things in different tools."""


def summary_schema() -> dict[str, Any]:
    """The JSON Schema of `summary.json`."""
    return Summary.model_json_schema()
