"""Modules that write in the place of what they are given, on either side of a cut, against one process's plain loop."""

import copy

import pytest
import torch
from torch import nn, optim

from armillary.reference.versions import Reference
from armillary.schedules.cyclic import cyclic
from armillary.schedules.gpipe import gpipe
from armillary.schedules.one_f_one_b import one_f_one_b
from armillary.stages.interpreter import Interpreter
from armillary.stages.stage_pass import StageInputs
from armillary.stages.train_spec import TrainSpec, in_a_row
from channels import in_threads
from staged_models import as_stages, same, squared_error, weights

STEPS, MICRO_BATCHES, CHANNELS, SIDE = 3, 2, 3, 6
EVERY_STAGE = frozenset({0, 1, 2})


class Shift(nn.Module):
    """Moves what it is given; the second time it is somewhere else."""

    def forward(self, value):
        return value.mul_(1.5).add_(0.25)


class Beside(nn.Module):
    """Hands on what came beside what it makes of it, and reads the first again after others wrote into it."""

    def __init__(self, is_first):
        super().__init__()
        self.is_first, self.inner = is_first, nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, value):
        if self.is_first:
            return {"came": value, "made": self.inner(value)}
        return self.inner(value["made"]) + value["came"].mul_(2.0)


def conv():
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)


def model_of(first=nn.Identity):
    """Three stages; the second and the third begin in the place of what they are given."""
    torch.manual_seed(3)
    stages = [[first(), conv()], [nn.ReLU(inplace=True), conv()], [nn.ELU(inplace=True), conv()]]
    return nn.ModuleList(nn.Sequential(*stage) for stage in stages).double()


def optimizer_of(model):
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data():
    generator = torch.Generator().manual_seed(7)
    draw = torch.randn(STEPS, MICRO_BATCHES, 2, 2, CHANNELS, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return [[(pair[0].clone(), pair[1].clone()) for pair in step] for step in draw]


def alone(model):
    """A plain loop: weights, losses, and the batches as the loop leaves them."""
    optimizer, losses, batches = optimizer_of(model), [], data()
    for step in batches:
        optimizer.zero_grad()
        for value, target in step:
            loss = squared_error(nn.Sequential(*model)(value), target)
            loss.backward()
            losses.append(loss.detach())
        for parameter in model.parameters():
            parameter.grad /= MICRO_BATCHES
        optimizer.step()
    return weights(model), losses, [value for step in batches for value, _ in step]


def staged(model, schedule, recompute, seat=None):
    run = Interpreter(
        as_stages(model), optimizer_of(model), TrainSpec(schedule, squared_error, recompute=recompute), seat
    )
    batches, losses = data(), []
    for step in batches:
        losses += run.step(step)
    losses += run.settle()
    told = [loss for one in losses for loss in one.losses]
    return model, told, [value for step in batches for value, _ in step]


def in_a_pipeline(model, schedule, recompute):
    def job(rank, channel):
        return staged(copy.deepcopy(model), schedule, recompute, in_a_row(schedule, rank, channel))

    answers = in_threads(3, job)
    found = [weight for rank, (mine, _, _) in enumerate(answers) for weight in weights(mine[rank])]
    return found, answers[-1][1], answers[0][2]


@pytest.mark.parametrize("first", [nn.Identity, Shift])
@pytest.mark.parametrize("recompute", [frozenset(), EVERY_STAGE], ids=["kept", "again"])
@pytest.mark.parametrize("schedule", [gpipe(3, MICRO_BATCHES), one_f_one_b(3, MICRO_BATCHES)], ids=["gpipe", "1f1b"])
def test_a_stage_may_begin_in_the_place_of_what_it_is_given(schedule, recompute, first):
    model = model_of(first)
    found = in_a_pipeline(model, schedule, recompute)
    for mine, wanted in zip(found, alone(model), strict=True):
        assert same(mine, wanted)


@pytest.mark.parametrize("recompute", [frozenset(), EVERY_STAGE], ids=["kept", "again"])
def test_on_one_device_too_where_stages_share_memory(recompute):
    schedule, model = cyclic(3, slack=1), model_of(Shift)
    kept = copy.deepcopy(model)
    reference = Reference(kept, optimizer_of(kept), schedule, squared_error)
    batches = [[*step, step[0]] for step in data()]
    run = Interpreter(as_stages(model), optimizer_of(model), TrainSpec(schedule, squared_error, recompute=recompute))
    for step in copy.deepcopy(batches):
        reference.step([(value.clone(), target) for value, target in step])
    for step in batches:
        run.step([(value.clone(), target) for value, target in step])
    run.settle()
    assert same(weights(model), weights(kept))


def test_what_is_written_into_before_a_stage_runs_again_is_refused_by_name():
    """The second stage writes into what the first read and handed on, in the same memory."""
    model = nn.ModuleList([Beside(True), Beside(False)]).double()
    spec = TrainSpec(cyclic(2), squared_error, recompute=frozenset({0}))
    run = Interpreter(as_stages(model), optimizer_of(model), spec)
    with pytest.raises(RuntimeError, match=r"stage 0 is recomputed, but number 0 .* \(2, 3, 6, 6\), was written"):
        run.step(data()[0])


def test_a_module_gets_the_very_memory_of_the_leaf_and_torch_still_sees_what_a_backward_wants():
    leaf = torch.randn(4, 3).t().requires_grad_()
    (given,) = StageInputs(0, [leaf]).given()
    assert not given.is_leaf and given.data_ptr() == leaf.data_ptr() and given.stride() == leaf.stride()
    squared = given.square()
    given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
