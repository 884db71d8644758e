"""Draws the traffic of a run: every request of every class, merged into columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from sim.errors import ScenarioError
from sim.options import Options
from sim.request import NEVER
from sim.rng import stream
from sim.workload.base import (
    LENGTHS,
    TRACES,
    ArrivalOptions,
    Arrivals,
    ClientPool,
    Ints,
    LengthOptions,
    Lengths,
    TraceOptions,
    TraceRows,
    Traffic,
    no_shared_tokens,
)
from sim.workload.cancel import CancelAfterTime, CancelAfterTokens
from sim.workload.conversation import check_turns
from sim.workload.files import resolve_path
from sim.workload.joint import build_joint
from sim.workload.replay import play
from sim.workload.starts import Starts, joined
from sim.workload.texts import Texts, TokensOf, TrafficTexts
from sim.workload.times import up_to
from sim.workload.traffic import Scale, TrafficClass, build_arrivals, check_traffic, is_closed

OptionsT = TypeVar("OptionsT", bound=Options)


def draw_traffic(
    classes: Sequence[TrafficClass],
    *,
    arrivals: ArrivalOptions | None,
    num_requests: int | None,
    duration_ns: int | None,
    seed: int,
    folder: Path,
    scale: Scale | None = None,
) -> Traffic:
    """All requests of a run.

    Open classes are merged by arrival; at equal times the class listed first goes first (classes that
    share `arrivals` count as one, at the place of the first of them). Closed-loop rows follow, class by
    class. `num_requests` is the number of all of them: closed loops take what they ask for, the open
    classes' earliest arrivals the rest. A conversation counts with all of its turns, which are rows one
    after the other; the last one is cut to the number. No open request arrives and no open conversation
    begins after `duration_ns`. Relative paths start at `folder`; `scale` multiplies rates and lengths. Raises
    ScenarioError, and TraceError for files.
    """
    check_traffic(classes, arrivals=arrivals, num_requests=num_requests, duration_ns=duration_ns)
    drawing = _Drawing(classes, arrivals, num_requests, duration_ns, seed, folder, scale or Scale())
    return drawing.draw()


@dataclass(frozen=True)
class _Drawing:
    """One call of `draw_traffic`, with what its steps share."""

    classes: Sequence[TrafficClass]
    arrivals: ArrivalOptions | None
    num_requests: int | None
    duration_ns: int | None
    seed: int
    folder: Path
    scale: Scale
    traces: dict[int, TraceRows] = field(default_factory=dict)
    """Rows that traces play, by class; filled by `_open_source`."""
    texts: dict[int, TokensOf] = field(default_factory=dict)
    """Token identity by class and row of the class, where there is any; filled by `_class_columns`."""

    def draw(self) -> Traffic:
        starts = self._starts()
        if not len(starts):
            raise ScenarioError(
                "run.duration_s", "no request arrives within it", remedy="Raise it, or the rate of arrivals."
            )
        with _at("traffic"):
            class_index, arrival_ns, think_ns, turn = starts.rows()
        columns = {name: np.zeros(len(class_index), dtype=np.int64) for name in _FILLED}
        leaves_at_deadline = np.zeros(len(class_index), dtype=np.bool_)
        for index, traffic_class in enumerate(self.classes):
            rows = np.flatnonzero(class_index == index)
            for name, values in self._class_columns(index, turn[rows]).items():
                columns[name][rows] = values
            think_ns[rows] += self._turns_think_ns(index, turn[rows])
            leaves_at_deadline[rows] = traffic_class.cancel is not None and traffic_class.cancel.kind == "deadline"
        return Traffic(
            class_names=tuple(traffic_class.name for traffic_class in self.classes),
            pools=tuple(self._pool(traffic_class) for traffic_class in self.classes),
            class_index=class_index,
            arrival_ns=arrival_ns,
            think_ns=think_ns,
            **columns,
            leaves_at_deadline=leaves_at_deadline,
            tokens=TrafficTexts(class_index, self.texts) if self.texts else no_shared_tokens,
            has_next_turn=np.append(turn[1:] > 0, False) if turn.any() else None,
        )

    # --- when -------------------------------------------------------------------------------------

    def _starts(self) -> Starts:
        """All that arrives by itself: the open classes' by arrival, then the closed loops'."""
        closed = {i: self._num_closed(c) for i, c in enumerate(self.classes) if is_closed(c)}
        room = None if self.num_requests is None else self.num_requests - sum(closed.values())
        if room is not None and room < 0:
            raise ScenarioError(
                "run.num_requests",
                f"closed loops ask for {sum(closed.values())} requests, the run has {self.num_requests}",
                remedy="Raise it, or lower num_requests of the classes.",
            )
        opened = joined(self._open_source(index, room) for index in range(len(self.classes)))
        loops = [self._closed_source(index, number) for index, number in closed.items()]
        return joined([opened.by_arrival().up_to(room), *loops])

    def _num_closed(self, traffic_class: TrafficClass) -> int:
        number = traffic_class.num_requests or self.num_requests
        assert isinstance(number, int)  # check_traffic asks for it
        return number

    def _closed_source(self, index: int, number: int) -> Starts:
        options = self.classes[index].arrivals
        assert isinstance(options, ArrivalOptions)  # a closed loop has them
        with _at(f"traffic[{index}].arrivals"):
            think_ns = self._process(options).draw(number, None, self._stream(index, "think"))
        class_index, arrival_ns = np.full(number, index, dtype=np.int64), np.full(number, NEVER, dtype=np.int64)
        return Starts(class_index, arrival_ns, think_ns, self._num_turns(class_index)).up_to(number)

    def _open_source(self, index: int, room: int | None) -> Starts:
        """What a class brings; the first that shares brings all that is shared."""
        traffic_class = self.classes[index]
        arrival_ns: Ints = np.empty(0, dtype=np.int64)
        if traffic_class.share is not None:
            return self._open_starts(*self._shared_source(index, room))
        numbers = [n for n in (room, traffic_class.num_requests) if n is not None]
        limit = min(numbers, default=None)
        if traffic_class.trace is not None:
            self.traces[index] = self._trace_rows(index, traffic_class.trace, limit)
            arrival_ns = up_to(self.duration_ns, self.traces[index].arrival_ns)[:limit]
        elif traffic_class.arrivals is not None and not is_closed(traffic_class):
            with _at(f"traffic[{index}].arrivals"):
                process = self._process(traffic_class.arrivals)
                arrival_ns = process.draw(limit, self.duration_ns, self._stream(index, "arrivals"))
        return self._open_starts(np.full(len(arrival_ns), index, dtype=np.int64), arrival_ns).up_to(limit)

    def _open_starts(self, class_index: Ints, arrival_ns: Ints) -> Starts:
        return Starts(class_index, arrival_ns, np.zeros_like(arrival_ns), self._num_turns(class_index))

    def _num_turns(self, class_index: Ints) -> Ints:
        """How many requests come of each start; 1 where a class has no conversations."""
        num_turns = np.ones(len(class_index), dtype=np.int64)
        for index, traffic_class in enumerate(self.classes):
            if traffic_class.conversation is None:
                continue
            mine, place = class_index == index, f"traffic[{index}].conversation.turns"
            turns = self._build_lengths(traffic_class.conversation.turns, place)
            with _at(place):
                num_turns[mine] = check_turns(turns.draw(int(mine.sum()), self._stream(index, "turns")))
        return num_turns

    def _turns_think_ns(self, index: int, turn: Ints) -> Ints:
        """Think time before each request of a class that continues a conversation; 0 for the others."""
        conversation = self.classes[index].conversation
        if conversation is None:
            return np.zeros_like(turn)
        think_ns = conversation.think_time_s.draw(len(turn), self._stream(index, "turn_think"))
        return np.where(turn > 0, think_ns, 0)

    def _shared_source(self, index: int, room: int | None) -> tuple[Ints, Ints]:
        sharing = [i for i, traffic_class in enumerate(self.classes) if traffic_class.share is not None]
        if index != sharing[0] or self.arrivals is None:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        with _at("arrivals"):
            arrival_ns = self._process(self.arrivals).draw(
                room, self.duration_ns, stream(self.seed, "traffic/arrivals")
            )
        upper = np.cumsum([self.classes[i].share or 0.0 for i in sharing])
        drawn = stream(self.seed, "traffic/shares").random(len(arrival_ns)) * upper[-1]
        return np.array(sharing, dtype=np.int64)[np.searchsorted(upper, drawn, side="right")], arrival_ns

    def _process(self, options: ArrivalOptions) -> Arrivals:
        return build_arrivals(options).scaled(self.scale.rate)

    def _pool(self, traffic_class: TrafficClass) -> ClientPool:
        clients = None if traffic_class.arrivals is None else self._process(traffic_class.arrivals).clients
        return ClientPool(num_clients=clients, max_connections=traffic_class.max_connections)

    def _trace_rows(self, index: int, options: TraceOptions, limit: int | None) -> TraceRows:
        place = f"traffic[{index}].trace"
        located = _located(with_existing_path(options, self.folder, place), self.folder, place)
        rows = TRACES.load(options.kind, allow_imports=True).build(located).read()
        scaled = located.model_copy(update={"rate_scale": located.rate_scale * self.scale.rate})
        thin = self._stream(index, "thin")
        return play(rows, scaled, thin, num_requests=limit, duration_ns=self.duration_ns)

    # --- how long, and how they leave -------------------------------------------------------------

    def _class_columns(self, index: int, turn: Ints) -> dict[str, Ints]:
        """The columns of `_FILLED` for the requests of one class; also notes what they have in common."""
        traffic_class, num = self.classes[index], len(turn)
        prompt_tokens, output_tokens = self._scaled_lengths(index, num)
        after_ns, after_tokens = self._cancellations(index, num)
        cap = traffic_class.max_tokens
        max_tokens = output_tokens if cap is None else np.full(num, cap, dtype=np.int64)
        if traffic_class.prefix is not None or traffic_class.conversation is not None:
            texts = self._texts(index, turn, prompt_tokens, np.minimum(output_tokens, max_tokens))
            self.texts[index], prompt_tokens = texts, texts.prompt_tokens()
        elif index in self.traces and self.traces[index].tokens is not no_shared_tokens:
            self.texts[index] = self.traces[index].tokens
        return {
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "max_tokens": max_tokens,
            "priority": np.full(num, traffic_class.priority, dtype=np.int64),
            "cancel_after_ns": after_ns,
            "cancel_after_tokens": after_tokens,
        }

    def _scaled_lengths(self, index: int, num: int) -> tuple[Ints, Ints]:
        prompt_tokens, output_tokens = self._lengths(index, num)
        has_texts = index in self.traces and self.traces[index].tokens is not no_shared_tokens
        if has_texts and self.scale.prompt_tokens < 1:
            raise ScenarioError(
                "scale.prompt_tokens",
                f"{self.scale.prompt_tokens:g} would cut prompts whose tokens the trace names",
                valid="at least 1 for such a trace: what is added to a prompt is new",
            )
        return _times(prompt_tokens, self.scale.prompt_tokens), _times(output_tokens, self.scale.output_tokens)

    def _lengths(self, index: int, num: int) -> tuple[Ints, Ints]:
        traffic_class, place = self.classes[index], f"traffic[{index}]"
        if index in self.traces:
            rows = self.traces[index]
            return rows.prompt_tokens[:num], rows.output_tokens[:num]
        if traffic_class.lengths is not None:
            joint = _located(traffic_class.lengths, self.folder, f"{place}.lengths")
            return build_joint(joint).draw(num, self._stream(index, "lengths"))
        assert isinstance(traffic_class.prompt_tokens, LengthOptions)  # check_traffic asks for it
        assert isinstance(traffic_class.output_tokens, LengthOptions)  # check_traffic asks for it
        prompts = self._build_lengths(traffic_class.prompt_tokens, f"{place}.prompt_tokens")
        outputs = self._build_lengths(traffic_class.output_tokens, f"{place}.output_tokens")
        return prompts.draw(num, self._stream(index, "prompt")), outputs.draw(num, self._stream(index, "output"))

    def _texts(self, index: int, turn: Ints, new_tokens: Ints, answer_tokens: Ints) -> Texts:
        """What the requests of a class with common prefixes or conversations say."""
        traffic_class, place = self.classes[index], f"traffic[{index}].prefix.tokens"
        prefix, group = traffic_class.prefix, None
        prefix_tokens: Ints = np.empty(0, dtype=np.int64)
        if prefix is not None:
            lengths = self._build_lengths(prefix.tokens, place)
            prefix_tokens = lengths.draw(prefix.groups, self._stream(index, "prefix_tokens"))
            drawn = prefix.draw_groups(len(turn), self._stream(index, "prefix_group"))
            group = drawn[np.arange(len(turn)) - turn]
        is_conversation = traffic_class.conversation is not None
        return Texts(traffic_class.name, turn, new_tokens, answer_tokens, is_conversation, group, prefix_tokens)

    def _cancellations(self, index: int, num: int) -> tuple[Ints, Ints]:
        """After how many nanoseconds and after how many tokens each request's client leaves."""
        after_ns, after_tokens = np.full((2, num), NEVER, dtype=np.int64)
        cancel = self.classes[index].cancel
        if cancel is None:
            return after_ns, after_tokens
        leaves = self._stream(index, "cancel").random(num) < cancel.probability
        rng = self._stream(index, "cancel_after")
        if isinstance(cancel, CancelAfterTokens):
            lengths = self._build_lengths(cancel.tokens, f"traffic[{index}].cancel.tokens")
            after_tokens[leaves] = lengths.draw(num, rng)[leaves]
        elif isinstance(cancel, CancelAfterTime):
            after_ns[leaves] = cancel.after_s.draw(num, rng)[leaves]
        else:
            after_ns[leaves] = cancel.after_ns
        return after_ns, after_tokens

    def _build_lengths(self, options: LengthOptions, place: str) -> Lengths:
        located = _located(options, self.folder, place)
        return LENGTHS.load(options.kind, allow_imports=True).build(located)

    def _stream(self, index: int, what: str) -> np.random.Generator:
        return stream(self.seed, f"traffic/{self.classes[index].name}/{what}")


_FILLED = ("prompt_tokens", "output_tokens", "max_tokens", "priority", "cancel_after_ns", "cancel_after_tokens")


def _times(lengths: Ints, factor: float) -> Ints:
    return lengths if factor == 1 else np.maximum(1, np.rint(lengths * factor)).astype(np.int64)


def with_existing_path(options: TraceOptions, folder: Path, place: str = "") -> TraceOptions:
    """The same options without a `fallback`: it has become the path if there is no file at `path`."""
    path = options.path
    if options.fallback is not None and not resolve_path(path, folder, place=f"{place}.path").exists():
        path = options.fallback
    return options.model_copy(update={"path": path, "fallback": None})


def _located(options: OptionsT, folder: Path, place: str) -> OptionsT:
    """The same options with their `path`, if they have one, as this process can open it."""
    path = getattr(options, "path", None)
    if path is None:
        return options
    return options.model_copy(update={"path": str(resolve_path(path, folder, place=f"{place}.path"))})


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Gives a ScenarioError from inside the place that only the caller knows."""
    try:
        yield
    except ScenarioError as error:
        raise ScenarioError(place, error.found, valid=error.valid, remedy=error.remedy) from error
