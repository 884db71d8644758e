"""The traffic of a scenario: request classes, and the drawing of all their requests before the run.

A class says where its requests come from (its own arrivals, a trace, or a share of arrivals that several
classes have in common), how long they are, and how its clients behave. Every column of a class has a
random stream of its own, so that a change to one class's lengths shifts nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from sim.errors import ScenarioError
from sim.options import Count, OneOf, Options, Positive, Share
from sim.workload.base import ARRIVALS, TRACES, ArrivalOptions, Arrivals, TraceOptions
from sim.workload.cancel import CancelField
from sim.workload.conversation import Conversation
from sim.workload.fields import LengthField
from sim.workload.joint import JointLengthOptions
from sim.workload.shared_prefix import SharedPrefix


class Scale(Options):
    """What if there were more, or longer, requests: factors on all classes alike."""

    rate: Positive = Field(default=1.0, description="so many times the arrival rate (closed loops: the clients)")
    prompt_tokens: Positive = Field(default=1.0, description="so many times the prompt lengths")
    output_tokens: Positive = Field(default=1.0, description="so many times the output lengths, before any max_tokens")


class TrafficClass(Options):
    """One entry of a scenario's `traffic`."""

    name: str = Field(
        min_length=1, max_length=100, pattern=r"^[^/\x00-\x1f]+$", description="name of the request class"
    )
    arrivals: Annotated[ArrivalOptions, OneOf(ARRIVALS)] | None = Field(
        default=None, description="when requests arrive"
    )
    trace: Annotated[TraceOptions, OneOf(TRACES)] | None = Field(
        default=None, description="a recorded trace that gives arrivals and lengths"
    )
    share: Share | None = Field(
        default=None, description="part of the scenario's common `arrivals`, chosen at random; the shares add up to 1"
    )
    num_requests: Count | None = Field(default=None, description="at most so many requests of this class")
    prompt_tokens: LengthField | None = Field(default=None, description="prompt lengths, tokens")
    output_tokens: LengthField | None = Field(
        default=None, description="lengths of answers that nothing cuts short, tokens"
    )
    lengths: JointLengthOptions | None = Field(
        default=None, description="prompt and output lengths that belong together, in place of the two above"
    )
    prefix: SharedPrefix | None = Field(
        default=None, description="common texts that prompts begin with, on top of their own lengths"
    )
    conversation: Conversation | None = Field(
        default=None,
        description="each arrival starts several turns; prompt lengths are then those of a turn's new tokens, on top "
        "of all that was said before",
    )
    max_tokens: Count | None = Field(
        default=None,
        description="cap on the output that the scheduler knows; shorter answers end by an unforeseen stop token; "
        "omitted: each answer's own length, so that its end is foreseen",
    )
    priority: int = Field(
        default=0, strict=True, ge=-(2**31), le=2**31, description="smaller goes first, where the policy looks at it"
    )
    cancel: CancelField | None = Field(default=None, description="clients that leave before their answer is complete")
    max_connections: Count | None = Field(
        default=None, description="requests that the class's clients have at the server at once; further ones wait"
    )
    slo: dict[str, float] | None = Field(
        default=None, description="targets of this class, with the keys of the scenario's `slo`"
    )


def check_traffic(
    classes: Sequence[TrafficClass],
    *,
    arrivals: ArrivalOptions | None,
    num_requests: int | None,
    duration_ns: int | None,
) -> None:
    """Raises ScenarioError where the classes, the common arrivals and the run's limits contradict one another.

    Places are keys of the scenario: `traffic[0].share`, `arrivals`, `run`. Opens no file.
    """
    if not classes:
        raise ScenarioError("traffic", "the list is empty", valid="at least one request class is needed")
    _check_names(classes)
    for index, traffic_class in enumerate(classes):
        _check_source(f"traffic[{index}]", traffic_class, arrivals)
        _check_lengths(f"traffic[{index}]", traffic_class)
    _check_shares(classes, arrivals)
    _check_closed_loops(classes, num_requests)
    if num_requests is None and duration_ns is None:
        _check_ends(classes, arrivals)


def is_closed(traffic_class: TrafficClass) -> bool:
    """Whether the class is a closed loop."""
    return traffic_class.arrivals is not None and build_arrivals(traffic_class.arrivals).is_closed


def build_arrivals(options: ArrivalOptions) -> Arrivals:
    """The process for its options."""
    return ARRIVALS.load(options.kind, allow_imports=True).build(options)


