"""What is refused, before anything is computed, in one sentence that names it."""

import pytest
import torch
from plain_loops import Cell, inputs, integers
from torch import nn

from armillary import solvers

F64 = torch.float64
UPDATE, START = integers(8)


@pytest.mark.parametrize(("asked", "told"), [
    ({"method": "gauss"}, "no method 'gauss'; there are auto, in_order"),
    ({"method": "gs_jacobi", "windw": 3}, "gs_jacobi has no option 'windw'; it has window"),
    ({"method": "auto", "window": 3}, "auto has no option 'window'; it has none"),
    ({"method": "gs_jacobi"}, "gs_jacobi wants window=NUMBER"),
    ({"method": "gs_jacobi", "window": 0}, "want window of 1 or more, got 0"),
    ({"method": "jacobi_gs", "block": -1}, "want block of 1 or more, got -1"),
    ({"method": "jacobi", "most_sweeps": 0}, "want most_sweeps of 1 or more, got 0"),
    ({"method": "jacobi", "tolerance": 0.1}, "want a tolerance of 0, or more for real numbers, got 0.1"),
    ({"method": "newton"}, "newton: solves recurrences only"),
    ({"method": "incremental"}, "incremental: the model has no step of its own"),
])  # fmt: skip
def test_methods_and_options(asked, told):
    with pytest.raises(ValueError, match=told):
        solvers.solve(UPDATE, START, **asked)


@pytest.mark.parametrize("method", ["in_order", "jacobi", "auto"])
def test_an_update_of_another_shape_or_type(method):
    with pytest.raises(ValueError, match=r"update gives \(\d, 2\) of torch.int64 .* but start has \(\d, 3\)"):
        solvers.solve(lambda states, at: states[at, :2], START, method=method)
    with pytest.raises(ValueError, match=r"update gives .* of torch.float32 .* of torch.int64 there"):
        solvers.solve(lambda states, at: states[at].float(), START, method=method)
    with pytest.raises(ValueError, match="start has no dimension of unknowns"):
        solvers.solve(UPDATE, torch.tensor(1), method=method)


def drawing(x, h):
    return h + torch.rand(())


def writing(x, h):
    return h.mul_(0.5).add_(x)


def mixing(x, h):
    return torch.tanh(x + h - h.mean(-2, keepdim=True))


def keeping(x, h, seen=[]):  # noqa: B006
    seen.append(x)
    return torch.tanh(x + h / len(seen))


CELLS = [
    (drawing, "two calls of the cell with equal inputs differ"),
    (keeping, "two calls of the cell with equal inputs differ"),
    (writing, "the cell writes its state in place"),
    (mixing, "rows of its batch hear each other"),
]


@pytest.mark.parametrize(("cell", "told"), CELLS, ids=lambda one: getattr(one, "__name__", ""))
def test_cells_that_are_no_functions_of_a_row(cell, told):
    with pytest.raises(ValueError, match=told):
        solvers.recur(cell, inputs(6, 3, 2), inputs(3, 2), method="newton")


def test_a_cell_that_writes_its_state_is_refused_in_a_loop_too():
    with pytest.raises(ValueError, match="the cell writes its state in place"):
        solvers.recur(writing, inputs(6, 3, 2), inputs(3, 2), method="in_order")


def test_a_cell_that_takes_one_step_only_is_left_to_the_loop(capsys):
    def cell(x, h):
        return torch.tanh(x + torch.ones(2, 2, dtype=F64) @ h) if h.ndim == 1 else h.view(2)

    with pytest.raises(ValueError, match=r"cannot be solved in parallel: two steps at once end in: .*'in_order'"):
        solvers.recur(cell, inputs(6, 2), inputs(2), method="newton")
    assert solvers.recur(cell, inputs(6, 2), inputs(2)).shape == (6, 2)
    assert capsys.readouterr().out.startswith("auto: in_order won, no way was faster")


