"""`method="auto"`: a trial on the first call, which prints who won, and is kept."""

import re

import pytest
import torch
from plain_loops import Cell, inputs, integers, looped, one_by_one, reals
from torch import nn

from armillary import solvers

F64 = torch.float64


def test_a_trial_is_made_once_for_a_shape(capsys):
    update, start = integers(64)
    for _ in range(2):
        solved = solvers.solve(update, start)
        assert torch.equal(solved.states, one_by_one(update, start))
    told = capsys.readouterr().out
    assert re.fullmatch(r"auto: \w+(\(window=\d+\))? won, .*in order [\d.e-]+ s\)\n", told), told
    assert solved.method == re.match(r"auto: (\S+) won", told)[1]
    solvers.solve(integers(32)[0], start[:32])
    assert capsys.readouterr().out.count("auto: ") == 1  # another shape


def slow_by_call(update):
    """A call costs a millisecond, whatever it evaluates."""

    def slowed(states, at):
        torch.linalg.inv(torch.eye(100, dtype=F64))
        return update(states, at)

    return slowed


def test_few_passes_win_where_a_call_costs_the_same_for_all():
    def update(states, at):  # each from the one 16 before it, so four sweeps and a proof are enough
        return (3 * torch.cat([states.new_ones(16), states])[at] + 1) % 7

    found = solvers.solve(slow_by_call(update), torch.zeros(64, dtype=torch.long))
    assert found.passes < 40 and "proven" in found.said


class SlowButForItsStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.made = solvers.Made(20, 4, width=16)

    def forward(self, pixels):
        torch.linalg.inv(torch.eye(500, dtype=F64))
        return self.made(pixels)

    def incremental(self, samples):
        return self.made.incremental(samples)


def test_a_model_with_a_step_of_its_own_is_sampled_by_it_where_that_is_faster(capsys):
    net = SlowButForItsStep()
    images = solvers.sample(net, (50, 20), levels=4)
    assert capsys.readouterr().out.startswith("auto: incremental won, ")
    assert torch.equal(images, solvers.sample(net, (50, 20), levels=4, method="jacobi"))


def test_a_recurrence_that_forgets_is_solved_in_parallel_and_a_chaotic_one_in_order(capsys):
    xs, start = 0.1 * inputs(2000, 2), torch.zeros(2, dtype=F64)
    tame, wild = Cell(2, 2, gain=0.5), Cell(2, 2, gain=4.0, seed=1)
    solvers.recur(tame, xs, start)
    assert not capsys.readouterr().out.startswith("auto: in_order")
    wild = Cell(16, 16, gain=1.6)
    xs, start = 0.1 * inputs(300, 16), torch.zeros(16, dtype=F64)
    assert torch.equal(solvers.recur(wild, xs, start), looped(wild, xs, start))
    assert capsys.readouterr().out.startswith("auto: in_order won, no way was faster")


def test_what_settled_in_the_trial_and_does_not_now_is_taken_in_order_from_then_on(capsys):
    rate = torch.tensor([2.0], dtype=F64)

    class Logistic(nn.Module):
        def forward(self, x, h):
            return rate * h * (1 - h) + x

    cell, said = Logistic(), []
    xs, start = torch.zeros(3000, 1, dtype=F64), torch.tensor([0.3], dtype=F64)
    solvers.recur(cell, xs, start, report=said.append)
    assert said[0].method != "in_order"
    rate += 1.9
    for _ in range(2):
        assert torch.equal(solvers.recur(cell, xs, start, report=said.append), looped(cell, xs, start))
    assert "finished in order" in said[1].said and said[2].said.startswith("in_order")


def test_a_trial_gives_nobody_a_gradient_and_keeps_the_callers_graph():
    encoder = nn.Linear(2, 2, dtype=F64)
    cell = Cell(2, 2)
    seen = []
    cell.w.register_post_accumulate_grad_hook(seen.append)
    xs = encoder(inputs(2000, 2))
    gain = cell.b.exp()  # no leaf

    def gained(x, h):
        return cell(x, h) * gain

    states = solvers.recur(gained, xs, torch.zeros(2, dtype=F64))
    assert cell.w.grad is None and encoder.weight.grad is None and seen == []
    states.sum().backward()
    mine, theirs = encoder.weight.grad.clone(), cell.b.grad.clone()
    encoder.zero_grad()
    cell.zero_grad()
    looped(lambda x, h: cell(x, h) * cell.b.exp(), encoder(inputs(2000, 2)), torch.zeros(2, dtype=F64)).sum().backward()
    assert torch.allclose(mine, encoder.weight.grad) and torch.allclose(theirs, cell.b.grad)


@pytest.mark.parametrize("tolerance", [0.0, 1e-9])
def test_real_systems(tolerance):
    update, start = reals(64)
    solved = solvers.solve(update, start, tolerance=tolerance)
    assert torch.allclose(solved.states, one_by_one(update, start), rtol=0, atol=1e-7)
