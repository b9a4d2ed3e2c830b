"""The weights of one stage: where the gradients of its steps are added up."""

import copy
import weakref

import pytest
import torch
from torch import nn

from armillary.schedules.accumulation import accumulation
from armillary.schedules.corrections.error_feedback import error_feedback
from armillary.schedules.cyclic import cyclic
from armillary.stages.interpreter import Interpreter
from armillary.stages.optimizer_step import CorrectedStep, options_of
from armillary.stages.partition import Stage
from armillary.stages.reducer import StepMeans
from armillary.stages.train_spec import TrainSpec
from armillary.stages.weights import StageWeights


def made(corrections=()):
    torch.manual_seed(0)
    module = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    step = CorrectedStep(optimizer, cyclic(2, slack=2), 0, corrections)
    stage = Stage(0, module, {"weight": "weight"})
    means = StepMeans(0, dict(stage.module.named_parameters()), 2)
    return means, StageWeights(stage, step, means.keep), optimizer


def stepped(means, store, optimizer, gradients):
    """One step of the store; returns its mean gradient, as it was handed out."""
    for micro_batch, gradient in enumerate(gradients):
        means.expect(store.newest, micro_batch)
        means.add("weight", gradient)
        found = means.complete()
    (mean,) = found.values()
    seen = mean.clone()
    store.advance(found, options_of(optimizer))
    return mean, seen


def test_the_first_gradient_becomes_the_sum_and_that_of_the_last_step_goes_when_it_is_there():
    means, store, optimizer = made()
    given = torch.ones(2, 3)
    first, seen = stepped(means, store, optimizer, [given, torch.full((2, 3), 3.0)])
    assert first is given and torch.equal(seen, torch.full((2, 3), 2.0))
    kept = weakref.ref(first)
    del first, given
    assert kept() is not None
    means.expect(1, 0)
    means.add("weight", torch.ones(2, 3))
    assert kept() is None


@pytest.mark.parametrize("beside", [False, True])
def test_memory_that_is_also_anothers_is_left_alone(beside):
    """The value's gradient is on its way to another stage when the next micro-batch is added."""
    means, _, _ = made()
    theirs = torch.ones(6)
    means.expect(0, 0)
    means.add("weight", theirs.view(2, 3))
    means.complete([None, theirs] if beside else [])
    means.expect(0, 1)
    means.add("weight", torch.full((2, 3), 3.0))
    (mean,) = means.complete().values()
    assert torch.equal(mean, torch.full((2, 3), 2.0))
    assert torch.equal(theirs, torch.ones(6)) == beside


class Twins(nn.Module):
    """Two parameters whose gradients are the same memory."""

    def __init__(self):
        super().__init__()
        self.square, self.long = nn.Parameter(torch.rand(3, 3)), nn.Parameter(torch.rand(9, 1))

    def forward(self, value):
        return value * (self.square.view(-1) + self.long.view(-1))


def test_two_parameters_whose_gradients_share_memory_get_their_own_sums():
    torch.manual_seed(0)
    start, given = Twins(), [torch.rand(9) for _ in range(3)]
    want = copy.deepcopy(start)
    torch.stack([want(value).sum() for value in given]).mean().backward()
    module = copy.deepcopy(start)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    stage = Stage(0, module, {name: name for name, _ in module.named_parameters()})
    spec = TrainSpec(accumulation(3, 1), lambda output, _: output.sum())
    seen = {}
    optimizer.register_step_pre_hook(lambda *_: seen.update({n: p.grad for n, p in module.named_parameters()}))
    run = Interpreter([stage], optimizer, spec)
    run.step([(value, None) for value in given])
    run.settle()
    for name, parameter in want.named_parameters():
        assert torch.allclose(seen[name], parameter.grad, rtol=1e-6), name


def test_what_a_correction_looks_at_in_the_next_step_is_not_written_over():
    means, store, optimizer = made([error_feedback()])
    first, seen = stepped(means, store, optimizer, [torch.ones(2, 3), torch.full((2, 3), 3.0)])
    second, _ = stepped(means, store, optimizer, [torch.full((2, 3), 5.0), torch.ones(2, 3)])
    assert first.data_ptr() != second.data_ptr() and torch.equal(first, seen)


@pytest.mark.parametrize(("given", "mean"), [((), None), ((0,), 0.5), ((1,), 0.5), ((0, 1), 1.0)])
def test_the_mean_is_over_all_micro_batches_whichever_gave_a_gradient(given, mean):
    means, _, _ = made()
    for micro_batch in (0, 1):
        means.expect(0, micro_batch)
        if micro_batch in given:
            means.add("weight", torch.ones(2, 3))
        found = means.complete()
    assert [one.tolist() for one in found.values()] == ([] if mean is None else [[[mean] * 3] * 2])
