"""Proof of the contracts: gossip on a ring. After its own step each rank averages its weights with two neighbours'."""

import torch

from armillary.exchanges import DenseExchange, Leg, dense_exchange
from armillary.plans import AllToAll, Choice
from contracts.journey import compared, moved, planned, registered, saved_and_resumed, truth_after, verified


def neighbours(rank, workers):
    return sorted({(rank - 1) % workers, (rank + 1) % workers} - {rank})


def ring_gossip():
    """The mean of own and neighbouring weights, summed in the order of ranks."""

    def push(parcel, state, place):
        near, n = neighbours(place.rank, place.workers), parcel.layout.numel
        sizes = tuple(n if rank in near else 0 for rank in range(place.workers))
        arrived = yield AllToAll(parcel.values.repeat(len(near)), sizes, sizes)
        theirs = dict(zip(near, arrived.split(n), strict=False)) if near else {}
        theirs[place.rank] = parcel.values
        total = sum(theirs[rank] for rank in sorted(theirs))
        return parcel.answered(total / len(theirs), parcel.tail), state

    def sent_bytes(layout, topology):
        workers = topology.workers
        return [float(len(neighbours(rank, workers)) * layout.nbytes) for rank in range(workers)]

    def legs(layout, topology):
        return [Leg("slowest", sent_bytes(layout, topology)[0], 1)]

    def oracle(parcels, states):
        results = []
        for rank, parcel in enumerate(parcels):
            circle = sorted([rank, *neighbours(rank, len(parcels))])
            results.append(parcel.answered(sum(parcels[one].values for one in circle) / len(circle), parcel.tail))
        return results, list(states)

    return DenseExchange(push, 1, sent_bytes, legs, oracle, carries="weights")


def shelf():
    costs = "replicas agree only in the long run"
    return registered(dense_exchange(departs=("local",), costs=costs, offers=lambda *_: []), ring_gossip)


CHOICE = Choice("ring_gossip")


def test_it_is_planned_where_it_is_demanded():
    with shelf():
        asked, by_price = planned(4, CHOICE), planned(4)
    assert asked.consensus == "mean" and asked.departures == ("local",) and "NOT exact" in str(asked)
    assert by_price.consensus == "same" and by_price.departures == ()
    assert not any("ring_gossip" in note for note in by_price.notes)


def test_workers_train_as_its_oracle_says(crew):
    for is_equal, said in crew(4).run(verified, shelf, CHOICE):
        assert is_equal and "NOT exact, held to its own oracle" in said, said


def test_every_replica_is_resumed_and_elsewhere_begins_with_their_mean(crew, tmp_path):
    assert crew(4).run(saved_and_resumed, shelf, CHOICE, str(tmp_path)) == [[]] * 4
    want = truth_after(3, 4, shelf, CHOICE).consensus()
    for weights, _ in crew(2).run(moved, shelf, CHOICE, str(tmp_path)):
        assert all(torch.equal(weights[name], mean) for name, mean in want.items())


def test_compare_finds_the_bytes_that_were_forecast(crew, tmp_path):
    for is_within, sent in crew(4).run(compared, shelf, CHOICE, str(tmp_path / "run")):
        assert is_within and sent > 0
