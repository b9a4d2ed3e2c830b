"""Every dense exchange of the shelf stands parameters without numbers, and values on an accelerator."""

import pytest
import torch

from armillary.exchanges import Parcel, RankInfo, build_dense, dense_exchanges
from armillary.plans import Layout
from armillary.reference import lockstep

ALL = [(name, options) for name, entry in dense_exchanges().items() for options in entry.examples]
LOOKED_AT = ("threshold", "sparse_all_reduce", "random_k", "alternate")  # before anything is asked: memory is needed


def layout_for(exchange, *shapes):
    return Layout(tuple(map(str, range(len(shapes)))), shapes, "float32", exchange.align, exchange.is_guarded)


def parcel_of(layout, fill=1.0, device="cpu"):
    tail = torch.ones(layout.tail, dtype=torch.float64)
    tail[len(layout.names) :] = 0
    return Parcel(torch.full((layout.numel,), fill, device=device), tail, layout)


@pytest.mark.parametrize(("name", "options"), ALL, ids=str)
def test_a_group_of_no_numbers_crosses(name, options):
    exchange = build_dense(name, **options)
    layout = layout_for(exchange, (0,), (3, 0))
    parcel, places = parcel_of(layout), [RankInfo(rank, 3) for rank in range(3)]
    states = [exchange.begin(layout, place, parcel.values) for place in places]
    pushes = [exchange.push(parcel, state, place) for state, place in zip(states, places, strict=True)]
    moved, _ = lockstep.run(pushes)
    if exchange.carries == "gradient":
        assert [result.used.tolist() for result, _ in moved] == [[3.0, 3.0]] * 3
        told, _ = exchange.oracle([parcel] * 3, states)
        assert [len(one.values) for one in told] == [0] * 3


@pytest.mark.parametrize(("name", "options"), [one for one in ALL if not {one[0], *one[1]} & {*LOOKED_AT}], ids=str)
def test_the_first_request_lies_where_the_values_lie(name, options):
    """The tail is made on the host; a tensor of two devices cannot be. "meta" stands for any other device."""
    exchange = build_dense(name, **options)
    layout = layout_for(exchange, (40, 30), (7,))
    parcel = parcel_of(layout, device="meta")
    state = exchange.begin(layout, RankInfo(0, 3), parcel.values)
    asked = exchange.push(parcel, state, RankInfo(0, 3)).send(None)
    assert asked.tensor.device.type == "meta"
