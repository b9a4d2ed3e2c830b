"""Runs that take turns on one transport: each trains as it would alone, bit for bit."""

import itertools
from dataclasses import replace

import pytest
import torch

from armillary.plans import TURN_BYTES, Choice, Link, Topology
from armillary.session.attach import attach, attach_over
from armillary.session.job import TrainJob
from armillary.transport.transport import Transport
from scenes import OPTIMIZERS, Mixed, batch_of, loss, plan_for

STEPS, TURN = 9, 2
FAST = Topology(1, 2, Link(0, 1e10), Link(0, 1e10), 1 << 30)
PLANS = {"gradients": (Choice("owned_rows"), "gradients"), "rows": (Choice("owned_rows"), "rows"),
         "whole": (Choice("all_reduce"), "none")}  # fmt: skip


def losses_of(plan_name, workers, transport):
    """A step at a time; what is under way when it pauses stays under way."""
    torch.manual_seed(7)
    model = Mixed()
    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    rows, prefetch = PLANS[plan_name]
    plan = plan_for(model, workers, rows, Choice("all_reduce"))
    groups = [replace(g, prefetch=prefetch) if g.layout == "row_sharded" else g for g in plan.groups]
    mine = replace(plan, groups=tuple(groups))
    run = attach_over(transport or Transport(), mine, TrainJob(model, optimizer), owns_transport=False)
    for batch in run.batches([batch_of(run.rank, step) for step in range(STEPS)]):
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield value.item()
    run._engine.finish()


def by_turns(rank, workers):
    alone = {name: list(losses_of(name, workers, None)) for name in PLANS}
    shared = Transport()
    going = {name: losses_of(name, workers, shared) for name in PLANS}
    found = {name: [] for name in PLANS}
    while any(len(losses) < STEPS for losses in found.values()):
        for name, losses in going.items():
            found[name] += itertools.islice(losses, TURN)
    for losses in going.values():
        assert list(losses) == []
    shared.close()
    return alone, found


@pytest.mark.parametrize("workers", [2, 4])
def test_each_trains_as_it_would_alone(crew, workers):
    for alone, found in crew(workers).run(by_turns):
        assert found == alone
        assert all(len(set(losses)) == STEPS for losses in found.values())


def refusals(rank, workers):
    model = Mixed()
    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    plan = plan_for(model, workers, Choice("owned_rows"), Choice("all_reduce"))
    transport = Transport(2)
    with pytest.raises(ValueError, match="rank 0: the transport given") as refused:
        attach_over(transport, plan, TrainJob(model, optimizer))
    transport.close()
    return str(refused.value)


def test_connections_made_for_another_plan_are_refused_on_every_rank(crew):
    for said in crew(2).run(refusals):
        assert "nodes of 2, the plan wants nodes of 1" in said and "Transport(workers_per_node=1" in said


def own_turns(rank, workers):
    found = []
    for topology in (None, FAST):
        model = Mixed()
        optimizer = OPTIMIZERS["adagrad"](model.parameters())
        plan = plan_for(model, workers, Choice("owned_rows"), Choice("all_reduce"))
        with attach(plan, model, optimizer, topology=topology) as run:
            found.append(run._transport.pairwise.turn_bytes)
    return found


def test_a_run_takes_turns_as_its_links_want(crew):
    assert crew(2).run(own_turns) == [[TURN_BYTES, FAST.turn_bytes]] * 2
