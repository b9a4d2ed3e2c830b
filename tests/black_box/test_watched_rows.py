"""Watched steps of tables with `sparse=True`: gradients stay rows, as under DDP, and nothing goes over a whole table.

Every operation of this rank is looked at, so what is counted is work, not seconds.
"""

import contextlib

import pytest
import torch
from plain_loop import differ, state_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import armillary
from forked import Job

ROWS, WIDTH, WIDE, STEPS, WATCHED = 120_000, 4, 1200, 5, 2
MADE_OF = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.others = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.body, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDE)  # as large as a table may be in small

    def forward(self, words):
        return self.wide(self.body(self.words(words).sum(1) + self.others(words).mean(1)).mean(0))


def made():
    torch.manual_seed(4)
    return Words().double()


def loss_of(model, habit, worker, step):
    draw = torch.Generator().manual_seed(100 * step + worker)
    words = torch.randint(ROWS, (6, 3), generator=draw)
    if habit == "most rows":
        words = torch.randint(ROWS, (ROWS, 3), generator=draw)
    if habit == "unread on one" and (worker, step) == (1, 0):
        return model.wide(model.body(torch.ones(1, WIDTH, dtype=torch.float64))).square().mean()
    value = model(words).square().mean()
    if habit == "whole on one" and (worker, step) == (1, 0):
        value = value + model.words.weight.square().mean()
    return value


def one_process(habit, optimizer_name):
    model = made()
    optimizer = MADE_OF[optimizer_name](model.parameters())
    parts = 2 if habit == "accumulate" else 1
    for step in range(STEPS):
        if habit != "forget zero_grad" or step >= WATCHED:
            optimizer.zero_grad()
        found = {}
        for worker in range(2):
            mine = made()
            mine.load_state_dict(model.state_dict())
            for part in range(parts):
                loss_of(mine, habit, worker, step * parts + part).backward()
            for name, parameter in mine.named_parameters():
                if parameter.grad is not None:
                    found.setdefault(name, []).append(parameter.grad.to_dense())
        for name, parameter in model.named_parameters():
            mean = sum(found[name]) / 2 if name in found else None
            parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        optimizer.step()
    return state_of(model)


class Largest(TorchDispatchMode):
    """The most numbers that an operation made, beyond the parameters and what the optimizer keeps."""

    def __init__(self, model, optimizer):
        super().__init__()
        state = tree_leaves([dict(one) for one in optimizer.state.values()])
        kept = [*model.parameters(), *(one for one in state if isinstance(one, torch.Tensor))]
        self.known = {tensor.untyped_storage()._cdata for tensor in kept}
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = () if func.is_view else tree_leaves(result)
        for leaf in made:
            is_plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
            if is_plain and leaf.untyped_storage()._cdata not in self.known:
                self.numbers = max(self.numbers, leaf.numel())
        return result


def watched(rank, world, habit, optimizer_name):
    model = made()
    optimizer = MADE_OF[optimizer_name](model.parameters())
    run = armillary.parallelize(model, optimizer, check_finite=habit == "check_finite")
    parts, listed, largest = 2 if habit == "accumulate" else 1, [], Largest(model, optimizer)
    for step in range(STEPS):
        with largest if step < WATCHED else contextlib.nullcontext():
            if habit != "forget zero_grad" or step >= WATCHED:
                optimizer.zero_grad()
            for part in range(parts):
                with run.no_sync() if part + 1 < parts else contextlib.nullcontext():
                    loss_of(model, habit, rank, step * parts + part).backward()
            if step < WATCHED:
                listed.append((model.words.weight.grad.is_sparse, model.others.weight.grad.is_sparse))
            if step + 1 < WATCHED:  # the last watched step plans and moves
                optimizer.step()
        if step + 1 >= WATCHED:
            optimizer.step()
    run.close()
    return state_of(model), listed, largest.numbers


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("habit", ["plain", "accumulate", "unread on one", "check_finite"])
def test_gradients_stay_rows_and_no_operation_is_as_large_as_a_table(crew, habit, optimizer):
    for state, listed, largest in crew(2).run(watched, habit, optimizer):
        assert differ(state, one_process(habit, optimizer), 1e-12) == {}
        assert listed == [(True, True)] * WATCHED
        assert 0 < largest < ROWS


@pytest.mark.parametrize(
    ("habit", "optimizer", "listed"),
    [
        ("plain", "momentum", [(False, False)] * 2),  # which would keep a momentum that lists rows
        ("whole on one", "sgd", [(False, True), (True, True)]),
        ("most rows", "sgd", [(False, False)] * 2),
    ],
)
def test_where_rows_do_not_serve_the_gradient_is_whole(crew, habit, optimizer, listed):
    for state, seen, _ in crew(2).run(watched, habit, optimizer):
        assert differ(state, one_process(habit, optimizer), 1e-12) == {}
        assert seen == listed


def begins(rank, ranks):
    model = made()
    optimizer = MADE_OF["adagrad"](model.parameters())
    run = armillary.parallelize(model, optimizer)
    loss_of(model, "", rank, 0).backward()
    optimizer.step()
    run.close()


def test_a_start_with_adagrad_leaves_no_warning_of_torch_behind():
    assert [(one.code, one.err) for one in Job(2, begins).ended()] == [(0, "")] * 2
