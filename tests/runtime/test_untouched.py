"""A profiled model trains on as if nobody had looked: bit for bit, and so does the program around it."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from armillary.profiler.profiler import profile


class Stateful(nn.Module):
    """Everything a step can leave behind: running statistics, a counter, a state, dropout, rows rescaled."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, max_norm=0.5)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 1)
        self.register_buffer("replaced", torch.zeros(2))
        self.steps = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.steps += 1
        self.replaced = self.replaced + 1
        self.last = self.dropout(self.norm(self.table(ids)))
        return self.head(self.last)


def noisy(model: nn.Module, ids: Tensor) -> Tensor:
    noise = random.random() + np.random.rand() + torch.rand(())
    return (model(ids) * noise).sum()


BATCHES = [torch.tensor([0, 1, 2]), torch.tensor([3, 3, 8])]


@pytest.fixture
def model() -> Stateful:
    torch.manual_seed(1)
    built = Stateful()
    built.head.weight.grad = torch.ones(1, 4)
    return built


def test_weights_buffers_and_attributes_are_as_they_were(model: Stateful) -> None:
    before, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
    profile(model, BATCHES, noisy)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.steps == 0 and set(vars(model)) == attributes


def test_gradients_are_as_they_were(model: Stateful) -> None:
    mine = model.head.weight.grad
    profile(model, BATCHES, noisy)
    assert model.head.weight.grad is mine and torch.equal(mine, torch.ones(1, 4))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "head.weight")


def test_random_streams_go_on_as_if_nothing_had_been_drawn(model: Stateful) -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    want = draw()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    profile(model, BATCHES, noisy)
    assert draw() == want


def test_the_mode_and_the_hooks_are_kept(model: Stateful) -> None:
    model.eval()
    model.dropout.train()
    fired: list[str] = []
    model.head.bias.register_post_accumulate_grad_hook(lambda _: fired.append("step"))
    profile(model, BATCHES, noisy)
    assert (model.training, model.dropout.training) == (False, True)
    assert not fired and not model.head._forward_hooks and not model.head._forward_pre_hooks
    noisy(model, BATCHES[0]).backward()
    assert fired == ["step"]


def test_a_loss_that_fails_leaves_the_model_as_it_was(model: Stateful) -> None:
    before = copy.deepcopy(model.state_dict())

    def fails(model: nn.Module, ids: Tensor) -> Tensor:
        noisy(model, ids)
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        profile(model, BATCHES, fails)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.head.weight.grad is not None and not model.head._forward_hooks


def test_training_after_a_profile_equals_training_without(model: Stateful) -> None:
    twin = copy.deepcopy(model)
    state = torch.get_rng_state()
    profile(model, BATCHES, noisy)
    ends = []
    for trained in (model, twin):
        torch.set_rng_state(state)
        random.seed(0)
        np.random.seed(0)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for ids in BATCHES:
            optimizer.zero_grad()
            noisy(trained, ids).backward()
            optimizer.step()
        ends.append(trained.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
