"""The weights of one stage: where the gradients of its steps are added up."""

import pytest
import torch
from torch import nn

from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.delayed_step import options_of
from armillary.runtime.cyclic.remedied_step import RemediedStep
from armillary.runtime.cyclic.versions import StageWeights
from armillary.schedules.cyclic import cyclic
from armillary.schedules.remedies.error_feedback import error_feedback


def made(remedies=()):
    torch.manual_seed(0)
    module = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    step = RemediedStep(optimizer, cyclic(2, slack=2), 0, remedies)
    return StageWeights(Stage(0, module, {"weight": "weight"}), step, 2), optimizer


def stepped(store, optimizer, gradients):
    """One step of the store; returns its mean gradient, as it was handed out."""
    for micro_batch, gradient in enumerate(gradients):
        store.expect(store.newest, micro_batch)
        store.add("weight", gradient)
        means = store.complete(store.newest, micro_batch)
    (mean,) = means.values()
    seen = mean.clone()
    store.advance(means, options_of(optimizer))
    return mean, seen


def test_the_sum_of_a_step_lies_where_that_of_the_last_one_did():
    store, optimizer = made()
    first, _ = stepped(store, optimizer, [torch.ones(2, 3), torch.full((2, 3), 3.0)])
    second, seen = stepped(store, optimizer, [torch.full((2, 3), 5.0), torch.ones(2, 3)])
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(seen, torch.full((2, 3), 3.0))


def test_a_gradient_that_is_somebody_elses_tensor_is_left_alone():
    """Autograd may give one tensor to two parameters."""
    store, optimizer = made()
    theirs = torch.ones(2, 3)
    _, seen = stepped(store, optimizer, [theirs, theirs])
    assert torch.equal(theirs, torch.ones(2, 3)) and torch.equal(seen, theirs)


def test_what_a_remedy_looks_at_in_the_next_step_is_not_written_over():
    store, optimizer = made([error_feedback()])
    first, seen = stepped(store, optimizer, [torch.ones(2, 3), torch.full((2, 3), 3.0)])
    second, _ = stepped(store, optimizer, [torch.full((2, 3), 5.0), torch.ones(2, 3)])
    assert first.data_ptr() != second.data_ptr() and torch.equal(first, seen)


@pytest.mark.parametrize(("given", "mean"), [((), None), ((0,), 0.5), ((1,), 0.5), ((0, 1), 1.0)])
def test_the_mean_is_over_all_micro_batches_whichever_gave_a_gradient(given, mean):
    store, _ = made()
    for micro_batch in (0, 1):
        store.expect(0, micro_batch)
        if micro_batch in given:
            store.add("weight", torch.ones(2, 3))
        means = store.complete(0, micro_batch)
    assert [found.tolist() for found in means.values()] == ([] if mean is None else [[[mean] * 3] * 2])
