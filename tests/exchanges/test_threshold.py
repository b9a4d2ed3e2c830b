"""Dynamic thresholds: the share that passes, and what is sent for it."""

import torch

from armillary.codecs.threshold import sparse_bytes
from armillary.exchanges import Parcel, RankInfo
from armillary.exchanges.threshold import is_due
from armillary.plans import Layout
from armillary.reference import lockstep
from in_lockstep import built

TEXT = "threshold(sparsity=0.75, lifespan=3, small=7)"


def pushed(exchange, values, states, workers=2):
    """Results, next states and bytes sent; values (workers, n)."""
    layout = layout_of(values.shape[1])
    used = torch.tensor([1.0, 0.0], dtype=torch.float64)
    programs = [
        exchange.push(Parcel(values[rank], used, layout), states[rank], RankInfo(rank, workers))
        for rank in range(workers)
    ]
    moved, sent = lockstep.run(programs)
    return [one.values for one, _ in moved], [state for _, state in moved], sent


def layout_of(n):
    return Layout(("w",), ((n,),), "float64", 1, True)


def begun(exchange, n, workers=2):
    return [
        exchange.begin(layout_of(n), RankInfo(rank, workers), torch.zeros(n, dtype=torch.float64))
        for rank in range(workers)
    ]


def test_over_all_steps_nothing_is_lost_and_bytes_are_the_formula_of_the_count():
    exchange, generator = built("threshold(sparsity=0.9, lifespan=4)"), torch.Generator().manual_seed(3)
    n, went_in, came_out, states = 1000, 0.0, 0.0, begun(built(TEXT), 1000)
    for step in range(20):
        values = torch.randn(2, n, generator=generator, dtype=torch.float64) / (1 + step)
        before = [values[rank] + states[rank]["residual"] for rank in range(2)]
        out, states, sent = pushed(exchange, values, states)
        counts = [int((one != state["residual"]).sum()) for one, state in zip(before, states)]
        assert sent == [sparse_bytes(n, count, 8) + 8 * 3 for count in counts]
        went_in, came_out = went_in + values.sum(0), came_out + out[0]
    left = sum(state["residual"] for state in states)
    assert float((went_in - came_out - left).abs().max()) < 1e-12 and float(left.abs().max()) > 0


def test_thresholds_are_taken_anew_at_every_lifespan_and_when_the_first_pushes_double():
    assert [age for age in range(40) if is_due(age, 10)] == [0, 1, 2, 4, 8, 10, 20, 30]
    exchange, states, seen = built("threshold(sparsity=0.9, lifespan=6, small=0)"), begun(built(TEXT), 500), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(13):
        _, states, _ = pushed(exchange, torch.randn(2, 500, generator=generator, dtype=torch.float64), states)
        seen.append(float(states[0]["limit"]))
    assert [age for age in range(1, 13) if seen[age] != seen[age - 1]] == [1, 2, 4, 6, 12]


def test_a_layer_whose_gradients_grow_is_not_sent_whole():
    """A threshold that four times as many reach as should is taken anew at once."""
    exchange, generator = built("threshold(sparsity=0.99)"), torch.Generator().manual_seed(2)
    states = begun(exchange, 5000)
    for step in range(7):
        values = torch.randn(2, 5000, generator=generator, dtype=torch.float64) * (100 if step == 6 else 1)
        _, states, sent = pushed(exchange, values, states)
    assert sent[0] <= sparse_bytes(5000, 4 * 50, 8) + 8 * 3
    assert is_due(6, 1000) is False


def test_a_layer_of_zeros_sends_nothing_and_a_small_one_everything():
    zeros, few = torch.zeros(2, 1000, dtype=torch.float64), torch.ones(2, 100, dtype=torch.float64)
    exchange = built("threshold(sparsity=0.99)")
    out, _, sent = pushed(exchange, zeros, begun(exchange, 1000))
    assert sent == [1 + 8 * 3] * 2 and not out[0].any()
    out, states, _ = pushed(exchange, few, begun(exchange, 100))
    assert torch.equal(out[0], 2 * few[0]) and not states[0]["residual"].any()
