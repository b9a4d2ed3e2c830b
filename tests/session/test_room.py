"""A plan may count on what the model holds already: it is planned for as a whole, wherever its memory was measured."""

import pytest
import torch
from torch import nn

from armillary.planning.request import PlanRequest
from armillary.session import parallelize as parallelize_file
from armillary.session import plan_job as decide_file
from armillary.session.plan_job import JobRequest, ModelToPlan, plan_job
from planning_cases import machines

WEIGHTS = 8 * (60 * 50 + 50)
FREE = 3 * WEIGHTS  # enough for what a step adds, and not for the whole model once more


def case():
    """A model in float64 that has trained a step with Adam, but for the first of its two layers, which is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50), nn.BatchNorm1d(50, affine=False), nn.Linear(60, 50)).double()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[2].parameters())
    model[2](torch.ones(2, 60, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return model, optimizer


HELD = 2 * WEIGHTS + 3 * WEIGHTS  # both layers; gradient and moments of the second
COUNTS = 2 * 4  # of Adam's steps


def loss(model, batch):
    return model[2](batch).square().mean()


def measured(rank, workers, topology):
    """The memory that planning reckons with, before the first step and after those watched."""
    model, optimizer = case()
    free = machines(1, workers, memory=FREE)
    batches = [torch.ones(4, 60, dtype=torch.float64)] * 2 * workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decide_file, "measure", lambda _: free)
        patch.setattr(parallelize_file, "measure_links", lambda _: free)
        subject = ModelToPlan(model, optimizer, loss, lambda _: batches)
        decided = plan_job(subject, JobRequest(PlanRequest(), topology=topology))
        run = parallelize_file.parallelize(model, optimizer)
    watched = run._engine.job.topology
    run.close()
    return decided.topology.memory_bytes, watched.memory_bytes


def test_what_the_model_its_gradients_and_its_state_hold_is_room_for_the_plan(crew):
    for memory, watched in crew(2).run(measured, None):
        assert memory == watched == FREE + HELD + COUNTS


def test_a_topology_that_is_given_says_itself_what_a_rank_may_hold(crew):
    assert [memory for memory, _ in crew(2).run(measured, machines(1, 2, memory=1 << 30))] == [1 << 30] * 2
