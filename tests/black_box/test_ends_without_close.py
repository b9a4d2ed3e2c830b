"""A script may end after its last step without close, where a step is whole: what it sent has arrived by then."""

import os
import time

import torch
from torch import nn

import armillary
from forked import Job

WIDE, ROWS = 20_000, 100  # of what crosses: 8 MB, under way for longer than a script takes to end
PATIENCE = {"report_after": None, "timeout": 20.0}


class Slow(nn.Module):
    """Its backward takes a while on rank 0."""

    def forward(self, x):
        if x.requires_grad and torch.distributed.get_rank() == 0:
            x.register_hook(lambda gradient: time.sleep(0.3))
        return torch.tanh(x)


def wide_chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), Slow(), nn.Linear(2, WIDE), nn.Linear(WIDE, 2))


def mean_square(model, batch):
    return model(batch).square().mean()


def ends(rank, ranks, schedule, steps):
    """Steps, then the end, as of a program that is ended."""
    model, draw = wide_chain(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(ROWS, 3, generator=draw) for _ in range(2)]
    run = armillary.parallelize(model, optimizer, batches, mean_square, schedule=schedule, **PATIENCE)
    for _ in range(steps):
        run.step(batches)
    print("ended well", flush=True)
    os._exit(0)


def test_ranks_of_an_exact_pipeline_may_be_ended_right_after_a_step():
    for job in [Job(2, ends, "gpipe(micro_batches=2)", 1), Job(2, ends, "one_f_one_b(micro_batches=2)", 2)]:
        told = job.ended()
        assert [(one.code, one.out) for one in told] == [(0, "ended well\n")] * 2, told
