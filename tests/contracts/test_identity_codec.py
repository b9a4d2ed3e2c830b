"""Proof of the contracts: a coded exchange. A codec that loses nothing leaves it exact."""

import torch

from armillary.codecs import Codec, build_codec, codec
from armillary.exchanges import DenseExchange, Leg, dense_exchange, exact_sum
from armillary.plans import AllGather, Choice
from contracts.journey import compared, moved, planned, registered, saved_and_resumed, truth_after, verified

FLOAT = 8  # bytes of a number of the tail


def identity():
    """Every number as its own bytes."""
    return Codec(
        encode=lambda values, draw: values.contiguous().view(torch.uint8),
        decode=lambda code, n, like: code.clone().view(like.dtype),
        meaning=lambda values, draw: values,
        coded_bytes=lambda n, item_bytes: n * item_bytes,
        bound=lambda values: torch.zeros_like(values),
    )


def coded_identity():
    """Everybody gets everybody's code, and adds up what it means in the order of ranks."""
    identical = build_codec("identity")

    def push(parcel, state, place):
        n, at = parcel.layout.numel, FLOAT * parcel.layout.tail
        message = torch.cat([parcel.tail.view(torch.uint8), identical.encode(parcel.values, None)])
        everyones = yield AllGather(message)
        values = [identical.decode(one[at:], n, parcel.values) for one in everyones]
        tails = [one[:at].clone().view(torch.float64) for one in everyones]
        return parcel.answered(torch.stack(values).sum(0), torch.stack(tails).sum(0)), state

    def sent_bytes(layout, topology):
        code = identical.coded_bytes(layout.numel, layout.item_bytes)
        return [float((topology.workers - 1) * (FLOAT * layout.tail + code))] * topology.workers

    def legs(layout, topology):
        return [Leg("everyone", sent_bytes(layout, topology)[0], topology.workers - 1, "AllGather")]

    return DenseExchange(push, 1, sent_bytes, legs, exact_sum, align=identical.align)


def shelf():
    return registered(dense_exchange(), coded_identity, codec(), identity)


CHOICE = Choice("coded_identity")


def test_it_is_exact_and_planned_as_any_other_exchange():
    with shelf():
        asked = planned(2, CHOICE)
    assert asked.departures == () and asked.consensus == "same" and "NOT exact" not in str(asked)


def test_workers_train_as_one_process_does(crew):
    for is_equal, said in crew(2).run(verified, shelf, CHOICE):
        assert is_equal and "NOT exact" not in said, said


def test_a_resumed_run_goes_on_bit_for_bit_here_and_elsewhere(crew, tmp_path):
    assert crew(2).run(saved_and_resumed, shelf, CHOICE, str(tmp_path)) == [[]] * 2
    truth = truth_after(3, 2, shelf, CHOICE)
    for weights, _ in crew(3).run(moved, shelf, CHOICE, str(tmp_path)):
        assert all(torch.equal(weights[name], want) for name, want in truth.named[0].items())


def test_compare_finds_the_bytes_that_were_forecast(crew, tmp_path):
    for is_within, sent in crew(2).run(compared, shelf, CHOICE, str(tmp_path / "run")):
        assert is_within and sent > 0
