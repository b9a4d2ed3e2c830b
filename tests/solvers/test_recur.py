"""`recur`: states and gradients are those of the loop over the cell."""

import pytest
import torch
from plain_loops import METHODS, NAMES, Cell, gradients, inputs, looped
from torch import nn

from armillary import solvers

NEWTON = [("newton", {}), ("newton", {"diagonal": True})]
EVERY = [*METHODS, *NEWTON]
EVERY_NAME = [*NAMES, "newton", "newton(diagonal)"]
F64 = torch.float64


def held_to_the_loop(cell, xs, start, wanted, **asked):
    """The states and gradients of both ways, and what was said."""
    said = []
    states = solvers.recur(cell, xs, start, report=said.append, **asked)
    truth = looped(cell, xs, start)
    assert torch.allclose(states, truth, rtol=0, atol=1e-12), said
    weights = torch.cos(torch.arange(truth.numel(), dtype=F64)).reshape(truth.shape)
    for mine, theirs in zip(gradients(states, weights, wanted), gradients(truth, weights, wanted), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-10), said
    return said[0]


@pytest.mark.parametrize("steps", [1, 7, 64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(("method", "options"), EVERY, ids=EVERY_NAME)
def test_states_and_gradients_are_those_of_the_loop(method, options, batch, steps):
    cell = Cell(2, 4)
    xs, start = inputs(steps, *batch, 2).requires_grad_(), inputs(*batch, 4).requires_grad_()
    solved = held_to_the_loop(cell, xs, start, (xs, start, *cell.parameters()), method=method, **options)
    assert "finished" not in solved.said


@pytest.mark.parametrize("method", ["in_order", "jacobi", "newton", "auto"])
def test_no_step_at_all(method):
    states = solvers.recur(Cell(2, 4), inputs(0, 3, 2), inputs(3, 4), method=method)
    assert states.shape == (0, 3, 4)


@pytest.mark.parametrize("module", [nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_cells_of_torch(module, batch):
    torch.manual_seed(0)
    cell = module(2, 3, dtype=F64)
    xs, start = inputs(50, *batch, 2).requires_grad_(), inputs(*batch, 3).requires_grad_()
    held_to_the_loop(cell, xs, start, (xs, start, *cell.parameters()), method="newton")


def test_a_cell_that_sees_the_batch_it_was_made_for():
    context = inputs(3, 4, seed=5).requires_grad_()
    xs, start = inputs(20, 3, 4).requires_grad_(), inputs(3, 4).requires_grad_()
    held_to_the_loop(lambda x, h: torch.sin(x + 0.5 * h + context), xs, start, (xs, start, context), method="newton")


@pytest.mark.parametrize("options", [{}, {"diagonal": True}], ids=str)
def test_gradcheck(options):
    cell = Cell(2, 3)

    def states(xs, start, *parameters):
        def one(x, h):
            return torch.func.functional_call(cell, dict(zip("uwb", parameters, strict=True)), (x, h))

        return solvers.recur(one, xs, start, method="newton", **options)

    given = (inputs(5, 2, 2), inputs(2, 3), *(one.detach().clone() for one in cell.parameters()))
    assert torch.autograd.gradcheck(states, tuple(one.requires_grad_() for one in given), fast_mode=True)


def test_a_linear_recurrence_takes_one_sweep_and_its_proof():
    """Its matrix is another one in every step."""
    matrix, said = inputs(4, 4) / 4, []

    def cell(x, h):
        return x + torch.cos(x) * (h @ matrix)

    solvers.recur(cell, inputs(64, 3, 4), inputs(3, 4), method="newton", report=said.append)
    assert said[0].passes == 2 and said[0].said.startswith("newton: 2 passes for 64 unknowns, residual <= ")


def test_a_chaotic_cell_is_finished_in_order_and_says_so():
    cell, xs, start = Cell(16, 16, gain=1.6), 0.1 * inputs(1024, 16), torch.zeros(16, dtype=F64)
    said = []
    with torch.no_grad():
        states = solvers.recur(cell, xs, start, method="newton", report=said.append)
        assert torch.equal(states, looped(cell, xs, start))
    assert "finished in order" in said[0].said
    with pytest.warns(UserWarning, match="finished in order"):
        solvers.recur(cell, xs, start, method="newton")


def test_the_gradient_of_a_chaotic_adjoint_is_that_of_the_loop():
    """The states settle, since they forget; their adjoint does not within few sweeps, and is taken in order."""
    matrix = inputs(4, 4)
    start = inputs(4).requires_grad_()
    xs = inputs(30, 4).requires_grad_()
    held_to_the_loop(lambda x, h: x + h @ matrix, xs, start, (xs, start), method="jacobi", most_sweeps=31)
    held_to_the_loop(
        lambda x, h: x + 0.9 * torch.sin(h) @ matrix, xs, start, (xs, start), method="jacobi_gs", block=10,
        most_sweeps=4,
    )  # fmt: skip


@pytest.mark.parametrize("diagonal", [False, True])
def test_single_precision(diagonal):
    cell = Cell(2, 4).float()
    xs, start = inputs(200, 2).float(), inputs(4).float()
    said = []
    states = solvers.recur(cell, xs, start, method="newton", diagonal=diagonal, report=said.append)
    assert torch.allclose(states, looped(cell, xs, start), rtol=0, atol=1e-5)
    assert "finished" not in said[0].said


def test_under_inference_mode_and_without_gradients():
    cell = Cell(2, 4)
    with torch.inference_mode():
        xs, start = inputs(20, 2), inputs(4)
        assert torch.allclose(solvers.recur(cell, xs, start, method="newton"), looped(cell, xs, start), atol=1e-12)
    with torch.no_grad():
        assert not solvers.recur(cell, inputs(20, 2), inputs(4), method="newton").requires_grad
    for one in cell.parameters():
        assert one.grad is None


def test_it_leaves_gradients_and_random_numbers_as_they_were():
    cell = Cell(2, 4)
    before = torch.get_rng_state()
    states = solvers.recur(cell, inputs(20, 2), inputs(4), method="newton")
    states.sum().backward()
    mine = cell.w.grad.clone()
    states = solvers.recur(cell, inputs(20, 2), inputs(4), method="newton")
    states.sum().backward()
    assert torch.allclose(cell.w.grad, 2 * mine) and torch.equal(torch.get_rng_state(), before)


def test_the_residual_of_newton_is_that_of_its_answer():
    """A cell with a jump: the change of a sweep is small, but carries a state over the jump."""

    def cell(x, h):
        return x + 0.5 * torch.sin(3 * h) + (h > 0.3).to(h.dtype)

    xs, start = inputs(12, 1, seed=126), torch.zeros(1, dtype=F64)
    states = solvers.recur(cell, xs, start, method="newton", tolerance=0.1)
    new = cell(xs, torch.cat([start[None], states[:-1]]))
    assert ((new - states).abs() <= 0.1 * states.abs().clamp(min=1)).all()
