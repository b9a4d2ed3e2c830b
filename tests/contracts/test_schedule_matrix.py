"""Every schedule at its corners: one stage, stages of unequal cost, more workers than stages, each slack.

Each is held to its rules, and trained on ranks with a look at the newest weights, a drain and an export in the middle.
"""

from itertools import pairwise

import pytest
import torch
from torch import nn

import face
from armillary.contracts.schedule import SCHEDULE_RULES
from armillary.plans import Choice
from armillary.schedules import SCHEDULES, read
from armillary.session.plan_job import JobRequest
from armillary.session.verify import verify_workload
from armillary.session.workload import Script
from armillary.transport.transport import Transport

UNEQUAL = ([[1, 1], [2, 2]], [[2, 2], [1, 1]], [[1, 2], [1, 7]], [[3, 1], [1, 1], [1, 5]])
STEPS = 4
MOST = 12 * STEPS  # batches of all steps


def corners(name):
    """(workers, options); what a schedule refuses is none of its corners."""
    knows = SCHEDULES[name].knows
    for workers in (1, 2, 3):
        for shape in ({"stages": 1}, {"stages": 2}, {"stages": 3}, *({"costs": costs} for costs in UNEQUAL)):
            if not shape.keys() <= knows and shape != {"stages": workers}:
                continue
            options = {key: value for key, value in shape.items() if key in knows}
            made = possible(name, options, workers)
            if made is None:
                continue
            slacks = range(made.micro_batches + 1) if "slack" in knows else [None]
            for slack in slacks:
                full = options if slack is None else {**options, "slack": slack}
                if possible(name, full, workers) is not None:
                    yield workers, full


def possible(name, options, workers):
    try:
        made = read(Choice(name, options), workers)
        made.schedule()
    except ValueError:
        return None
    return made


def is_trained(name, workers, options):
    """Whether ranks train it: a corner of each kind, at the ends of its slack."""
    if SCHEDULES[name].is_side_by_side:  # nothing goes from rank to rank but gradients
        return options in ({"stages": 1}, {"costs": UNEQUAL[0], "slack": 0})
    shape, slack = options.get("costs", options.get("stages")), options.get("slack", 0)
    ends = slack in (0, workers) or (name == "zero_ring" and shape == UNEQUAL[0])
    return ends and shape in ((1, UNEQUAL[0]) if workers < 3 else (1, 2, UNEQUAL[2]))


CORNERS = [(name, *corner) for name in SCHEDULES.all() if SCHEDULES[name].owns_loop for corner in corners(name)]


def test_the_corners_are_there():
    for name in ("ring", "zero_ring"):
        mine = [(workers, options) for found, workers, options in CORNERS if found == name]
        assert (2, {"costs": UNEQUAL[0], "slack": 1}) in mine and (3, {"costs": UNEQUAL[2], "slack": 3}) in mine
        assert (3, {"stages": 1, "slack": 0}) in mine and (3, {"stages": 2, "slack": 0}) in mine
    assert {name for name, _, _ in CORNERS} == {name for name in SCHEDULES.all() if SCHEDULES[name].owns_loop}


@pytest.mark.parametrize("name", sorted({name for name, _, _ in CORNERS}))
def test_every_corner_keeps_the_rules(name):
    broken = {}
    for found, workers, options in CORNERS:
        for rule, breaks in SCHEDULE_RULES.items() if found == name else ():
            if said := breaks(read(Choice(name, options), workers), workers):
                broken[f"{Choice(name, options)} on {workers}: {rule}"] = said
    assert not broken


def layers():
    torch.manual_seed(0)
    sizes = (6, 3, 5, 11, 9, 4)
    pairs = [(nn.Linear(into, out), nn.Tanh()) for into, out in pairwise(sizes)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair)).double()


def mean_square(model, batch):
    return model(batch).square().mean()


def batches(count):
    draws = [torch.Generator().manual_seed(number) for number in range(count)]
    return [torch.randn(3, 6, generator=draw, dtype=torch.float64) for draw in draws]


def planned(name, workers, options):
    return face.plan_for(layers(), mean_square, batches(workers), workers, schedule=str(Choice(name, options)))


def trained(rank, world, plans):
    """By plan, what is otherwise than in one process, and whether an export in the middle came through."""
    found = []
    for plan in plans:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        script = Script(model, optimizer, batches(MOST), mean_square, STEPS)
        verified = verify_workload(script, steps=STEPS, request=JobRequest(plan=plan), exchanges=())
        run = face.start(plan, model, optimizer, mean_square, batches(1)[0], timeout=20.0)
        mine = batches(MOST)[: len(run.run._engine.micro_batches)]
        for step in range(3):
            if step == 2:
                run.run.export()
            run.run.step(mine)
        run.run.close()
        found.append("" if verified.is_equal else str(verified))
    Transport().close()
    return found


@pytest.mark.parametrize("workers", [2, 3])
def test_corners_train_as_in_one_process_with_a_drain_in_the_middle(crew, workers):
    mine = [
        (name, options) for name, count, options in CORNERS if count == workers and is_trained(name, workers, options)
    ]
    plans = [planned(name, workers, options) for name, options in mine]
    answers = crew(workers).run(trained, plans)
    wrong = {str(Choice(*one)): said for one, said in zip(mine, answers[0], strict=True) if said}
    assert not wrong