@pytest.mark.parametrize("method", ["newton", "in_order", "auto"])
def test_a_start_of_another_shape(method):
    with pytest.raises(ValueError, match=r"start has shape \(4,\) .* the cell makes \(3, 4\)"):
        solvers.recur(Cell(2, 4), inputs(6, 3, 2), inputs(4), method=method)
    with pytest.raises(ValueError, match=r"a start .* of real numbers"):
        solvers.recur(Cell(2, 4), inputs(6, 2), torch.zeros(4, dtype=torch.long), method=method)


def test_a_tolerance_below_zero():
    with pytest.raises(ValueError, match="recur: want a tolerance of 0 or more, got -1"):
        solvers.recur(Cell(2, 4), inputs(6, 2), inputs(4), tolerance=-1)


def test_jacobians_that_are_too_large():
    xs, start = inputs(100, 2), inputs(4)
    with pytest.raises(ValueError, match="take 12,800 bytes, more than memory_bytes=12,799; take diagonal=True"):
        solvers.recur(Cell(2, 4), xs, start, method="newton", memory_bytes=12_799)
    solvers.recur(Cell(2, 4), xs, start, method="newton", memory_bytes=12_800)
    solvers.recur(Cell(2, 4), xs, start, method="newton", memory_bytes=12_799, diagonal=True)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4, dtype=F64), nn.Dropout()], ids=lambda one: type(one).__name__)
def test_modules_in_train_mode(layer):
    net = nn.Sequential(solvers.Made(4, 2).double(), layer)
    with pytest.raises(ValueError, match=rf"sample: {type(layer).__name__} '1' is in train mode.* call eval\(\)"):
        solvers.sample(net, (3, 4), levels=2, method="jacobi")
    with pytest.raises(ValueError, match=f"recur: {type(layer).__name__} is in train mode"):
        solvers.recur(layer, inputs(3, 4), inputs(4), method="newton")
    with pytest.raises(ValueError, match=f"layer 1: {type(layer).__name__} is in train mode"):
        solvers.layers([nn.Identity(), layer], inputs(3, 4))


def net_of(matrix):
    return lambda x: (x.double() @ matrix)[..., None].expand(*x.shape, 3)


@pytest.mark.parametrize("reads", [0, 3])
def test_models_that_are_not_causal(reads):
    unknowns = 40
    matrix = inputs(unknowns, unknowns).triu(1)
    assert solvers.sample(net_of(matrix), (2, unknowns), levels=3, method="jacobi").shape == (2, unknowns)
    for t in range(unknowns - reads):
        matrix[t + reads, t] = 1 if reads else 0  # output t reads an input of its future
    if reads == 0:
        matrix = inputs(unknowns, unknowns).triu(0)  # or its own
    with pytest.raises(ValueError, match=r"net is not causal: inputs from .* on change an output"):
        solvers.sample(net_of(matrix), (2, unknowns), levels=3, method="jacobi")


def test_models_that_draw_and_models_of_another_shape():
    with pytest.raises(ValueError, match="net gives two equal inputs different outputs"):
        solvers.sample(lambda x: torch.rand(*x.shape, 3), (2, 5), levels=3, method="jacobi")
    with pytest.raises(ValueError, match=r"net gives \(\d+, 4, 3\) for inputs of \(\d+, 5\)"):
        solvers.sample(lambda x: torch.zeros(len(x), 4, 3), (2, 5), levels=3, method="jacobi")


@pytest.mark.parametrize(
    "asked", [{}, {"levels": 3, "draw": len}, {"levels": 0}, {"levels": 3, "noise_per_unknown": 0}]
)
def test_draws(asked):
    with pytest.raises(ValueError, match="want levels of 1 or more, or a draw of your own"):
        solvers.sample(solvers.Made(4, 3), (2, 4), **asked)


def test_sizes_of_made():
    with pytest.raises(ValueError, match="want pixels, 2 levels or more"):
        solvers.Made(4, 1)
