"""One set of tables for a whole fleet, and back.

In a fleet's tables, `iterations` and `requests` have a further column, `replica`: who ran the iteration, and to whom
the request was sent (NEVER: it never left its client, or the one queue of all replicas). The iterations of all
replicas are in order of completion, and every lane of every replica has a number of its own, so that what is asked
about tokens, which hang on lanes, needs not know of replicas. What is asked about a device must be asked of each
replica's own tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.distribution import Ints
from sim.metrics.limits import Breakdown
from sim.metrics.shares import WorkShares
from sim.record import Columns, Tables
from sim.request import NEVER

_ITERATIONS_OF_REQUESTS = ("admitted_iteration", "first_token_iteration", "finished_iteration")


def merge_tables(replicas: Sequence[Tables], at_clients: Tables) -> Tables:
    """The tables of a fleet from those of its replicas, and of the requests that reached none."""
    first = np.cumsum([0, *(len(tables.iterations["lane"]) for tables in replicas)])
    replica = _repeated(range(len(replicas)), (tables.iterations["lane"] for tables in replicas))
    iterations = _stacked([tables.iterations for tables in replicas])
    order = np.argsort(iterations["end_ns"], kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    lanes = np.cumsum([0, *(int(tables.iterations["lane"].max(initial=0)) + 1 for tables in replicas)])
    iterations["lane"] = iterations["lane"] + lanes[replica]
    iterations["replica"] = replica

    def moved(tables: Columns, columns: Sequence[str], index: int) -> Columns:
        return tables | {name: _moved(tables[name], lambda row: place[row + first[index]]) for name in columns}

    chunks = _stacked([moved(tables.chunks, ["iteration"], i) for i, tables in enumerate(replicas)])
    segments = [moved(tables.segments, ["iteration"], i) for i, tables in enumerate(replicas)]
    requests = [moved(tables.requests, _ITERATIONS_OF_REQUESTS, i) for i, tables in enumerate(replicas)]
    everybody = _stacked([*requests, at_clients.requests])
    everybody["replica"] = _repeated(
        [*range(len(replicas)), NEVER], (r["request"] for r in (*requests, at_clients.requests))
    )
    return Tables(
        iterations=_taken(iterations, order),
        chunks=_taken(chunks, np.argsort(chunks["iteration"], kind="stable")),
        requests=_taken(everybody, np.argsort(everybody["request"], kind="stable")),
        segments=_stacked([own | {"lane": own["lane"] + lanes[i]} for i, own in enumerate(segments)]),
    )


def merge_prices(
    fleet: Tables, breakdowns: Sequence[Breakdown], shares: Sequence[WorkShares]
) -> tuple[Breakdown, WorkShares]:
    """What the cost models say of each replica's own tables, in the order of the fleet's."""
    owner = fleet.iterations["replica"]
    breakdown = {resource: np.zeros(len(owner)) for resource in breakdowns[0]}
    decode, chunk = np.zeros(len(owner)), np.zeros(len(fleet.chunks["iteration"]))
    for index, (own_breakdown, own_shares) in enumerate(zip(breakdowns, shares, strict=True)):
        is_mine = owner == index
        for resource, ns in own_breakdown.items():
            breakdown[resource][is_mine] = ns
        decode[is_mine] = own_shares.decode
        chunk[is_mine[fleet.chunks["iteration"]]] = own_shares.chunk
    return breakdown, WorkShares(decode, chunk)


def split_tables(fleet: Tables, index: int) -> Tables:
    """The tables of one replica: what it would have recorded alone, but for the `replica` columns."""
    is_mine = fleet.iterations["replica"] == index
    place = np.cumsum(is_mine) - 1
    chunk_is_mine = is_mine[fleet.chunks["iteration"]]
    mine = fleet.requests["replica"] == index
    segment_is_mine = np.isin(fleet.segments["request"], fleet.requests["request"][mine])
    iterations, chunks = _taken(fleet.iterations, is_mine), _taken(fleet.chunks, chunk_is_mine)
    requests, segments = _taken(fleet.requests, mine), _taken(fleet.segments, segment_is_mine)
    first_lane = int(iterations["lane"].min(initial=np.iinfo(np.int64).max)) if len(iterations["lane"]) else 0
    requests |= {name: _moved(requests[name], place.__getitem__) for name in _ITERATIONS_OF_REQUESTS}
    return Tables(
        iterations=iterations | {"lane": iterations["lane"] - first_lane},
        chunks=chunks | {"iteration": place[chunks["iteration"]]},
        requests=requests,
        segments=segments
        | {"iteration": _moved(segments["iteration"], place.__getitem__), "lane": segments["lane"] - first_lane},
    )


def _stacked(tables: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([columns[name] for columns in tables]) for name in tables[0]}


def _taken(columns: Mapping[str, Ints], rows: NDArray[Any]) -> Columns:
    return {name: values[rows] for name, values in columns.items()}


def _moved(rows: Ints, where: Callable[[Ints], Ints]) -> Ints:
    """Rows of a table in another order; NEVER stays."""
    is_row = rows != NEVER
    moved = rows.copy()
    moved[is_row] = where(rows[is_row])
    return moved


def _repeated(values: Sequence[int], columns: Iterable[Ints]) -> Ints:
    """Each value as often as its column is long."""
    return np.repeat(np.array(values, dtype=np.int64), [len(column) for column in columns])
