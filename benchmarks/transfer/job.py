"""What every rank runs: each exchange alone, a few times, with the kernel's counters read before and after."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary import Link, Topology
from armillary.exchanges import (
    Ownership,
    Parcel,
    RankInfo,
    RowTraffic,
    build_dense,
    build_row,
    dense_exchanges,
    row_exchanges,
)
from armillary.exchanges.look_up import HEADER_BYTES, LookupRequest, LookupTable, look_up
from armillary.plans import AllReduce, AllToAll, Layout, Program, Request
from armillary.transport.groups import stop_process_group
from armillary.transport.transport import Transport
from benchmarks.netlab import counted_bytes

DENSE_BYTES = 4_000_000
ROWS, WIDTH, READS = 40_000, 128, 6_000
REPETITIONS = 4
ROW_BYTES = WIDTH * 4


class Wire(NamedTuple):
    """What is sent over. header_bytes: of TCP and gloo around one message, as the kernel counts them."""

    transport: Transport
    topology: Topology
    header_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks-per-host", type=int, required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transport = Transport(options.ranks_per_host)
    place = transport.place
    anything = Link(0.0, 1.0)
    topology = Topology(place.nodes, place.workers_per_node, anything, anything, 1)
    wire = Wire(transport, topology, 0.0 if place.workers_per_node > 1 else _header_bytes(transport))
    rows = []
    for measured, entries in ((_dense, dense_exchanges()), (_rows, row_exchanges())):
        for name, entry in entries.items():
            rows += [measured(name, example, wire) for example in entry.examples]
    if place.rank == 0:
        Path(options.out).write_text(json.dumps([row for row in rows if row], indent=1) + "\n")
    transport.barrier()
    transport.close()
    stop_process_group()


def _counted(transport: Transport, action: Callable[[], Any]) -> float:
    """Bytes that crossed all links together, per call, as the kernel counts them (read by one rank of each host)."""
    action()
    transport.barrier()
    before = counted_bytes()
    for _ in range(REPETITIONS):
        action()
    transport.barrier()
    crossed = counted_bytes() - before
    mine = crossed.sent_bytes / REPETITIONS if transport.place.local_rank == 0 else 0.0
    return float(sum(transport.share(mine)))


def _header_bytes(transport: Transport) -> float:
    """Of a message that carries nearly nothing, without what it carries."""
    place, item = transport.place, torch.ones(transport.place.workers, dtype=torch.float64)
    sizes = (1,) * place.workers
    counted = _counted(transport, lambda: transport.complete(_asked(AllToAll(item, sizes, sizes)), "headers"))
    return counted / (place.workers * (place.workers - 1)) - item.element_size()


def _asked(request: Request) -> Program[Any]:
    return (yield request)


def _listing(program: Program[Any], made: list[Request]) -> Program[Any]:
    """The same program; the requests that it makes are put down."""
    answer = None
    try:
        while True:
            request = program.send(answer)
            made.append(request)
            answer = yield request
    except StopIteration as over:
        return over.value


def _headers(wire: Wire, made: list[Request]) -> float:
    """Of all messages of one call. An all-reduce goes there and back."""
    place = wire.transport.place
    rounds = sum(2 if isinstance(request, AllReduce) else 1 for request in made)
    return wire.header_bytes * rounds * place.workers * (place.workers - 1)


def _dense(name: str, example: Any, wire: Wire) -> dict[str, Any] | None:
    transport, topology = wire.transport, wire.topology
    exchange, place = build_dense(name, **example), transport.place
    if topology.workers_per_node > 1 and not example.get("local_aggregation"):
        return None  # what a flat exchange sends inside a node is not counted: nothing to hold it to
    layout = Layout(("weight",), ((DENSE_BYTES // 4,),), "float32", exchange.align, exchange.is_guarded)
    values, tail = torch.ones(layout.numel), torch.tensor([1.0] + [0.0] * exchange.is_guarded, dtype=torch.float64)
    expected = exchange.sent_bytes(layout, topology)
    if (
        exchange.most_bytes is not None
        and not exchange.bytes_after
        and exchange.most_bytes(layout, topology) != expected
    ):
        return None  # the data decide what it sends: `armillary compare` holds its formula to what was counted
    state = exchange.begin(layout, place, values)

    made: list[Request] = []

    def push() -> Any:
        made.clear()
        pushed = exchange.push(Parcel(values.clone(), tail.clone(), layout), state, place)
        return transport.complete(_listing(pushed, made), name)

    counted, predicted = _counted(transport, push), sum(expected)
    if example.get("local_aggregation"):  # across nodes only: to the owner's node and back
        predicted = 2 * (topology.nodes - 1) * layout.joined_bytes
    return _row(name, example, place, predicted, counted) | {"header_bytes": _headers(wire, made)}


def _rows(name: str, example: Any, wire: Wire) -> dict[str, Any] | None:
    transport, topology = wire.transport, wire.topology
    exchange, place = build_row(name, **example), transport.place
    by_node = name == "owned_rows_by_node"
    if (topology.workers_per_node > 1) != by_node or (example.get("owners", 1) > place.workers):
        return None
    owned = exchange.ownership(ROWS, place)
    ids = (ROWS ** torch.rand(READS, generator=torch.Generator().manual_seed(place.rank))).long().clamp(max=ROWS - 1)
    keys = owned.keys(ids).unique()
    is_copy = exchange.placement == "replicated"
    shard = torch.zeros(ROWS if is_copy else owned.shard_rows(place.rank), WIDTH)
    table = LookupTable("table", exchange, owned, shard)
    made: list[Request] = []

    def look_up_and_push() -> Any:
        made.clear()
        return transport.complete(_listing(_pull_and_push(table, keys, place), made), name)

    counted = _counted(transport, look_up_and_push)
    traffic = _traffic(keys, owned, transport)
    predicted = exchange.sent_bytes(traffic, topology) * place.workers
    headers = 0 if is_copy else HEADER_BYTES * place.workers * (place.workers - 1)
    if by_node:  # what crosses nodes
        here, nodes = place.workers_per_node, place.nodes
        cross = traffic.node_rows / here * (nodes - 1) / nodes * (2 * ROW_BYTES + 4) + 8 * (nodes - 1)
        predicted, headers = cross * place.workers, HEADER_BYTES * place.workers * (place.workers - here)
    row = _row(name, example, place, predicted + headers, counted)
    return row | {"header_bytes": _headers(wire, made)}


def _pull_and_push(table: LookupTable, keys: Tensor, place: RankInfo) -> Program[Any]:
    if table.exchange.placement == "replicated":
        none = (0,) * place.workers
        pulled = yield from table.exchange.pull(keys, none, none, table.shard, table.ownership, place)
    else:
        pulled = (yield from look_up(LookupRequest(0, keys, True, 0), [table], place)).pulled
    return (yield from table.exchange.push([pulled.rows], [pulled.route], table.ownership, place))


def _traffic(keys: Tensor, owned: Ownership, transport: Transport) -> RowTraffic:
    place = transport.place
    everyones = transport.share(keys.tolist())
    counts = owned.counts(keys) if len(owned.owners) > 1 or owned.owners == (0,) else [0] * place.workers
    away = sum(transport.share(len(keys) - counts[place.rank])) / sum(len(other) for other in everyones)
    nodes = [
        everyones[first : first + place.workers_per_node] for first in range(0, place.workers, place.workers_per_node)
    ]
    union = sum(len(set().union(*map(set, node))) for node in nodes) / len(nodes)
    return RowTraffic(sum(len(other) for other in everyones) / place.workers, union, ROW_BYTES, 1, away)


def _row(name: str, example: Any, place: RankInfo, predicted: float, counted: float) -> dict[str, Any]:
    options = ", ".join(f"{key}={value}" for key, value in example.items())
    return {
        "exchange": f"{name}({options})" if options else name,
        "workers": place.workers,
        "nodes": place.nodes,
        "predicted_bytes": predicted,
        "counted_bytes": counted,
    }


if __name__ == "__main__":
    main()
