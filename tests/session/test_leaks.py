"""A step leaves nothing behind."""

import gc
import weakref

import pytest
import torch

from armillary.facts.plan import Choice
from armillary.session.attach import attach
from scenes import OPTIMIZERS, Mixed, batch_of, loss, plan_for


def rows_that_outlive_their_step(rank, workers, exchange):
    torch.manual_seed(0)
    model = Mixed()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    run = attach(plan_for(model, workers, Choice(exchange), Choice("all_reduce")), model, optimizer)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        value = loss(model, batch_of(rank, step))
        seen += [
            weakref.ref(one.rows) for table in run.tables.values() for one in table.pending if one.rows is not None
        ]
        value.backward()
        optimizer.step()
        del value
    gc.collect()
    run.finish()
    run.transport.close()
    return len(seen), sum(one() is not None for one in seen)


@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows"])
def test_the_rows_of_a_look_up_die_with_their_step(crew, exchange):
    for read, alive in crew(2).run(rows_that_outlive_their_step, exchange):
        assert read > 0
        assert alive == 0
