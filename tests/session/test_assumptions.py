"""What planning assumes of an optimizer is found by trying it, whatever its groups, and leaves it alone."""

import pytest
import torch
from torch import nn

from armillary import assumptions_of

MOMENTUM, DECAY = {"momentum": 0.9}, {"weight_decay": 1e-5}


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(("options", "slots"), [(MOMENTUM, 1), (DECAY, 0)])
def test_of_groups_with_other_options_the_most_is_assumed(options, slots, is_first):
    plain, other = {"params": [nn.Parameter(torch.ones(2, 3))]}, {"params": [nn.Parameter(torch.ones(3, 2))], **options}
    optimizer = torch.optim.SGD([other, plain] if is_first else [plain, other], lr=0.1)
    for steps in range(2):
        found = assumptions_of(optimizer)
        assert (found.optimizer_slots, found.moves_quiet_rows) == (slots, True), steps
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()


class Scaled(torch.optim.Optimizer):
    """Its step reads an attribute of its own."""

    def __init__(self, parameters):
        self.scale = 0.5
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"] * self.scale)


def test_an_optimizer_is_tried_with_the_attributes_that_its_step_reads():
    parameter = nn.Parameter(torch.ones(3, 2))
    found = assumptions_of(Scaled([parameter]))
    assert (found.optimizer_slots, found.moves_quiet_rows) == (0, False)
    assert torch.equal(parameter, torch.ones(3, 2))


def test_an_optimizer_that_steps_by_a_closure_alone_counts_as_adam_and_is_left_alone():
    parameter = nn.Parameter(torch.ones(3, 2))
    found = assumptions_of(torch.optim.LBFGS([parameter]))
    assert (found.optimizer_slots, found.moves_quiet_rows, found.step_slots) == (2, True, 0)
    assert torch.equal(parameter, torch.ones(3, 2))


def test_a_count_of_steps_is_no_tensor_of_state_though_a_single_number_is_trained_first():
    parameters = [nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(3, 2))]
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert assumptions_of(optimizer).optimizer_slots == 2
