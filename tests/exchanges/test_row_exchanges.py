"""The contract of row exchanges, which names none of them: rows read are the table's, gradients are the sums."""

import pytest
import torch

from armillary.exchanges import RankInfo, RowTraffic, Staying, build_row, row_exchanges
from armillary.exchanges.look_up import HEADER_BYTES, LookupRequest, LookupTable, look_up
from armillary.plans import AllReduce, AllToAll, Link, Topology
from armillary.reference import lockstep
from armillary.reference.lockstep import OutOfStep

CASES = [(name, options) for name, entry in row_exchanges().items() for options in entry.examples]
SHAPES = [(1, 1), (2, 1), (3, 1), (4, 2), (8, 2)]
ROWS, WIDTH = 29, 3
LINK = Link(1e-4, 1e8)


def look_twice(exchange, whole, reads, gradients, place):
    """One rank's program: two look-ups, then the push of both; returns rows read and (ids, sums) it updates."""
    owned = exchange.ownership(ROWS, place)
    mine = place.rank in owned.owners or exchange.placement == "replicated"
    shard = whole if exchange.placement == "replicated" else whole[owned.ids(place.rank)] if mine else whole[:0]
    table = LookupTable("table", exchange, owned, shard)
    routes, seen, sent = [], [], []
    for ids, gradient in zip(reads, gradients, strict=True):
        keys, inverse = torch.unique(owned.keys(ids), return_inverse=True)
        if exchange.placement == "replicated":
            none = (0,) * place.workers
            pulled = yield from exchange.pull(keys, none, none, shard, owned, place)
        else:
            pulled = (yield from look_up(LookupRequest(0, keys, True, 0), [table], place)).pulled
        seen.append(pulled.rows[inverse])
        routes.append(pulled.route)
        sent.append(torch.zeros(len(keys), WIDTH, dtype=whole.dtype).index_add_(0, inverse, gradient))
    rows, sums = yield from exchange.push(sent, routes, owned, place)
    return seen, (rows if exchange.placement == "replicated" else owned.ids(place.rank, rows)), sums


def scene(workers, seed, empty=False):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    sizes = [(0 if empty and rank == 0 else 7, 5) for rank in range(workers)]
    # duplicates inside a batch and across ranks, skewed to low ids
    reads = [[(torch.rand(n, generator=generator) ** 3 * ROWS).long() for n in pair] for pair in sizes]
    gradients = [[torch.rand(n, WIDTH, generator=generator, dtype=torch.float64) for n in pair] for pair in sizes]
    return whole, reads, gradients


def drive(name, options, workers, per_node, seed=0, empty=False):
    exchange = build_row(name, **options)
    whole, reads, gradients = scene(workers, seed, empty)
    programs = [
        look_twice(exchange, whole, reads[rank], gradients[rank], RankInfo(rank, workers, per_node))
        for rank in range(workers)
    ]
    results, sent = lockstep.run(programs, per_node)
    want = torch.zeros_like(whole)
    for ids, gradient in zip(reads, gradients, strict=True):
        for one, other in zip(ids, gradient, strict=True):
            rows, inverse = one.unique(return_inverse=True)
            merged = torch.zeros(len(rows), WIDTH, dtype=whole.dtype).index_add_(0, inverse, other)
            want.index_add_(0, rows, exchange.codes.gradients.meaning(merged))
    return exchange, whole, reads, results, want, sent


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("workers", "per_node"), SHAPES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_reads_are_the_rows_and_pushes_are_the_sums(name, options, workers, per_node, empty):
    exchange, whole, reads, results, want, _ = drive(name, options, workers, per_node, workers, empty)
    total = torch.zeros_like(whole)
    for rank, (seen, ids, sums) in enumerate(results):
        for rows, read in zip(seen, reads[rank], strict=True):
            assert torch.equal(rows, exchange.codes.rows.meaning(whole[read]))
        assert len(ids.unique()) == len(ids), "a row's gradient must arrive merged"
        total.index_add_(0, ids, sums)
        if exchange.placement == "replicated":
            mine = torch.zeros_like(whole).index_add_(0, ids, sums)
            torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-12)
    if exchange.placement == "row_sharded":
        torch.testing.assert_close(total, want, rtol=1e-12, atol=1e-12)


def count_requests(program, counted):
    """The program itself; adds one to counted[0] for each request."""
    answer = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as stop:
            return stop.value
        counted[0] += 1
        answer = yield request


