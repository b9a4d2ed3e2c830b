"""The user's optimizer on some rows of a table does what it does to the whole, or it is found out."""

import pytest
import torch
from torch import nn

from armillary.exchanges import RankInfo, build_row
from armillary.tables.optimizer_state import close_window, open_window, replace_parameter
from armillary.tables.optimizer_trial import leaves_untouched_rows, steps_by_row
from armillary.tables.table import RowTable

ROWS, WIDTH = 12, 3

BY_ROW = {
    "sgd": (lambda ps: torch.optim.SGD(ps, lr=0.1), True),
    "sgd, lr 0": (lambda ps: torch.optim.SGD(ps, lr=0.0), True),
    "sgd, lr tensor": (lambda ps: torch.optim.SGD(ps, lr=torch.tensor(0.1)), True),
    "sgd, decay": (lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1), False),
    "sgd, momentum": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), False),
    "sgd, nesterov foreach": (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True), False),
    "adagrad": (lambda ps: torch.optim.Adagrad(ps, lr=0.1), True),
    "adagrad, filled": (lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.1), True),
    "adagrad, decay": (lambda ps: torch.optim.Adagrad(ps, lr=0.1, weight_decay=0.1), False),
    "rmsprop": (lambda ps: torch.optim.RMSprop(ps, lr=0.1), False),
    "adam": (lambda ps: torch.optim.Adam(ps, lr=0.01), False),
    "adam, lr 0": (lambda ps: torch.optim.Adam(ps, lr=0.0), False),
    "adamw, fused": (lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True), False),
    "adamax": (lambda ps: torch.optim.Adamax(ps, lr=0.01), False),
    "nadam": (lambda ps: torch.optim.NAdam(ps, lr=0.01), False),
    "rprop": (lambda ps: torch.optim.Rprop(ps, lr=0.01), False),
}


def parameters():
    return [nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64))]


@pytest.mark.parametrize("name", BY_ROW)
def test_element_wise_optimizers_step_by_row_and_only_some_leave_untouched_rows(name):
    make, leaves = BY_ROW[name]
    held = parameters()
    optimizer = make(held)
    group = optimizer.param_groups[0]
    before = [(dict(group), {k: list(v) for k, v in optimizer.state.items()}, held[0].detach().clone())]
    assert steps_by_row(optimizer, group)
    assert leaves_untouched_rows(optimizer, group) == leaves
    (options, state, value), = before  # fmt: skip
    assert dict(group) == options and {k: list(v) for k, v in optimizer.state.items()} == state
    assert torch.equal(held[0], value) and held[0].grad is None


@pytest.mark.parametrize(
    "make", [torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS], ids=["Adafactor", "Muon", "LBFGS"]
)
def test_optimizers_that_mix_rows_are_found_out(make):
    optimizer = make(parameters())
    assert not steps_by_row(optimizer, optimizer.param_groups[0])


def table_of(whole, rank, has_window):
    return RowTable.owning(
        whole, build_row("owned_rows"), RankInfo(rank, 2), name="table", has_window=has_window, requires_grad=True,
        reads=None, norms=None,
    )  # fmt: skip


WINDOWED = {name: make for name, (make, leaves) in BY_ROW.items() if leaves} | {"lazy adam": BY_ROW["adam"][0]}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_steps_the_touched_rows_as_the_whole_is_stepped(name, rank):
    """Every row is touched in every step or in none, so lazy and exact agree; rows in between come and go."""
    whole = parameters()[0]
    mirror = nn.Parameter(whole.detach().clone())
    optimizer, truth = WINDOWED[name]([whole]), WINDOWED[name]([mirror])
    table = table_of(whole, rank, has_window=True)
    held = replace_parameter(optimizer, whole, table)
    assert optimizer.param_groups[0]["params"] == [table.parameter]
    assert table.parameter.shape == (0, WIDTH)
    mine = table.ownership.ids(rank)
    for step in range(3):
        gradient = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        gradient[mine[1:4]] = torch.randn(3, WIDTH, dtype=torch.float64)
        if name != "lazy adam" and step == 1:
            gradient[mine[4]] = 1.0
        mirror.grad = gradient.clone()
        truth.step()
        touched = gradient[mine].abs().sum(1).nonzero().flatten()
        half = touched[:1]
        table.deposit(half, gradient[mine][half])  # two backwards add up
        table.deposit(touched, gradient[mine][touched] - gradient[mine][touched] * (touched == half)[:, None])
        table.hand_gradient_over()
        with torch.no_grad():
            open_window(table, optimizer, held)
        optimizer.step()
        with torch.no_grad():
            close_window(table, optimizer, held)
        torch.testing.assert_close(table.shard, mirror.detach()[mine], rtol=1e-12, atol=1e-12)
        assert table.parameter.shape == (0, WIDTH) and table.parameter.grad is None
    for entry, value in truth.state[mirror].items():
        if value.dim():
            torch.testing.assert_close(held[entry], value[mine], rtol=1e-12, atol=1e-12)
            assert optimizer.state[table.parameter][entry].numel() == 0, "no second copy of the state outside a step"


@pytest.mark.parametrize("has_window", [False, True])
def test_state_from_before_attach_goes_to_the_owners(has_window):
    whole = parameters()[0]
    optimizer = torch.optim.Adagrad([whole], lr=0.1)
    whole.grad = torch.rand(ROWS, WIDTH, dtype=torch.float64)
    optimizer.step()
    sums = optimizer.state[whole]["sum"].clone()
    tables = [table_of(whole, rank, has_window) for rank in range(2)]
    for table in tables:
        twin = torch.optim.Adagrad([whole], lr=0.1)
        twin.load_state_dict(optimizer.state_dict())
        held = replace_parameter(twin, whole, table)
        kept = held["sum"] if has_window else twin.state[table.parameter]["sum"]
        assert torch.equal(kept, sums[table.ownership.ids(table.place.rank)])
        assert whole not in twin.state


def test_a_table_without_window_gives_the_optimizer_the_shard_itself():
    table = table_of(parameters()[0], 0, has_window=False)
    with torch.no_grad():
        table.parameter.add_(1)
    assert torch.equal(table.shard, parameters()[0].detach()[::2] + 1)
    table.deposit(torch.tensor([1, 4]), torch.ones(2, WIDTH, dtype=torch.float64))
    table.deposit(torch.tensor([4]), torch.ones(1, WIDTH, dtype=torch.float64))
    assert table.gradient.sum(1).tolist() == [0, WIDTH, 0, 0, 2 * WIDTH, 0]
