"""PowerSGD: what crosses and what waits; its algebra beside torch's own."""

import pytest
import torch

from armillary.exchanges import Parcel, RankInfo
from armillary.exchanges import low_rank as low_rank_file
from armillary.exchanges.low_rank import orthonormal
from armillary.plans import Layout, Link, Topology
from armillary.reference import lockstep
from in_lockstep import built

LINK = Link(1e-4, 1e8)


LAYOUT = Layout(("m", "v", "n"), ((24, 16), (7,), (12, 2, 6)), "float64", 1, True)


def pushed(exchange, values, states):
    """Results, next states and bytes sent; values (workers, numbers)."""
    workers, used = len(values), torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    programs = [
        exchange.push(Parcel(values[rank], used, LAYOUT), states[rank], RankInfo(rank, workers))
        for rank in range(workers)
    ]
    moved, sent = lockstep.run(programs)
    return [one.values for one, _ in moved], [state for _, state in moved], sent


def begun(exchange, workers):
    none = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    return [exchange.begin(LAYOUT, RankInfo(rank, workers), none) for rank in range(workers)]


def gradients(workers, step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(workers, LAYOUT.numel, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("text", ["low_rank(rank=2, start=0)", "low_rank(rank=2, start=3, alternate=True)"])
def test_over_all_steps_nothing_is_lost(text):
    exchange, went_in, came_out = built(text), 0.0, 0.0
    states = begun(exchange, 3)
    for step in range(12):
        values = gradients(3, step)
        out, states, _ = pushed(exchange, values, states)
        assert all(torch.equal(one, out[0]) for one in out)
        went_in, came_out = went_in + values.sum(0), came_out + out[0]
    left = sum(state["residual"] for state in states)
    assert float((went_in - came_out - left).abs().max()) < 1e-11 and float(left.abs().max()) > 0


def test_a_sum_of_the_rank_that_is_kept_crosses_exactly_after_two_steps():
    """A power iteration on a matrix of rank 2 finds both of its directions."""
    exchange = built("low_rank(rank=2, start=0)")
    states, values = begun(exchange, 2), torch.zeros(2, LAYOUT.numel, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    thin = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (24, 16)]
    values[:, : 24 * 16] = (thin[0] @ thin[1].T).view(-1)
    for _ in range(2):
        out, states, _ = pushed(exchange, values, states)
    torch.testing.assert_close(out[0], values.sum(0), rtol=1e-9, atol=1e-9)


def test_bytes_are_those_of_the_factors_and_of_what_goes_whole():
    for workers in (2, 4):
        topology = Topology(workers, 1, LINK, LINK, 1 << 30)
        for text, numbers in (
            ("low_rank(rank=2, start=0)", 2 * (24 + 16) + 2 * (12 + 12) + 7 + 4),
            ("low_rank(rank=2, start=9)", LAYOUT.numel + 4),
        ):
            exchange = built(text)
            _, _, sent = pushed(exchange, gradients(workers), begun(exchange, workers))
            assert sent == [pytest.approx(2 * (workers - 1) / workers * 8 * numbers)] * workers
        exchange = built("low_rank(rank=2, start=0)")
        assert exchange.sent_bytes(LAYOUT, topology) == pytest.approx(
            pushed(exchange, gradients(workers), begun(exchange, workers))[2]
        )
        assert (
            sum(leg.link_bytes for leg in exchange.legs(LAYOUT, topology)) == exchange.sent_bytes(LAYOUT, topology)[0]
        )


@pytest.mark.parametrize("text", ["low_rank(rank=2, start=2)", "low_rank(rank=2, start=3, alternate=True)"])
def test_the_bytes_of_every_push_are_known_before(text):
    exchange, topology = built(text), Topology(3, 1, LINK, LINK, 1 << 30)
    states, most = begun(exchange, 3), exchange.most_bytes(LAYOUT, topology)
    for push in range(7):
        _, states, sent = pushed(exchange, gradients(3, push), states)
        assert exchange.bytes_after(LAYOUT, topology, push) == pytest.approx(sent) and sent[0] <= most[0] * 1.001


def used_by_nobody(was, state):
    """What the runtime makes of a push in which nobody used the first matrix."""
    numbers = {"residual": 24 * 16, "factor": 2 * 24, "age": 1}
    return {name: torch.cat([was[name][: numbers[name]], value[numbers[name] :]]) for name, value in state.items()}


def crossed(exchange, ages):
    """How much of a sum of rank 2 is missing after the push in which both of its factors were summed, if nobody used
    the matrix in the pushes that are not in `ages`."""
    generator = torch.Generator().manual_seed(4)
    thin = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (24, 16)]
    values, states = torch.zeros(2, LAYOUT.numel, dtype=torch.float64), begun(exchange, 2)
    for push in range(max(ages) + 1):
        values[:, : 24 * 16] = (thin[0] @ thin[1].T).view(-1) if push in ages else 0
        residuals = [{**state, "residual": 0 * state["residual"]} for state in states]
        out, after, _ = pushed(exchange, values, residuals)
        states = after if push in ages else [used_by_nobody(*pair) for pair in zip(states, after, strict=True)]
    return float((out[0] - values.sum(0)).norm() / values.sum(0).norm())


def test_a_matrix_that_a_push_did_not_use_goes_on_from_its_own_factor(monkeypatch):
    exchange = built("low_rank(rank=2, start=0, alternate=True)")
    assert crossed(exchange, (0, 1)) < 1e-9 and crossed(exchange, (0, 2)) < 1e-9 and crossed(exchange, (1, 4)) < 1e-9
    by_the_groups = lambda self, state, matrix: not self.is_left(int(state["age"].max()))  # noqa: E731
    monkeypatch.setattr(low_rank_file._Way, "is_turned", by_the_groups)
    assert crossed(exchange, (0, 2)) > 0.1


def test_what_is_at_right_angles_is_as_torch_finds_it_and_what_vanishes_is_no_number_gone():
    columns = torch.randn(9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted, upper = torch.linalg.qr(columns)
    torch.testing.assert_close(orthonormal(columns), wanted * upper.diagonal().sign())
    columns[:, 1] = 2 * columns[:, 0]
    found = orthonormal(columns)
    assert not found[:, 1].any() and torch.equal(orthonormal(torch.zeros(4, 2)), torch.zeros(4, 2))
    exchange = built("low_rank(rank=2, start=0)")
    out, states, _ = pushed(exchange, torch.zeros(2, LAYOUT.numel, dtype=torch.float64), begun(exchange, 2))
    assert not out[0].any() and not states[0]["residual"].any()
    out, _, _ = pushed(exchange, gradients(2), states)  # directions that died out are drawn anew
    assert out[0].any() and bool(out[0].isfinite().all())


def factor_not_kept(monkeypatch):
    was = low_rank_file._Way.known
    monkeypatch.setattr(
        low_rank_file._Way, "known", lambda self, state, *one: was(self, {**state, "factor": 0 * state["factor"]}, *one)
    )


def test_a_factor_that_is_not_kept_finds_less(monkeypatch):
    """Warm, the iteration converges on what does not change; cold, it begins anew in every step."""
    same, far = gradients(2), []
    for is_cold in (False, True):
        if is_cold:
            factor_not_kept(monkeypatch)
        exchange = built("low_rank(rank=2, start=0)")
        states = begun(exchange, 2)
        for _ in range(6):
            states = [{**state, "residual": 0 * state["residual"]} for state in states]
            out, states, _ = pushed(exchange, same, states)
        far.append(float((out[0] - same.sum(0)).norm()))
    assert far[0] < 0.99 * far[1]
