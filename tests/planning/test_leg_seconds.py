"""Seconds of a leg are those of the bytes that cross each node's card, counted in a run of the exchange itself."""

from collections import Counter

import pytest
import torch

from armillary.exchanges.all_reduce import all_reduce
from armillary.planning.link_costs import busy
from armillary.plans import AllToAll, Layout, Link, Topology
from armillary.reference import lockstep

PIECE = 5  # numbers of each of the pieces that go round
INSIDE, CARD = 1e9, 3e7  # bytes per second: between two ranks of a node; of a node's card, which its ranks share


def ring_all_reduce(rank, workers, kept):
    """The sum, by sends to the next rank only: Thakur, Rabenseifner and Gropp's ring, hop by hop."""
    pieces = list(torch.full((workers * PIECE,), float(rank + 1), dtype=torch.float64).split(PIECE))
    after, before = (rank + 1) % workers, (rank - 1) % workers
    for hop in range(2 * (workers - 1)):
        gone, come = (rank - hop) % workers, (rank - hop - 1) % workers
        sizes = [tuple(PIECE * (peer == other) for peer in range(workers)) for other in (after, before)]
        kept[rank, after] += pieces[gone].nbytes
        arrived = yield AllToAll(pieces[gone], sizes[0], sizes[1])
        pieces[come] = pieces[come] + arrived if hop < workers - 1 else arrived
    return torch.cat(pieces)


@pytest.mark.parametrize(("nodes", "per_node"), [(3, 2), (2, 4), (4, 1), (1, 4)])
def test_a_ring_takes_as_long_as_the_busiest_card_has_bytes_to_send(nodes, per_node):
    workers, sent = nodes * per_node, Counter()
    totals, _ = lockstep.run([ring_all_reduce(rank, workers, sent) for rank in range(workers)], per_node)
    whole = torch.full((workers * PIECE,), workers * (workers + 1) / 2, dtype=torch.float64)
    assert all(torch.equal(total, whole) for total in totals)
    cards, links = Counter(), Counter()
    for (rank, peer), nbytes in sent.items():
        crosses = rank // per_node != peer // per_node
        (cards if crosses else links)[rank // per_node if crosses else rank] += nbytes
    topology = Topology(nodes, per_node, Link(0.0, INSIDE), Link(0.0, CARD / per_node), 1)
    layout = Layout(("w",), ((workers * PIECE,),), "float64")
    (leg,) = all_reduce().legs(layout, topology)
    tail = layout.joined_bytes / whole.nbytes  # the used flags travel along
    found = busy(leg, topology)
    assert found.between == pytest.approx(tail * max(cards.values(), default=0) / CARD)
    assert found.inside == pytest.approx(tail * max(links.values(), default=0) / INSIDE)
    assert sum(cards.values()) == (nodes > 1) * nodes * 2 * (workers - 1) * PIECE * 8, "one rank a node sends beyond it"


def test_the_same_bytes_by_the_slowest_link_alone_take_longer_where_nodes_hold_several_ranks():
    """What was forecast before: every rank's bytes on its own share of the card."""
    topology = Topology(3, 2, Link(0.0, INSIDE), Link(0.0, CARD / 2), 1)
    (leg,) = all_reduce().legs(Layout(("w",), ((6000,),), "float32"), topology)
    assert busy(leg._replace(links="slowest"), topology).between == 2 * busy(leg, topology).between
