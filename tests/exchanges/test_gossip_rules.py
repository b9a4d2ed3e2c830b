"""What gossip refuses, what it sends, and that the mean of all ranks stays where it keeps it."""

from itertools import pairwise

import pytest
import torch

from armillary.exchanges import Parcel, RankInfo, build_dense
from armillary.plans import Layout, Link, Topology
from armillary.reference import lockstep

LAYOUT = Layout(("a", "b", "c"), ((4, 3), (3,), (5,)), "float64", is_guarded=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"horizon": 1.06}, "a horizon from 0 (send all) to 1.05 (thresholds grow), got 1.06"),
        ({"horizon": -0.1}, "got -0.1"),
        ({"horizon": float("nan")}, "got nan"),
        ({"horizon": True}, "got True"),
        ({"cap": 0}, "cap as a whole number of 1 or more, got 0"),
        ({"cap": 2.0}, "cap as a whole number of 1 or more, got 2.0"),
        ({"start": -1}, "start as a whole number of 0 or more, got -1"),
        ({"mixing": "mean"}, "mixing=keep or mixing=replace, got 'mean'"),
    ],
)
def test_options_out_of_range_are_refused(options, said):
    with pytest.raises(ValueError, match="exchange: gossip wants") as refused:
        build_dense("gossip", **options)
    assert said in str(refused.value)


def test_an_option_that_there_is_not_is_refused_by_name():
    with pytest.raises(ValueError, match="codec"):
        build_dense("gossip", codec="int8")


@pytest.mark.parametrize("dtype", ["complex64", "int64"])
def test_what_is_not_floating_is_refused(dtype):
    exchange = build_dense("gossip")
    assert f"a holds {dtype}" in exchange.refuses(Layout(("a",), ((2,),), dtype))
    assert not exchange.refuses(LAYOUT)


def walked(exchange, workers, passes=40):
    """Weights walk by lot and meet in each pass: the largest change of their mean, and shares of values sent."""
    generator = torch.Generator().manual_seed(3)
    tail = torch.ones(LAYOUT.tail, dtype=torch.float64)
    places = [RankInfo(rank, workers) for rank in range(workers)]
    values = [torch.randn(LAYOUT.numel, generator=generator, dtype=torch.float64) for _ in places]
    states = [exchange.begin(LAYOUT, place, values[0]) for place in places]
    worst, shares = 0.0, []
    for _ in range(passes):
        before = sum(values) / workers
        parcels = [Parcel(one, tail, LAYOUT) for one in values]
        given = zip(parcels, states, places, strict=True)
        moved = lockstep.run([exchange.push(*one) for one in given])[0]
        values, states = [result.values for result, _ in moved], [state for _, state in moved]
        worst = max(worst, float((sum(values) / workers - before).abs().max()))
        shares += [exchange.density(LAYOUT, state) for state in states]
        values = [one + 0.1 * torch.randn(one.shape, generator=generator, dtype=one.dtype) for one in values]
    return worst, shares


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_keep_keeps_the_mean_of_all_ranks_and_replace_does_not(workers):
    kept, shares = walked(build_dense("gossip", start=2), workers)
    assert kept < 1e-14 and min(shares) < 1
    assert walked(build_dense("gossip", start=2, mixing="replace"), workers)[0] > 1e-3


def test_no_copy_is_older_than_the_cap():
    exchange = build_dense("gossip", start=1, cap=4)
    values, tail = torch.ones(LAYOUT.numel, dtype=torch.float64), torch.ones(LAYOUT.tail, dtype=torch.float64)
    states = [exchange.begin(LAYOUT, RankInfo(rank, 3), values) for rank in range(3)]
    sent = []
    for turn in range(12):  # norms that grow more slowly all the time reach no threshold
        parcels = [Parcel(values * (1 + 2.0**-turn), tail, LAYOUT) for _ in states]
        pushes = [exchange.push(one, state, RankInfo(r, 3)) for r, (one, state) in enumerate(zip(parcels, states))]
        states = [state for _, state in lockstep.run(pushes)[0]]
        sent.append(float(states[0]["last"][0]) == turn + 1)
    gaps = [at for at, one in enumerate(sent) if one]
    assert max(later - earlier for earlier, later in pairwise(gaps)) == 4


def test_a_plan_expects_half_of_the_values_and_all_of_them_at_horizon_0():
    link = Link(1e-4, 1e8)
    for workers, ways in ((1, 0), (2, 1), (3, 2), (8, 2)):
        topology = Topology(workers, 1, link, link, 1 << 30)
        most, half = (build_dense("gossip", horizon=h).sent_bytes(LAYOUT, topology)[0] for h in (0.0, 1.0))
        assert (most, half) == (ways * (3 + 160), ways * (3 + 80))
