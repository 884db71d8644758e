"""The results of a run: its tables, and everything that is computed from them when asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sim.clock import NS_PER_MS, NS_PER_S
from sim.errors import UserError
from sim.metrics import summary as shape
from sim.metrics.bands import Attribution, report_causes
from sim.metrics.calls import call_latencies, of_calls, report_calls
from sim.metrics.cancellation import cancellations
from sim.metrics.causes import Causes
from sim.metrics.distribution import Bools, Distribution, Ints, each_bucket
from sim.metrics.facts import RunFacts
from sim.metrics.fairness import fairness
from sim.metrics.fleet import fleet_iterations, fleet_kv, replica_summary
from sim.metrics.latency import LATENCIES, Latency, request_latencies
from sim.metrics.limits import Breakdown, LimitTimes, find_limits, limit_times
from sim.metrics.load import (
    client_load,
    count_outcomes,
    count_turned_away,
    gaps_by_batch_size,
    iteration_load,
    kv_load,
    waste,
)
from sim.metrics.occupancy import Spans, owned_spans
from sim.metrics.replicas import split_tables
from sim.metrics.shares import WorkShares
from sim.metrics.slo import GOODPUT, SloTerm, good_requests, parse_slo, report_goodput, report_slo
from sim.metrics.steady import report_steadiness
from sim.metrics.throughput import throughput
from sim.metrics.tokens import Gaps, TokenTimes
from sim.metrics.window import Window, measurement_window, run_window
from sim.record import Tables
from sim.request import NEVER, Outcome
from sim.storage import TABLE_NAMES, atomic_path, load_run, save_run

if TYPE_CHECKING:
    import pandas as pd


class Difference(NamedTuple):
    """One number in two runs; `ratio` is theirs over ours, None where it makes no sense."""

    ours: float | None
    theirs: float | None
    ratio: float | None


class Results:
    """One run, of one engine or of a fleet. Attributes are computed when first asked for; the tables never change."""

    def __init__(
        self,
        tables: Tables,
        facts: RunFacts,
        breakdown: Breakdown,
        shares: WorkShares,
        fleet: Results | None = None,
    ) -> None:
        """`breakdown` and `shares` are what the cost model says of the tables' `step_arrays`.

        `fleet` is the run of the fleet that this engine was a replica of, in whose window it is measured.
        """
        self.tables = tables
        self.facts = facts
        self.breakdown = breakdown
        self.shares = shares
        self._fleet = fleet

    @cached_property
    def replicas(self) -> tuple[Results, ...]:
        """Each replica of a fleet as a run of its own, measured in the fleet's window; none if there is no fleet.

        Requests that never left their client are in the fleet's tables only.
        """
        return tuple(self._replica(index) for index in range(len(self.facts.replicas)))

    @property
    def engines(self) -> tuple[Results, ...]:
        """The replicas, or this run itself: whatever is asked about a device is asked of each of them."""
        return self.replicas or (self,)

    @cached_property
    def tokens(self) -> TokenTimes:
        """When tokens reached clients."""
        return TokenTimes(self.tables)

    @cached_property
    def run_window(self) -> Window:
        """From the first arrival to the end of the run."""
        if self._fleet is not None:
            return self._fleet.run_window
        return run_window(self.tables, self.facts.stopped_ns)

    @cached_property
    def window(self) -> Window:
        """The measurement window."""
        if self._fleet is not None:
            return self._fleet.window
        return measurement_window(self.tables, self.run_window, self.facts.warmup_s, self.facts.cut_drain)

    @cached_property
    def spans(self) -> Spans:
        """Which iteration owns which part of the window; meaningless for a fleet, whose iterations overlap."""
        return owned_spans(self.tables.iterations, self.window)

    @cached_property
    def is_measured(self) -> Bools:
        """Per request: whether it arrived in the window."""
        return self.window.has_arrival_of(self.tables.requests)

    @cached_property
    def latencies(self) -> dict[str, Latency]:
        """Every latency of every request, by name (`ttft`, `e2e`, ...)."""
        return request_latencies(self.tables.requests, self.run_window.end_ns, self.facts.is_streaming)

    @cached_property
    def call_latency(self) -> Latency | None:
        """The latency of every call with several prompts, in order of the column `call`; None without such calls.

        None too for a replica of a fleet: a call's prompts may go to several.
        """
        requests = self.tables.requests
        if self._fleet is not None or not (requests.get("call", np.empty(0)) != NEVER).any():
            return None
        return call_latencies(requests, self.run_window.end_ns, self.facts.is_streaming)

    @property
    def calls(self) -> shape.Calls | None:
        """Client batching: calls and how long they took; None where `call_latency` is."""
        if self.call_latency is None:
            return None
        return report_calls(self.tables.requests, self.call_latency, self.is_measured)

    @cached_property
    def gaps(self) -> Gaps:
        """The inter-token gaps of the requests that arrived in the window (none if answers are not streamed)."""
        return self.tokens.gaps(self.is_measured & self.facts.is_streaming)

    def distribution(self, metric: str, of: Bools | None = None) -> Distribution:
        """The pooled values of `ttft`, `itl`, `tpot`, `ntpot`, `e2e`, `queue`, ... in nanoseconds.

        `of` selects requests by their row; default: those that arrived in the window.
        """
        if metric == "itl":
            gaps = self.gaps if of is None else self.tokens.gaps(of & self.facts.is_streaming)
            return gaps.distribution()
        return self.latencies[metric].distribution(self.is_measured if of is None else of)

    @cached_property
    def slo_terms(self) -> tuple[SloTerm, ...]:
        """The run's SLO. Raises ScenarioError if it cannot be read."""
        return parse_slo(self.facts.slo)

    @cached_property
    def is_good(self) -> Bools | None:
        """Per request: whether it keeps its class's SLO (or else the run's) by itself; None without any SLO."""
        if not self.facts.slo and not self.facts.class_slos:
            return None
        good = self._keeps(self.slo_terms)
        for name, slo in self.facts.class_slos.items():
            good = np.where(self._is_of_class(name), self._keeps(parse_slo(slo, f"slo of {name}")), good)
        return good

    @cached_property
    def limits(self) -> shape.LimitsReport:
        """What limits the run."""
        return find_limits([engine.limit_times for engine in self.engines], self.facts.is_closed_loop)

    @cached_property
    def limit_times(self) -> LimitTimes:
        """How the time of this engine divides."""
        everyone = (self._fleet or self).tables.requests
        return limit_times(self.tables, self.spans, self.breakdown, self.run_window.end_ns, everyone)

    @cached_property
    def kv(self) -> shape.KVUse:
        """The use of the KV pool, or of all pools of a fleet together."""
        if self.replicas:
            return fleet_kv([replica.kv for replica in self.replicas])
        return kv_load(self.tables, self.spans, self.facts.num_blocks, self.facts.usable_blocks, self.facts.block_size)

    @cached_property
    def iterations(self) -> shape.Iterations:
        """Batches and queues. Of a fleet: running and waiting requests of all replicas together, peaks of any one."""
        load = iteration_load(self.tables, self.spans, self.run_window.end_ns)
        return fleet_iterations(load, [replica.iterations for replica in self.replicas]) if self.replicas else load

    @cached_property
    def ttft_causes(self) -> Attribution:
        """The TTFT of every request that arrived in the window and has one, by cause; replica by replica."""
        if self.replicas:
            return Attribution.joined([replica.ttft_causes for replica in self.replicas])
        latency = self.latencies["ttft"]
        rows = np.flatnonzero(latency.is_known & self.is_measured)
        parts = self._causes.ttft(rows, self.facts.is_streaming)
        return Attribution(np.asarray(latency.values_ns[rows]), np.ones(len(rows), dtype=np.int64), parts)

    @cached_property
    def itl_causes(self) -> Attribution:
        """The inter-token gaps of the requests that arrived in the window, by cause; replica by replica.

        Of one engine in the order of `gaps`.
        """
        if self.replicas:
            return Attribution.joined([replica.itl_causes for replica in self.replicas])
        return Attribution(self.gaps.values_ns, self.gaps.weights, self._causes.itl(self.gaps, self.tokens))

    @cached_property
    def causes(self) -> shape.CausesReport:
        """What latencies are made of, and what sets the p99 apart from the median."""
        return report_causes(self.ttft_causes, self.itl_causes)

    @cached_property
    def censored(self) -> dict[str, list[str]]:
        """Metric -> the statistics that requests which had not ended could still move."""
        censored = {}
        if self.call_latency is not None:
            calls = of_calls(self.tables.requests, self.is_measured)
            statistics = self.call_latency.distribution(calls).censored_by(self.call_latency.open_ns(calls))
            if statistics:
                censored["call_latency_ms"] = statistics
        for name in (*LATENCIES, "itl"):
            open_ns = self._open_ns(name, self.is_measured)
            statistics = self._measured[name].censored_by(open_ns)
            if statistics:
                censored[f"{name}_ms"] = statistics
        return censored

    def summary(self) -> dict[str, Any]:
        """All of it as plain data; the content of `summary.json` (see `sim.metrics.summary`)."""
        return self._summary.model_dump()

    def to_frame(self, table: str = "requests") -> pd.DataFrame:
        """A table as a DataFrame: `requests` (with latencies in ms, NaN where unknown), `iterations`, ..."""
        import pandas as pd

        if table not in TABLE_NAMES:
            raise UserError("", f"there is no table {table!r}", valid=f"known: {', '.join(TABLE_NAMES)}")
        frame = pd.DataFrame(getattr(self.tables, table))
        if table == "requests":
            for name, latency in self.latencies.items():
                frame[f"{name}_ms"] = np.where(latency.is_known, latency.values_ns / NS_PER_MS, np.nan)
        return frame

    def diff(self, other: Results) -> dict[str, Difference]:
        """Dotted key of the summary -> its number here, in `other`, and their ratio. Equal numbers are left out."""
        ours, theirs = dict(_numbers(self.summary())), dict(_numbers(other.summary()))
        return {
            key: _difference(ours.get(key), theirs.get(key))
            for key in ours | theirs
            if ours.get(key) != theirs.get(key)
        }

    def save(self, folder: str | Path) -> list[Path]:
        """Write `summary.json` and a Parquet file per table; makes the folder. Returns what was written.

        Each file appears under its name only when it is complete.
        """
        summary = json.dumps(self.summary(), indent=2, allow_nan=False) + "\n"
        paths = save_run(Path(folder), self.tables, self.facts, self.breakdown, self.shares)
        paths.append(Path(folder) / "summary.json")
        with atomic_path(paths[-1]) as path:
            path.write_text(summary, encoding="utf-8")
        return paths

    @classmethod
    def load(cls, folder: str | Path) -> Results:
        """The results that `save` wrote. Raises UserError if `folder` holds none."""
        return cls(*load_run(Path(folder)))

    @cached_property
    def _causes(self) -> Causes:
        return Causes(self.tables, self.shares)

    @cached_property
    def _measured(self) -> dict[str, Distribution]:
        return {name: self.distribution(name) for name in (*LATENCIES, "itl")}

    @cached_property
    def _summary(self) -> shape.Summary:
        tables, facts = self.tables, self.facts
        everyone = np.ones(len(tables.requests["request"]), dtype=np.bool_)
        return shape.Summary(
            metrics=self._metrics(self._measured),
            throughput=self._throughput(everyone),
            outcomes=count_outcomes(tables.requests, everyone),
            turned_away=count_turned_away(tables.requests, everyone, facts.turn_away_reasons),
            kv=self.kv,
            iterations=self.iterations,
            replicas=self._replica_summaries(),
            limits=self.limits,
            causes=self.causes,
            makespan_s=self.run_window.duration_ns / NS_PER_S,
            slo=self._slo_report(facts.slo, "slo", self.is_measured),
            waste=waste(tables),
            client=client_load(tables.requests, self.window, self.run_window.end_ns),
            calls=self.calls,
            cancellation=cancellations([(engine.tables, engine.tokens) for engine in self.engines]),
            window=self._window_report(),
            steady=report_steadiness(tables.requests, self.run_window.end_ns, facts.is_closed_loop),
            censored=self.censored,
            fairness=fairness(
                tables.requests, self.tokens, self.window, self.run_window.end_ns, self.latencies, facts.class_names
            ),
            by_class={name: self._class_summary(name) for name in facts.class_names},
            by_prompt_tokens=[
                shape.PromptBucket(low=low, high=high, ttft_ms=values.stats_ms())
                for low, high, values in self._by_size("ttft", "prompt_tokens")
            ],
            by_output_tokens=[
                shape.OutputBucket(low=low, high=high, e2e_ms=values.stats_ms())
                for low, high, values in self._by_size("e2e", "output_tokens")
            ],
            by_active_sequences=gaps_by_batch_size(self.gaps, tables.iterations),
            definitions=shape.DEFINITIONS,
            aliases=shape.ALIASES,
            cost=dict(facts.cost) or None,
            provenance=dict(facts.provenance),
        )

    def _replica(self, index: int) -> Results:
        tables, facts = self.tables, self.facts.replicas[index]
        is_mine = tables.iterations["replica"] == index
        chunk_is_mine = is_mine[tables.chunks["iteration"]]
        own = replace(
            self.facts,
            replicas=(),
            num_blocks=facts.num_blocks,
            usable_blocks=facts.usable_blocks,
            block_size=facts.block_size,
        )
        breakdown = {resource: ns[is_mine] for resource, ns in self.breakdown.items()}
        shares = WorkShares(self.shares.decode[is_mine], self.shares.chunk[chunk_is_mine])
        return Results(split_tables(tables, index), own, breakdown, shares, fleet=self)

    def _replica_summaries(self) -> list[shape.ReplicaSummary]:
        named = zip(self.facts.replicas, self.replicas, strict=True)
        return [replica_summary(facts.name, run.tables, run.kv, run.iterations, run.limits) for facts, run in named]

    def _metrics(self, distributions: Mapping[str, Distribution]) -> shape.Metrics:
        return shape.Metrics(**{f"{name}_ms": values.stats_ms() for name, values in distributions.items()})

    def _is_of_class(self, name: str) -> Bools:
        mine: Bools = self.tables.requests["class_index"] == self.facts.class_names.index(name)
        return mine

    def _keeps(self, terms: tuple[SloTerm, ...]) -> Bools:
        return good_requests(terms, self.latencies, self.tokens, self.facts.is_streaming)

    def _throughput(self, of: Bools) -> shape.Throughput:
        streaming = self.facts.is_streaming
        return throughput(self.tables.requests, self.tokens, self.window, streaming, of, self.is_good)

    def _open_ns(self, metric: str, of: Bools) -> Ints:
        """What the latencies that the end of the run cut off had come to."""
        if metric != "itl":
            return self.latencies[metric].open_ns(of)
        last_ns = self.tokens.last_token_ns()
        is_open = of & (self.tables.requests["outcome"] == Outcome.UNFINISHED) & (last_ns != NEVER)
        ages_ns: Ints = self.run_window.end_ns - last_ns[is_open & self.facts.is_streaming]
        return ages_ns

    def _slo_report(self, slo: Mapping[str, float], place: str, of: Bools) -> list[shape.SloTermReport]:
        def values(metric: str) -> Distribution:
            return self._measured[metric] if of is self.is_measured else self.distribution(metric, of)

        terms = parse_slo(slo, place)
        reports = [report_slo(term, values(term.metric), self._open_ns(term.metric, of)) for term in terms]
        if GOODPUT in slo and self.is_good is not None:
            is_open = bool((of & (self.tables.requests["outcome"] == Outcome.UNFINISHED)).any())
            share = float(self.is_good[of].mean()) if of.any() else None
            reports.append(report_goodput(slo[GOODPUT], share, is_open))
        return reports

    def _class_summary(self, name: str) -> shape.ClassSummary:
        mine = self._is_of_class(name)
        measured = self.is_measured if len(self.facts.class_names) == 1 else mine & self.is_measured
        distributions = self._measured
        if measured is not self.is_measured:
            distributions = {metric: self.distribution(metric, measured) for metric in distributions}
        return shape.ClassSummary(
            metrics=self._metrics(distributions),
            throughput=self._throughput(mine),
            outcomes=count_outcomes(self.tables.requests, mine),
            turned_away=count_turned_away(self.tables.requests, mine, self.facts.turn_away_reasons),
            slo=self._slo_report(self.facts.class_slos.get(name, {}), f"slo of {name}", measured),
        )

    def _by_size(self, metric: str, size: str) -> Iterator[tuple[int, int, Distribution]]:
        latency = self.latencies[metric]
        known = np.flatnonzero(latency.is_known & self.is_measured)
        for low, high, inside in each_bucket(self.tables.requests[size][known]):
            yield low, high, Distribution(latency.values_ns[known[inside]])

    def _window_report(self) -> shape.WindowReport:
        window, facts = self.window, self.facts
        start_s, end_s = window.start_ns / NS_PER_S, window.end_ns / NS_PER_S
        num_measured = int(np.count_nonzero(self.is_measured))
        num_cut = len(self.is_measured) - num_measured
        warmup = f"the first {facts.warmup_s:g} s are cut as warm-up ({num_cut} requests)" if facts.warmup_s else ""
        drain = "what follows the last arrival is cut from rates and shares" if facts.cut_drain else ""
        cuts = "; ".join(filter(None, (warmup, drain, self._stop()))) or "nothing is cut"
        whole = "measured" if facts.stopped_ns is None else "stopped"
        return shape.WindowReport(
            start_s=start_s,
            end_s=end_s,
            warmup_s=facts.warmup_s,
            drain="cut" if facts.cut_drain else whole,
            num_measured=num_measured,
            num_cut=num_cut,
            description=f"{num_measured:,} requests measured, from {start_s:.3f} s to {end_s:.3f} s; {cuts}",
        )

    def _stop(self) -> str:
        """When the run was stopped and whom that left, in words; empty if it ran dry."""
        if self.facts.stopped_ns is None:
            return ""
        num_unfinished = np.count_nonzero(self.tables.requests["outcome"] == Outcome.UNFINISHED)
        stopped_s = self.facts.stopped_ns / NS_PER_S
        return f"the run was stopped at {stopped_s:.3f} s with {num_unfinished} requests unfinished"


def _numbers(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number in nested mappings under its dotted key."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


def _difference(ours: float | None, theirs: float | None) -> Difference:
    return Difference(ours, theirs, None if theirs is None or not ours else theirs / ours)
