"""On an accelerator: one process, and two that share it over gloo, train as one plain process does there."""

import copy

import pytest
import torch
from torch import nn

from armillary.plans import Choice
from armillary.reference.serial import train_step
from armillary.session.attach import attach
from beside import close
from scenes import OPTIMIZERS, Mixed, batch_of, loss, plan_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an accelerator: torch.cuda.is_available() is False"
    ),
]
STEPS = 3
ROWS = {
    "owned_rows": Choice("owned_rows"),
    "hashed": Choice("owned_rows", {"order": "hashed"}),
    "gather_rows": Choice("gather_rows"),
    "all_reduce": Choice("all_reduce"),
}


def on_device(batch):
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def train_both(rank, workers, rows, optimizer_name):
    torch.manual_seed(7)
    reference = Mixed().double().cuda()
    model = copy.deepcopy(reference)
    optimizer, truth = (OPTIMIZERS[optimizer_name](m.parameters()) for m in (model, reference))
    run = attach(plan_for(model, workers, ROWS[rows], Choice("all_reduce")), model, optimizer, check_order=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, on_device(batch_of(rank, step))).backward()
        clip(model)
        optimizer.step()
        batches = [on_device(batch_of(worker, step)) for worker in range(workers)]
        train_step(reference, truth, batches, loss, before_step=clip)
    places = {run._engine.tables[name].shard.device.type for name in run._engine.tables}
    return close(run, model, reference), places


@pytest.mark.parametrize("optimizer", ["sgd", "adam_fused", "momentum_decay"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("workers", [1, 2])
def test_tables_and_buckets_on_the_device_train_like_one_process(crew, workers, rows, optimizer):
    for far, places in crew(workers).run(train_both, rows, optimizer):
        assert far == {}
        assert places <= {"cuda"}
