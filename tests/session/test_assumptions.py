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
