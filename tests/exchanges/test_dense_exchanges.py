"""The contract of dense exchanges, which names none of them."""

import pytest
import torch

from armillary.exchanges.exchange import RankInfo, build_dense, dense_exchanges
from armillary.exchanges.parcel import Parcel
from armillary.facts.layout import Layout
from armillary.facts.topology import Link, Topology
from armillary.reference import lockstep

CASES = [(name, options) for name, entry in dense_exchanges().items() for options in entry.examples]
LINK = Link(1e-4, 1e8)


def shapes(options):
    return [(2, 2), (4, 2), (6, 3)] if options.get("local_aggregation") else [(1, 1), (2, 1), (3, 1), (8, 1)]


def layout_for(exchange, dtype="float64"):
    return Layout(("a", "b", "c"), ((3, 3), (), (3,)), dtype, exchange.align, exchange.is_guarded)


def parcels_for(layout, workers):
    """Each with other values and other flags; the second parameter is used by nobody."""
    generator = torch.Generator().manual_seed(workers)
    found = []
    for rank in range(workers):
        values = torch.zeros(layout.numel, dtype=getattr(torch, layout.dtype))
        for begin, end in layout.spans:
            values[begin:end] = torch.randn(end - begin, generator=generator, dtype=torch.float64)
        tail = torch.tensor([1.0, 0.0, float(rank % 2)] + [0.0] * layout.is_guarded, dtype=torch.float64)
        found.append(Parcel(values, tail, layout))
    return found


def states_for(exchange, layout, workers):
    weights = torch.zeros(layout.numel, dtype=getattr(torch, layout.dtype))
    return [exchange.begin(layout, RankInfo(rank, workers), weights) for rank in range(workers)]


def pushed(exchange, parcels, states, per_node=1):
    """(result, next state) of every rank; bytes each sent."""
    places = [RankInfo(rank, len(parcels), per_node) for rank in range(len(parcels))]
    return lockstep.run([exchange.push(*one) for one in zip(parcels, states, places, strict=True)], per_node)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_program_means_what_the_oracle_says(name, options):
    exchange = build_dense(name, **options)
    layout = layout_for(exchange)
    for workers, per_node in shapes(options):
        states = states_for(exchange, layout, workers)
        want, next_states = exchange.oracle(parcels_for(layout, workers), states)
        got, _ = pushed(exchange, parcels_for(layout, workers), states, per_node)
        for (result, state), wanted, wanted_state in zip(got, want, next_states, strict=True):
            torch.testing.assert_close(result.values, wanted.values, rtol=1e-12, atol=1e-12)
            assert torch.equal(result.tail, wanted.tail)
            assert state.keys() == wanted_state.keys()
            for entry, value in state.items():
                torch.testing.assert_close(value, wanted_state[entry], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_what_departs_from_nothing_is_the_sum(name, options):
    exchange = build_dense(name, **options)
    layout = layout_for(exchange)
    if not dense_exchanges()[name].departs:
        parcels = parcels_for(layout, 3)
        results, _ = exchange.oracle(parcels, states_for(exchange, layout, 3))
        for result in results:
            torch.testing.assert_close(result.values, sum(parcel.values for parcel in parcels))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_tail_arrives_exactly_whatever_the_values_are(name, options, dtype):
    exchange = build_dense(name, **options)
    layout = layout_for(exchange, dtype)
    if exchange.refuses(layout):
        return
    many = 24 if exchange.is_guarded else 200
    for workers, per_node in [*shapes(options), (many, 2)]:
        parcels = parcels_for(layout, workers)
        want = sum(parcel.tail.clone() for parcel in parcels)
        got, _ = pushed(exchange, parcels, states_for(exchange, layout, workers), per_node)
        for result, _ in got:
            assert result.tail.dtype == torch.float64 and result.values.dtype == getattr(torch, dtype)
            assert torch.equal(result.tail, want)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_predicted_bytes_are_the_bytes_sent(name, options):
    exchange = build_dense(name, **options)
    layout = layout_for(exchange, "float32")
    for workers, per_node in shapes(options):
        _, sent = pushed(exchange, parcels_for(layout, workers), states_for(exchange, layout, workers), per_node)
        topology = Topology(workers // per_node, per_node, LINK, LINK, 1 << 30)
        if exchange.most_bytes is None:
            assert sent == pytest.approx(exchange.sent_bytes(layout, topology))
        else:
            assert all(a <= most for a, most in zip(sent, exchange.most_bytes(layout, topology), strict=True))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_rank_makes_as_many_requests_as_the_others_and_no_more_than_declared(name, options):
    exchange = build_dense(name, **options)
    layout, (workers, per_node) = layout_for(exchange), shapes(options)[2]
    parcels, states = parcels_for(layout, workers), states_for(exchange, layout, workers)
    counted = [0] * workers

    def counting(rank):
        program, answer = exchange.push(parcels[rank], states[rank], RankInfo(rank, workers, per_node)), None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            counted[rank] += 1
            answer = yield request

    lockstep.run([counting(rank) for rank in range(workers)], per_node)
    assert len(set(counted)) == 1 and counted[0] <= exchange.requests


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_push_leaves_the_state_it_was_given(name, options):
    exchange = build_dense(name, **options)
    layout = layout_for(exchange)
    states = states_for(exchange, layout, 2)
    before = [{entry: value.clone() for entry, value in state.items()} for state in states]
    pushed(exchange, parcels_for(layout, 2), states, shapes(options)[0][1])
    for state, was in zip(states, before, strict=True):
        assert state.keys() == was.keys() and all(torch.equal(state[entry], was[entry]) for entry in was)


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(ValueError, match="no dense exchange 'allreduce'; there are all_reduce"):
        build_dense("allreduce")
