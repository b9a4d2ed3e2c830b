"""What an exchange says of the links is what its programs do: bytes at the busiest rank, messages that wait."""

from collections import Counter

import pytest
import torch

from armillary.exchanges import (
    Parcel,
    RankInfo,
    RowTraffic,
    Staying,
    build_dense,
    build_row,
    dense_exchanges,
    row_exchanges,
)
from armillary.plans import AllGather, AllReduce, AllToAll, Layout, Link, Topology, members
from armillary.reference import lockstep

SHAPES = [(1, 2), (2, 2), (3, 2), (4, 1)]  # nodes, workers per node
DENSE = [(name, options) for name, entry in dense_exchanges().items() for options in entry.examples]
ROWS = [(name, options) for name, entry in row_exchanges().items() for options in entry.examples]
TABLE, WIDTH, LOOKUPS = 24, 3, 2
LINK = Link(1e-4, 1e8)


def watched(program, kept):
    answer = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as stop:
            return stop.value
        kept.append(request)
        answer = yield request


def ranks_of(scope, topology):
    return len(members(scope, topology.workers, topology.workers_per_node)[0])


def messages(requests, topology):
    """Latencies that wait for one another, by scope; a scope of one rank has none."""
    found = Counter()
    for request in requests:
        others = ranks_of(request.scope, topology) - 1
        hops = {AllReduce: 2 * others, AllGather: others, AllToAll: 1}[type(request)]
        found[request.scope] += hops if others else 0
    return +found


def busiest_bytes(everyones, topology):
    """By scope: of each request the most that any rank sends or receives, added up."""
    found = Counter()
    for requests in zip(*everyones, strict=True):
        scope, loads = requests[0].scope, []
        for rank, request in enumerate(requests):
            n, item = ranks_of(scope, topology), request.tensor.element_size()
            if not isinstance(request, AllToAll):
                times = 2 * (n - 1) / n if isinstance(request, AllReduce) else n - 1
                loads.append(times * request.tensor.numel() * item)
                continue
            item *= request.tensor.shape[1:].numel()
            group = next(
                ranks for ranks in members(scope, topology.workers, topology.workers_per_node) if rank in ranks
            )
            me = group.index(rank)
            loads.append(max(sum(sizes) - sizes[me] for sizes in (request.send, request.receive)) * item)
        found[scope] += max(loads)
    return +found


def by_scope(legs, topology, measure):
    """What legs say, scopes of one rank left out."""
    found = Counter()
    for leg in legs:
        scope = leg.links if leg.links in ("node", "rail") else "world"
        if ranks_of(scope, topology) > 1:
            found[scope] += measure(leg)
    return +found


def one_by_one(legs, topology):
    """Bytes of each leg in turn, what stays with a rank left out."""
    return [leg.link_bytes for leg in legs if by_scope([leg], topology, lambda leg: leg.messages)]


def counted_one_by_one(everyones, topology):
    """The same of the requests that were made."""
    turns = [[[request] for request in turn] for turn in zip(*everyones, strict=True)]
    return [sum(busiest_bytes(turn, topology).values()) for turn in turns if messages(turn[0], topology)]


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
@pytest.mark.parametrize(("name", "options"), DENSE)
def test_the_legs_of_a_dense_exchange_are_what_its_program_does(name, options, nodes, per_node):
    exchange, topology = build_dense(name, **options), Topology(nodes, per_node, LINK, LINK, 1)
    kept = [[] for _ in range(topology.workers)]
    layout = Layout(("w",), ((59,),), "float32", exchange.align, exchange.is_guarded)
    places = [RankInfo(rank, topology.workers, per_node) for rank in range(topology.workers)]
    values, flags = torch.arange(1.0, layout.numel + 1), torch.ones(layout.tail, dtype=torch.float64)
    programs = [
        watched(exchange.push(Parcel(values, flags, layout), exchange.begin(layout, place, values), place), mine)
        for place, mine in zip(places, kept, strict=True)
    ]
    lockstep.run(programs, per_node)
    legs = exchange.legs(layout, topology)
    assert by_scope(legs, topology, lambda leg: leg.messages) == messages(kept[0], topology)
    if exchange.carries == "weights" and exchange.most_bytes is not None:  # the first push sends all, later ones less
        carried, expected = sum(leg.link_bytes for leg in legs), exchange.sent_bytes(layout, topology)[0]
        most = exchange.most_bytes(layout, topology)[0]
        assert carried == expected <= most == busiest_bytes(kept, topology)["world"]
        return
    assert by_scope(legs, topology, lambda leg: leg.link_bytes) == pytest.approx(busiest_bytes(kept, topology))
    assert one_by_one(legs, topology) == pytest.approx(counted_one_by_one(kept, topology))


