"""Small runs without a common clock, whose owners' logs are replayed in one process: what tests of them share."""

import random
import time
from dataclasses import replace
from functools import cache

import torch
from torch import nn
from torch.nn import functional

import armillary
from armillary.planning.planner import plan
from armillary.plans import Link, Topology
from armillary.plans.update_log import faults, staleness
from armillary.profiler.profiler import profile
from armillary.reference.replay import Replay, replayed

ROWS, WIDTH, BATCH = 40, 4, 6
RATE, FALL = 0.05, 0.8  # a worker's learning rate falls at every step of its own


class Tables(nn.Module):
    """A table read by ids with padding, one summed by bags, dropout, and whole layers of unlike sizes."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.hidden = nn.Linear(2 * WIDTH, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, ids):
        read = torch.cat([self.words(ids).mean(1), self.bags(ids)], 1)
        return self.out(functional.dropout(torch.tanh(self.hidden(read)), 0.2, self.training))


def model_of():
    torch.manual_seed(0)
    return Tables().double()


def loss(model, batch):
    ids, wanted = batch
    return functional.mse_loss(model(ids), wanted)


def batch_of(number):
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(0, ROWS, (BATCH, 5), generator=draw)
    return ids, ids.double().mean(1, keepdim=True) / ROWS


def own_batch(rank, step):
    return batch_of(1000 * rank + step)


OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, RATE, momentum=0.5, weight_decay=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, RATE, initial_accumulator_value=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, RATE),
}


@cache
def profile_of(world):
    """The same on every rank: seconds are made up."""
    found = profile(model_of(), [batch_of(number) for number in range(2 * world)], loss, workers=world)
    stages = [replace(one, forward_seconds=1e-4, backward_seconds=2e-4) for one in found.stages]
    return replace(found, stages=tuple(stages))


def machines(world, **fields):
    return Topology(1, world, Link(1e-6, 1e9), Link(1e-6, 1e9), 1 << 30, **fields)


def plan_of(world, bound, **fields):
    topology = machines(world, **fields)
    return plan(profile_of(world), topology, schedule=f"asynchronous(bound={bound})")


def began(world, bound, optimizer="momentum", **options):
    """(run, model, optimizer). Collective."""
    model = model_of()
    stepping = OPTIMIZERS[optimizer](model.parameters())
    made = plan_of(world, bound)
    run = armillary.attach(made, model, stepping, loss=loss, example=batch_of(0), topology=machines(world), **options)
    return run, model, stepping


def trained(run, stepping, steps, pauses):
    """This rank's steps on batches of its own, with pauses drawn by lot."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stepping, FALL)
    for step in range(steps):
        time.sleep(pauses.random() * 0.004)
        run.step([own_batch(run.rank, step)])
        scheduler.step()


def replay_of(logs, engine, optimizer, batch=None):
    """Parameters by name, as one process has them."""
    model = model_of()
    stepping = OPTIMIZERS[optimizer](model.parameters())

    def options_of(worker, step):
        rate = RATE
        for _ in range(step):
            rate *= FALL
        return [{**group, "lr": rate} for group in stepping.param_groups]

    ownings = engine.part.ownings
    batches = batch or (lambda event: own_batch(event.worker, event.step))
    replayed(Replay(model, stepping, loss, ownings.dense, [*ownings.tables], batches, options_of), logs)
    return {name: one.detach() for name, one in model.named_parameters()}


def replayed_run(rank, world, bound, optimizer, seed, steps=10):
    """What came of one run: tensors that differ from its replay, faults of its logs, staleness, pulls that waited."""
    run, model, stepping = began(world, bound, optimizer)
    trained(run, stepping, steps, random.Random(f"{seed} {rank}"))
    engine = run._engine
    logs = engine.logs()
    with engine.newest():
        mine = {name: one.detach().clone() for name, one in model.named_parameters()}
    run.close()
    differing, error = [], ""
    if rank == 0:
        try:
            truth = replay_of(logs, engine, optimizer)
            differing = [name for name, one in truth.items() if not torch.equal(one, mine[name])]
            moved = [name for name, one in model_of().named_parameters() if not torch.equal(one, mine[name])]
            assert len(moved) == len(truth), "a parameter that did not move says nothing"
        except ValueError as contradiction:
            error = str(contradiction)
    broken = [one for log in logs for one in faults(log, world, bound)]
    stale = [dict(staleness(log)) for log in logs] if not broken else []
    return {
        "differing": differing,
        "error": error,
        "faults": broken,
        "stale": stale,
        "waited": sum(log.waited for log in logs),
    }
