"""Every lossy exchange on tiles that are constant, that vanish or are as large as numbers get, in every dtype."""

import pytest
import torch

from armillary.exchanges import Parcel, RankInfo, build_dense, dense_exchanges
from armillary.plans import Layout
from armillary.reference import lockstep

LOSSY = [(name, way) for name, one in dense_exchanges().items() if "lossy" in one.departs for way in one.examples]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WORKERS, PUSHES = 2, 4


def constant(n, dtype, generator):
    return torch.full((n,), -0.3, dtype=dtype)


def subnormal(n, dtype, generator):
    limits = torch.finfo(dtype)
    return (torch.randint(-3, 4, (n,), generator=generator).double() * limits.smallest_normal * limits.eps).to(dtype)


def near_the_largest(n, dtype, generator):
    """A mean of such: each worker has its part of it."""
    values = torch.full((n,), torch.finfo(dtype).max / WORKERS, dtype=dtype)
    return torch.where(torch.rand(n, generator=generator) < 0.5, -values, values)


def parcels_of(kind, layout, push):
    found = []
    for rank in range(WORKERS):
        generator = torch.Generator().manual_seed(10 * push + rank)
        values = torch.zeros(layout.numel, dtype=getattr(torch, layout.dtype))
        for begin, end in layout.spans:
            values[begin:end] = kind(end - begin, values.dtype, generator)
        found.append(Parcel(values, torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64), layout))
    return found


def alike(one, other):
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) and torch.equal(one.isnan(), other.isnan())


def faults(name, way, kind, dtype):
    """What is not as the oracle says, and what would spoil later pushes."""
    exchange, found = build_dense(name, **way), []
    layout = Layout(("a", "b"), ((24, 20), (7,)), str(dtype).removeprefix("torch."), exchange.align, True)
    if exchange.refuses(layout):
        return []
    places = [RankInfo(rank, WORKERS) for rank in range(WORKERS)]
    states = [exchange.begin(layout, place, torch.zeros(layout.numel, dtype=dtype)) for place in places]
    told_states = [{key: value.clone() for key, value in state.items()} for state in states]
    for push in range(PUSHES):
        parcels = parcels_of(kind, layout, push)
        moved, _ = lockstep.run([exchange.push(*one) for one in zip(parcels, states, places, strict=True)])
        told, told_states = exchange.oracle(parcels, told_states)
        states = [state for _, state in moved]
        for (result, state), want, other in zip(moved, told, told_states, strict=True):
            found += [(push, "result")] * any(
                not alike(result.values[begin:end], want.values[begin:end]) for begin, end in layout.spans
            )
            found += [(push, key) for key, value in state.items() if not alike(value, other[key])]
            found += [(push, key, "not finite") for key, value in state.items() if not value.isfinite().all()]
    return found


@pytest.mark.parametrize("kind", [constant, subnormal, near_the_largest])
@pytest.mark.parametrize(("name", "way"), LOSSY, ids=str)
def test_hard_numbers_cross_as_the_oracle_says_and_spoil_no_state(name, way, kind):
    assert {str(dtype): found for dtype in DTYPES if (found := faults(name, way, kind, dtype))} == {}
