"""Parts of a stage that torch's checkpoint runs again in backward read the weights that their forward read."""

from contextlib import nullcontext

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint

from armillary.reference.versions import Reference
from armillary.schedules.cyclic import cyclic
from armillary.stages.interpreter import Interpreter
from armillary.stages.stage_pass import StageActivation
from armillary.stages.train_spec import TrainSpec, in_a_row
from channels import in_threads
from staged_models import OPTIMIZERS, as_stages, data, same, squared_error, stages_of, weights

STEPS = 5


class Again(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, value):
        return checkpoint(self.inner, value, use_reentrant=False)


def trained(schedule, seat=None):
    stages = nn.ModuleList(Again(stage) for stage in stages_of(schedule.stages, dropout=0.0))
    optimizer = OPTIMIZERS["momentum"](stages.parameters())
    run = Interpreter(as_stages(stages), optimizer, TrainSpec(schedule, squared_error), seat)
    for batches in data(STEPS, schedule.micro_batches):
        run.step([batches[number] for number in run.micro_batches])
    run.settle()
    return weights(stages)


def truth(schedule):
    stages = stages_of(schedule.stages, dropout=0.0)
    reference = Reference(stages, OPTIMIZERS["momentum"](stages.parameters()), schedule, squared_error)
    for batches in data(STEPS, schedule.micro_batches):
        reference.step(batches)
    return weights(stages)


SCHEDULES = [cyclic(3), cyclic(3, slack=3), cyclic(2, 4, 1)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.stale_share:.2f}")
def test_on_one_device_and_round_a_ring(schedule):
    wanted = truth(schedule)
    assert same(trained(schedule), wanted)
    for found in in_threads(
        schedule.workers, lambda rank, channel: trained(schedule, in_a_row(schedule, rank, channel))
    ):
        assert same(found, wanted)


def test_the_newest_weights_would_be_others(monkeypatch):
    monkeypatch.setattr(StageActivation, "within", lambda self: nullcontext())
    assert not same(trained(cyclic(3)), truth(cyclic(3)))