def _check_names(classes: Sequence[TrafficClass]) -> None:
    names: set[str] = set()
    for index, traffic_class in enumerate(classes):
        if traffic_class.name in names:
            raise ScenarioError(
                f"traffic[{index}].name", f"two classes are called {traffic_class.name!r}", remedy="Rename one of them."
            )
        names.add(traffic_class.name)


def _check_source(place: str, traffic_class: TrafficClass, arrivals: ArrivalOptions | None) -> None:
    given = [key for key in ("arrivals", "trace", "share") if getattr(traffic_class, key) is not None]
    if len(given) > 1:
        raise ScenarioError(
            f"{place}.{given[1]}", f"the class has {' and '.join(given)}", valid="arrivals, trace, share: give one"
        )
    if not given:
        raise ScenarioError(
            place, "the class has no arrivals, no trace and no share", valid="arrivals, trace, share: give one"
        )
    if traffic_class.share is not None and arrivals is None:
        raise ScenarioError(
            f"{place}.share",
            "there are no common arrivals to share",
            remedy="Add `arrivals` at the top of the scenario, or give the class its own.",
        )
    if traffic_class.share is not None and traffic_class.num_requests is not None:
        raise ScenarioError(
            f"{place}.num_requests",
            "a class that shares arrivals has no number of its own",
            remedy="Use run.num_requests.",
        )


def _check_lengths(place: str, traffic_class: TrafficClass) -> None:
    keys = ("prompt_tokens", "output_tokens", "lengths")
    given = [key for key in keys if getattr(traffic_class, key) is not None]
    if traffic_class.trace is not None:
        _check_trace_alone(place, traffic_class)
        if given:
            raise ScenarioError(
                f"{place}.{given[0]}", "the trace gives the lengths already", remedy=f"Drop {given[0]} or the trace."
            )
    elif "lengths" in given and len(given) > 1:
        raise ScenarioError(
            f"{place}.lengths", f"the class also has {given[0]}", valid="lengths takes the place of the other two"
        )
    elif given not in (["lengths"], ["prompt_tokens", "output_tokens"]):
        missing = "output_tokens" if "prompt_tokens" in given else "prompt_tokens"
        raise ScenarioError(
            f"{place}.{missing}", "it is missing", valid="give prompt_tokens and output_tokens, or lengths"
        )


def _check_trace_alone(place: str, traffic_class: TrafficClass) -> None:
    for key in ("prefix", "conversation"):
        if getattr(traffic_class, key) is not None:
            raise ScenarioError(
                f"{place}.{key}", "the trace gives whole prompts already", remedy=f"Drop {key} or the trace."
            )


def _check_shares(classes: Sequence[TrafficClass], arrivals: ArrivalOptions | None) -> None:
    shares = [traffic_class.share for traffic_class in classes if traffic_class.share is not None]
    if arrivals is None:
        return
    if not shares:
        raise ScenarioError("arrivals", "no class takes a share of them", remedy="Give the classes a share each.")
    if abs(sum(shares) - 1) > 1e-6:
        first = next(index for index, traffic_class in enumerate(classes) if traffic_class.share is not None)
        raise ScenarioError(
            f"traffic[{first}].share", f"the shares add up to {sum(shares):.6g}", valid="their sum must be 1"
        )
    if build_arrivals(arrivals).is_closed:
        raise ScenarioError(
            "arrivals",
            "clients of a closed loop cannot be shared",
            remedy="Give each class its own closed_loop with its number of clients.",
        )


def _check_closed_loops(classes: Sequence[TrafficClass], num_requests: int | None) -> None:
    for index, traffic_class in enumerate(classes):
        if not is_closed(traffic_class) or traffic_class.num_requests is not None:
            continue
        if len(classes) > 1:
            raise ScenarioError(
                f"traffic[{index}].num_requests",
                "a closed loop beside other classes needs a number of requests of its own",
                remedy="Set it; a run's duration_s may end the loop before.",
            )
        if num_requests is None:
            raise ScenarioError(
                "run.num_requests",
                "a closed loop needs a number of requests",
                remedy="Set it high; a run's duration_s may end the loop before.",
            )


def _check_ends(classes: Sequence[TrafficClass], arrivals: ArrivalOptions | None) -> None:
    for index, traffic_class in enumerate(classes):
        process = traffic_class.arrivals or (arrivals if traffic_class.share is not None else None)
        if process is None or traffic_class.num_requests is not None or build_arrivals(process).ends_by_itself:
            continue
        place = f"traffic[{index}].arrivals" if traffic_class.arrivals else "arrivals"
        raise ScenarioError(
            place, f"{process.kind} arrivals never end", remedy="Set run.num_requests or run.duration_s."
        )