def there_and_back(exchange, place, reads, kept):
    """Pulls and pushes of one rank; every rank knows what all of them read, so no header is needed."""
    owned = exchange.ownership(TABLE, place)
    keys = [[torch.unique(owned.keys(ids)) for ids in looks] for looks in reads]
    is_pulled = exchange.placement == "row_sharded"
    shard = torch.ones(owned.shard_rows(place.rank) if is_pulled else TABLE, WIDTH)
    routes, none = [], (0,) * place.workers
    for look in range(LOOKUPS):
        asked = [tuple(owned.counts(looks[look])) for looks in keys]
        counts = asked[place.rank], tuple(theirs[place.rank] for theirs in asked)
        pull = exchange.pull(keys[place.rank][look], *(counts if is_pulled else (none, none)), shard, owned, place)
        routes.append((yield from watched(pull, kept["pull"])).route)
    gradients = [torch.ones(len(one), WIDTH) for one in keys[place.rank]]
    yield from watched(exchange.push(gradients, routes, owned, place), kept["push"])


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
@pytest.mark.parametrize(("name", "options"), ROWS)
def test_the_legs_of_a_row_exchange_are_what_its_programs_do(name, options, nodes, per_node):
    """Everybody reads every row, twice: then every share is even, and nothing is left to chance."""
    exchange, topology = build_row(name, **options), Topology(nodes, per_node, LINK, LINK, 1)
    workers, everything = topology.workers, torch.arange(TABLE)
    reads = [[everything] * LOOKUPS] * workers
    kept = [{"pull": [], "push": []} for _ in range(workers)]
    programs = [
        there_and_back(exchange, RankInfo(rank, workers, per_node), reads, kept[rank]) for rank in range(workers)
    ]
    lockstep.run(programs, per_node)
    is_merged, item = exchange.placement == "replicated", 4
    looks = 1 if is_merged else LOOKUPS
    traffic = RowTraffic(TABLE * looks, TABLE * looks, WIDTH * item, looks, (workers - 1) / workers)
    owners = workers if is_merged else len(exchange.ownership(TABLE, RankInfo(0, workers, per_node)).owners)
    legs = exchange.legs(traffic, workers / owners, topology)
    for phase, said in (("pull", legs.pull), ("push", legs.push)):
        done = [requests[phase] for requests in kept]
        assert by_scope(said, topology, lambda leg: leg.messages) == messages(done[0], topology), phase
        counted = busiest_bytes(done, topology)
        assert by_scope(said, topology, lambda leg: leg.link_bytes) == pytest.approx(counted, rel=1e-12), phase
    pushed = [requests["push"] for requests in kept]
    assert one_by_one(legs.push, topology) == pytest.approx(counted_one_by_one(pushed, topology), rel=1e-12)


@pytest.mark.parametrize(("name", "options"), ROWS)
def test_what_is_sent_is_what_the_legs_carry_when_owners_are_even(name, options):
    exchange, topology = build_row(name, **options), Topology(2, 2, LINK, LINK, 1)
    traffic = RowTraffic(10.0, 15.0, 12, 2, 0.75)
    legs = exchange.legs(traffic, 1.0, topology)
    assert exchange.sent_bytes(traffic, topology) == sum(leg.link_bytes for leg in (*legs.pull, *legs.push)) > 0


EARLY = [(name, options) for name, options in ROWS if build_row(name, **options).pull_early is not None]


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize(("name", "options"), EARLY)
def test_the_legs_of_a_foreseen_pull_are_what_its_program_does(name, options, workers):
    """Everybody reads every row; of those of any owner every third moves."""
    exchange, topology = build_row(name, **options), Topology(workers, 1, LINK, LINK, 1)

    def early(place, mine):
        owned = exchange.ownership(TABLE, place)
        keys = torch.unique(owned.keys(torch.arange(TABLE)))
        asked = tuple(owned.counts(keys))
        shard = torch.ones(owned.shard_rows(place.rank), WIDTH)
        staying = Staying(lambda rows: rows % 3 > 0, lambda: False)
        served = (asked[place.rank],) * workers
        yield from watched(exchange.pull_early(keys, asked, served, shard, owned, place, staying), mine)

    kept = [[] for _ in range(workers)]
    lockstep.run([early(RankInfo(rank, workers, 1), kept[rank]) for rank in range(workers)], 1)
    owners = len(exchange.ownership(TABLE, RankInfo(0, workers, 1)).owners)
    traffic = RowTraffic(TABLE, TABLE, WIDTH * 4, 1, (workers - 1) / workers)
    legs = exchange.early_legs(traffic, workers / owners, 2 / 3)
    assert len(kept[0]) == len(legs)
    for number, leg in enumerate(legs):
        done = [[requests[number]] for requests in kept]
        assert leg.messages == messages(done[0], topology)["world"]
        assert leg.link_bytes == pytest.approx(busiest_bytes(done, topology)["world"], rel=1e-12)
