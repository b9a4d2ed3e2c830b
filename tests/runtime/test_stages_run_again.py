"""A stage that runs again before its backward computes what its forward computed, whatever the forward wrote."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from armillary.reference.versions import Reference
from armillary.schedules.cyclic import cyclic
from armillary.schedules.gpipe import gpipe
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import TrainSpec, in_a_row
from channels import in_threads
from staged_models import OPTIMIZERS, WIDTH, as_stages, data, same, squared_error

STEPS = 3
BOTH = frozenset({0, 1})


class Codebook(nn.Module):
    """Reads a moving average of what it has seen, and moves it in some forwards only."""

    def __init__(self, every):
        super().__init__()
        self.every, self.inner = every, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, value):
        made = self.inner(value) * (1 + self.mean * self.mask)
        self.seen += 1
        if int(self.seen) % self.every == 0:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(made.mean(0))
        return torch.tanh(made)


def spectral():
    return spectral_norm(nn.Linear(WIDTH, WIDTH))


MODELS = {"spectral norm": spectral, "codebook": lambda: Codebook(1), "codebook at times": lambda: Codebook(2)}


def modules_of(make):
    torch.manual_seed(5)
    return nn.ModuleList(nn.Sequential(make(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)).double()


def state(module):
    return [*module.parameters(), *module.buffers()]


def truth(stages, schedule):
    """Parameters and buffers of each stage after some steps in one process."""
    reference = Reference(stages, OPTIMIZERS["momentum"](stages.parameters()), schedule, squared_error)
    for batches in data(STEPS, schedule.micro_batches):
        reference.step(batches)
    return [state(stage) for stage in stages]


def trained(stages, schedule, recompute, seat=None):
    optimizer = OPTIMIZERS["momentum"](stages.parameters())
    run = Interpreter(as_stages(stages), optimizer, TrainSpec(schedule, squared_error, recompute=recompute), seat)
    for batches in data(STEPS, schedule.micro_batches):
        run.step(batches)
    run.settle()
    return [state(stage) for stage in stages]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recompute", [frozenset(), BOTH], ids=["kept", "again"])
def test_a_buffer_that_a_forward_reads_and_writes_is_read_again_as_it_was(kind, recompute):
    model, schedule = modules_of(MODELS[kind]), gpipe(2, 2)
    wanted = truth(copy.deepcopy(model), schedule)

    def alone(rank, channel):
        return trained(copy.deepcopy(model), schedule, recompute, in_a_row(schedule, rank, channel))[rank]

    for found, want in zip(in_threads(2, alone), wanted, strict=True):
        assert same(found, want)


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_so_on_one_device_where_forwards_of_the_next_step_come_between(kind):
    schedule = cyclic(2, slack=1)
    model = modules_of(MODELS[kind])
    found, wanted = trained(copy.deepcopy(model), schedule, BOTH), truth(model, schedule)
    assert all(same(*pair) for pair in zip(found, wanted, strict=True))


def test_only_buffers_that_were_written_are_kept():
    (stage,) = as_stages([Codebook(2)])
    founds = []
    for _ in range(2):
        with stage.buffers.forward() as found:
            stage.module(torch.ones(3, WIDTH))
        founds.append(found)
    assert [sorted(found.written) for found in founds] == [["mean", "seen"]] * 2
    assert [int(found.written["seen"]) for found in founds] == [0, 1]
