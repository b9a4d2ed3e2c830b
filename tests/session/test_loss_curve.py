"""The loss curve does not depend on the number of workers: four draw that of one with all batches."""

from contextlib import nullcontext
from itertools import islice

import pytest
import torch

from armillary.cli.names import find, small
from armillary.session.attach import attach
from armillary.session.double_precision import InDouble
from armillary.session.plan_job import JobRequest, ModelToPlan, plan_job

STEPS, SHARES = 6, 4


def curve(rank, workers):
    """Mean loss of the four shares at every step; a worker trains on 4 / workers of them, accumulating."""
    task = InDouble(find("language_model", small("language_model")))
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    seen = [list(islice(task.batches("train", share, SHARES, 0), STEPS)) for share in range(SHARES)]
    few = [batch for step in zip(*seen, strict=True) for batch in step][: 2 * SHARES]
    plan = plan_job(ModelToPlan(model, optimizer, task.loss, lambda _: few), JobRequest()).plan
    run = attach(plan, model, optimizer)
    mine = range(rank * SHARES // workers, (rank + 1) * SHARES // workers)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for share in mine:
            loss = task.loss(model, seen[share][step])
            with nullcontext() if share == mine[-1] else run.no_sync():
                (loss / len(mine)).backward()
            total += loss.item()
        optimizer.step()
        losses.append(sum(run._transport.share(total)) / SHARES)
    run.close()
    return losses


def test_four_workers_draw_the_loss_curve_of_one(crew):
    alone, four = crew(1).run(curve)[0], crew(4).run(curve)[0]
    assert four == pytest.approx(alone, rel=1e-10)
    assert alone[-1] < alone[0], "a curve that does not fall would be the same whatever the exchange did"
