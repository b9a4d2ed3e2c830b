"""Options of an optimizer that goes on: what is asked anew wins, what schedulers moved goes on from there."""

import pytest
import torch
from torch import nn

from armillary.session.train_settings import apply_new_options, group_options


def made(**options):
    """Two groups, whose rates a scheduler halves in every step."""
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, **{"lr": 0.1, "momentum": 0.9, **options})
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_what_is_asked_as_before_stays_as_it_was_loaded():
    optimizer, scheduler = made()
    begun = group_options(optimizer)
    optimizer.step()
    scheduler.step()
    assert apply_new_options(optimizer, begun, group_options(made()[0])) == ""
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.5]


def test_a_rate_that_is_asked_anew_is_where_a_scheduler_would_have_brought_it_and_goes_on():
    (optimizer, scheduler), (wanted, along) = made(), made(lr=0.02, weight_decay=0.01)
    begun, asked = group_options(optimizer), group_options(wanted)
    for one in (optimizer, scheduler, wanted, along):
        one.step()
    said = apply_new_options(optimizer, begun, asked)
    assert said == (
        "lr is 0.01 as asked now, no longer 0.05, weight_decay is 0.01 as asked now, no longer 0, "
        "initial_lr is 0.02 as asked now, no longer 0.1"
    )
    for one in (optimizer, scheduler, wanted, along):
        one.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([g["lr"] for g in wanted.param_groups])
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.01}
