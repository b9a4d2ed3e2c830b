"""On an accelerator, ranks that are threads train a pipeline in NCCL's order of messages as one process does there."""

import pytest
import torch
from torch import nn

from armillary.reference.versions import Reference
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.gpipe import gpipe
from armillary.schedules.one_f_one_b import one_f_one_b
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import TrainSpec, in_a_row
from channels import in_threads
from staged_models import as_stages, data, same, squared_error, stages_of, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an accelerator: torch.cuda.is_available() is False"
    ),
]
STEPS = 4
SCHEDULES = [gpipe(2, 3), one_f_one_b(2, 3), cyclic_pipeline(2, 2), cyclic_pipeline(3, 3), cyclic(3)]


def model_of(schedule):
    return stages_of(schedule.stages, dropout=0.0).cuda()  # ranks that are threads share one random stream


def batches_of(schedule):
    return [[(value.cuda(), wanted.cuda()) for value, wanted in step] for step in data(STEPS, schedule.micro_batches)]


def optimizer_of(stages: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(stages.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("rule", ["nccl", "gloo"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.stages}")
def test_ranks_on_the_device_end_where_one_process_does(schedule, rule):
    truth = model_of(schedule)
    reference = Reference(truth, optimizer_of(truth), schedule, squared_error)
    for batches in batches_of(schedule):
        reference.step(batches)
    step_batches = batches_of(schedule)

    def rank_job(rank, channel):
        stages = model_of(schedule)
        seat = in_a_row(schedule, rank, channel, one_queue=rule == "nccl")
        run = Interpreter(as_stages(stages), optimizer_of(stages), TrainSpec(schedule, squared_error), seat)
        for batches in step_batches:
            run.step([batches[number] for number in run.micro_batches])
        run.settle()
        return [weights(stages[j]) for j in sorted(run._lowering.owned)], sorted(run._lowering.owned)

    trained = in_threads(schedule.stages, rank_job, rule)
    assert sorted(j for _, owned in trained for j in owned) == list(range(schedule.stages))
    for kept, owned in trained:
        assert all(same(weights_of, weights(truth[j])) for weights_of, j in zip(kept, owned, strict=True))
