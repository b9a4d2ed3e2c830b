"""A schedule brings the driver that takes its steps: it is found by name, and asked to begin a plan."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

import armillary
from armillary.planning.planner import plan
from armillary.plans import Choice, Link, Topology
from armillary.profiler.profiler import profile
from armillary.schedules import SCHEDULES
from armillary.session import schedule_engine
from armillary.session.drivers import DRIVERS, Driver, driver_of

BATCH = torch.ones(2, 3)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def loss(model, batch):
    return model(batch).square().mean()


@contextmanager
def shelf(**drivers):
    """Inside, a schedule "mine" names the driver "my_driver", which is one of these or nobody's."""
    before = dict(SCHEDULES.all()), dict(DRIVERS.all())
    SCHEDULES.register("mine", replace(SCHEDULES["accumulation"], step_mode="my_driver", examples=()))
    for name, driver in drivers.items():
        DRIVERS.register(name, driver)
    try:
        yield
    finally:
        SCHEDULES._entries, DRIVERS._entries = before


def made():
    found = profile(model_of(), [BATCH], loss)
    return plan(found, Topology(1, 1, Link(1e-4, 1e8), Link(1e-4, 1e8), 1 << 30), schedule="mine(micro_batches=1)")


def test_steps_are_taken_by_the_driver_that_the_schedule_names(tmp_path):
    asked, owned = [], DRIVERS["owned_loop"]

    def begun(*given):
        asked.append("begin")
        return owned.begin(*given)

    with shelf(my_driver=Driver(owned.checks, begun)):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with armillary.attach(made(), model, optimizer, loss=loss, example=BATCH) as run:
            run.step([BATCH])
            run.load(run.save(tmp_path))
    assert asked == ["begin"]


def test_what_a_driver_of_ones_own_begins_is_verified_as_what_it_is():
    """As what owns the loop, where that is what it begins."""

    def of_hooks(plan, *more):
        return DRIVERS["user_loop"].begin(replace(plan, schedule=Choice("simultaneous")), *more)

    asked = {"steps": 2, "exchanges": (), "schedule": "mine(micro_batches=1)"}
    given = [torch.ones(2, 3) * number for number in range(2)]
    with shelf(my_driver=DRIVERS["owned_loop"]):
        model = model_of()
        assert armillary.verify(model, torch.optim.SGD(model.parameters(), 0.1), given, loss, **asked).is_equal
    with (
        shelf(my_driver=Driver((), of_hooks)),
        pytest.raises(ValueError, match="driver 'my_driver' makes an engine of"),
    ):
        armillary.verify(model, torch.optim.SGD(model.parameters(), 0.1), given, loss, **asked)


def test_a_driver_that_nobody_registered_is_told_of():
    with shelf(), pytest.raises(ValueError, match="no driver 'my_driver'; there are owned_loop"):
        driver_of(replace(made(), schedule=Choice("mine", {"micro_batches": 1})))


def test_a_schedule_that_is_refused_late_leaves_the_optimizer_as_it_was(monkeypatch):
    def refused(parts):
        raise ValueError("refused late")

    monkeypatch.setattr(schedule_engine, "InterpretedEngine", refused)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shelf(my_driver=DRIVERS["owned_loop"]), pytest.raises(ValueError, match="refused late"):
        armillary.attach(made(), model, optimizer, loss=loss, example=BATCH)
    before = model[0].weight.detach().clone()
    loss(model, BATCH).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    optimizer.load_state_dict(optimizer.state_dict())
