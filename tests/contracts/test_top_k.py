"""Proof of the contracts: top-k with error feedback. What a step leaves out is added to the next step's gradients."""

import math

import torch

from armillary.exchanges import DenseExchange, Leg, dense_exchange
from armillary.plans import AllGather, Choice
from contracts.journey import compared, moved, planned, registered, saved_and_resumed, truth_after, verified

FLOAT, ID = 8, 4  # bytes of a number of the tail, and of a place


def largest(values, count):
    return values.abs().topk(count).indices.sort().values


def raw(tensor):
    return tensor.contiguous().view(torch.uint8)


def largest_k(keep=0.25):
    """Every rank sends its largest values, and everyone adds them up in the order of ranks."""

    def count(layout):
        return math.ceil(keep * layout.numel)

    def push(parcel, state, place):
        full, k = parcel.values + state["residual"], count(parcel.layout)
        chosen = largest(full, k)
        message = [raw(parcel.tail), raw(chosen.to(torch.int32)), raw(full[chosen])]
        total, tail = torch.zeros_like(full), torch.zeros_like(parcel.tail)
        for theirs in (yield AllGather(torch.cat(message))):
            said, places, values = theirs.split([FLOAT * len(tail), ID * k, full.itemsize * k])
            tail += said.clone().view(torch.float64)
            total[places.clone().view(torch.int32).long()] += values.clone().view(full.dtype)
        residual = full.clone()
        residual[chosen] = 0
        return parcel.answered(total, tail), {"residual": residual}

    def message_bytes(layout):
        return FLOAT * layout.tail + count(layout) * (ID + layout.item_bytes)

    def sent_bytes(layout, topology):
        return [float((topology.workers - 1) * message_bytes(layout))] * topology.workers

    def legs(layout, topology):
        return [Leg("everyone", sent_bytes(layout, topology)[0], topology.workers - 1, "AllGather")]

    def oracle(parcels, states):
        k = count(parcels[0].layout)
        full = [parcel.values + state["residual"] for parcel, state in zip(parcels, states, strict=True)]
        sent = [one * torch.zeros_like(one).index_fill(0, largest(one, k), 1) for one in full]
        total, tail = sum(sent), sum(parcel.tail for parcel in parcels)
        after = [{"residual": one - gone} for one, gone in zip(full, sent, strict=True)]
        return [parcel.answered(total, tail) for parcel in parcels], after

    return DenseExchange(
        push, 1, sent_bytes, legs, oracle,
        begin=lambda layout, place, values: {"residual": torch.zeros_like(values)},
        resharding={"residual": "sum"},
        work=lambda layout, topology: 6.0 * layout.numel,
    )  # fmt: skip


def shelf():
    entry = dense_exchange({}, {"keep": 1.0}, departs=("lossy",), costs="small gradients wait until they have grown")
    return registered(entry, largest_k)


CHOICE = Choice("largest_k", {"keep": 0.25})


def test_it_is_planned_where_it_is_demanded_and_else_only_said():
    with shelf():
        asked, by_price = str(planned(2, CHOICE)), planned(2)
    assert "lossy (NOT exact: what crosses is rounded or thinned): all groups" in asked
    assert "small gradients wait until they have grown" in asked
    assert {str(group.exchange) for group in by_price.groups} == {"all_reduce"} and by_price.departures == ()
    said = [note for note in by_price.notes if "NOT exact" in note]
    assert said and all(note.startswith("quicker way: ") for note in said)


def test_workers_train_as_its_oracle_says(crew):
    for is_equal, said in crew(2).run(verified, shelf, CHOICE):
        assert is_equal and "NOT exact, held to its own oracle" in said, said


def test_a_resumed_run_goes_on_bit_for_bit_and_moves_to_other_workers_without_loss(crew, tmp_path):
    assert crew(2).run(saved_and_resumed, shelf, CHOICE, str(tmp_path)) == [[]] * 2
    truth = truth_after(3, 2, shelf, CHOICE)
    for weights, states in crew(3).run(moved, shelf, CHOICE, str(tmp_path)):
        assert all(torch.equal(weights[name], want) for name, want in truth.named[0].items())
        for state, (one, other) in zip(states, truth.states, strict=True):
            assert torch.equal(state["residual"], (one["residual"] + other["residual"]) / 3)


def test_compare_finds_the_bytes_that_were_forecast(crew, tmp_path):
    for is_within, sent in crew(2).run(compared, shelf, CHOICE, str(tmp_path / "run")):
        assert is_within and sent > 0