def pull_both_ways(exchange, whole, ids, place, is_void):
    """A pull, and the same in two goes; the shard has changed in between where rows do not stay."""
    owned = exchange.ownership(ROWS, place)
    mine = place.rank in owned.owners
    shard = whole[owned.ids(place.rank)] if mine else whole[:0].clone()
    keys = owned.keys(ids).unique()
    asked = tuple(owned.counts(keys))
    ones = (1,) * place.workers
    served = tuple((yield AllToAll(torch.tensor(asked), ones, ones)).tolist())
    pulls, earlies = [0], [0]
    pulled = yield from count_requests(exchange.pull(keys, asked, served, shard, owned, place), pulls)
    early = None
    if exchange.pull_early is not None:
        moving = torch.ones_like(shard) if is_void else (torch.arange(len(shard)) % 2 == 0)[:, None].to(shard)
        before = shard - moving
        program = exchange.pull_early(
            keys, asked, served, before, owned, place, Staying(lambda rows: rows % 2 == 1, lambda: is_void)
        )
        requests = count_requests(program, earlies)
        answer = None
        while True:
            try:
                request = requests.send(answer)
            except StopIteration as stop:
                early = stop.value
                break
            answer = yield request
            if earlies[0] == 3:  # what stays put has left; now the step moves the others
                before.copy_(shard)
    return pulled, early, pulls[0], earlies[0], keys


@pytest.mark.parametrize("is_void", [False, True])
@pytest.mark.parametrize(("workers", "per_node"), SHAPES)
@pytest.mark.parametrize(("name", "options"), [c for c in CASES if row_exchanges()[c[0]].make().pull_requests])
def test_a_pull_in_two_goes_brings_the_rows_as_they_are_in_the_end(name, options, workers, per_node, is_void):
    exchange = build_row(name, **options)
    whole, reads, _ = scene(workers, 5, empty=True)
    programs = [
        pull_both_ways(exchange, whole, reads[rank][0], RankInfo(rank, workers, per_node), is_void)
        for rank in range(workers)
    ]
    for rank, (pulled, early, pulls, earlies, keys) in enumerate(lockstep.run(programs, per_node)[0]):
        assert pulls == exchange.pull_requests
        want = whole[reads[rank][0].unique()][_order(exchange, reads[rank][0], keys, workers)]
        assert torch.equal(pulled.rows, exchange.codes.rows.meaning(want))
        if early is not None:
            assert earlies == 4
            assert torch.equal(early.rows, pulled.rows)
            assert all(map(_same, early.route, pulled.route))


def _order(exchange, ids, keys, workers):
    """Where the rows of sorted keys stand among the sorted ids."""
    owned = exchange.ownership(ROWS, RankInfo(0, workers))
    return torch.argsort(owned.keys(ids.unique()))


def _same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(("workers", "per_node"), SHAPES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_predicted_bytes_are_the_bytes_sent(name, options, workers, per_node):
    exchange, _, reads, _, _, sent = drive(name, options, workers, per_node, 3)
    place = RankInfo(0, workers, per_node)
    owned = exchange.ownership(ROWS, place)
    distinct = [[owned.keys(ids).unique() for ids in pair] for pair in reads]
    if exchange.placement == "replicated":  # both look-ups are merged before they are sent
        counts = [len(torch.cat(pair).unique()) for pair in distinct]
        away = 1.0
    else:
        counts = [sum(len(keys) for keys in pair) for pair in distinct]
        elsewhere = sum(
            sum(n for q, n in enumerate(owned.counts(keys)) if q != rank)
            for rank, pair in enumerate(distinct)
            for keys in pair
        )
        away = elsewhere / sum(counts)
    traffic = RowTraffic(sum(counts) / workers, _node_rows(distinct, per_node), WIDTH * 8, 2, away, 8)
    predicted = exchange.sent_bytes(traffic, Topology(workers // per_node, per_node, LINK, LINK, 1 << 30))
    headers = 0 if exchange.placement == "replicated" else 2 * HEADER_BYTES * (workers - 1)
    # shares of rows that stay at home are exact for single-level exchanges, expectations for the two-hop one
    exact = name != "owned_rows_by_node"
    assert sum(sent) / workers == pytest.approx(predicted + headers, rel=1e-9 if exact else 0.25)


def _node_rows(distinct, per_node):
    nodes = [distinct[first : first + per_node] for first in range(0, len(distinct), per_node)]
    looks = [sum(len(torch.cat([rank[look] for rank in node]).unique()) for look in range(2)) for node in nodes]
    return sum(looks) / len(looks)


def test_swapped_requests_on_one_rank_are_refused():
    exchange = build_row("gather_rows")
    whole, reads, gradients = scene(2, 1)

    def swapped(place):
        program = look_twice(exchange, whole, reads[place.rank], gradients[place.rank], place)
        first = next(program)
        yield first if place.rank == 0 else AllReduce(first.tensor)

    with pytest.raises(OutOfStep, match="out of step"):
        lockstep.run([swapped(RankInfo(rank, 2)) for rank in range(2)])
