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
from armillary.reference.whole_model import CutModel
from armillary.schedules import SCHEDULES, options_of, read
from armillary.schedules.method import OWNED_LOOP
from armillary.session.truth import ScheduleTruth
from armillary.transport.transport import Transport

UNEQUAL = ([[1, 1], [2, 2]], [[2, 2], [1, 1]], [[1, 2], [1, 7]], [[3, 1], [1, 1], [1, 5]])
STEPS, MIDST = 4, 2


def corners(name):
    """(workers, options); what a schedule refuses is none of its corners."""
    knows = SCHEDULES[name].options.knows
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
    if SCHEDULES[name].replicates_table:  # nothing goes from rank to rank but gradients
        return options in ({"stages": 1}, {"costs": UNEQUAL[0], "slack": 0})
    shape, slack = options.get("costs", options.get("stages")), options.get("slack", 0)
    ends = slack in (0, workers) or (name == "zero_ring" and shape == UNEQUAL[0])
    return ends and shape in ((1, UNEQUAL[0]) if workers < 3 else (1, 2, UNEQUAL[2]))


LISTED = [name for name, method in SCHEDULES.all().items() if method.step_mode == OWNED_LOOP]
CORNERS = [(name, *corner) for name in LISTED for corner in corners(name)]


def test_the_corners_are_there():
    for name in ("ring", "zero_ring"):
        mine = [(workers, options) for found, workers, options in CORNERS if found == name]
        assert (2, {"costs": UNEQUAL[0], "slack": 1}) in mine and (3, {"costs": UNEQUAL[2], "slack": 3}) in mine
        assert (3, {"stages": 1, "slack": 0}) in mine and (3, {"stages": 2, "slack": 0}) in mine
    assert {name for name, _, _ in CORNERS} == {*LISTED}


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


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def mean_square(model, batch):
    return model(batch).square().mean()


def batch_of(step, micro_batch):
    draw = torch.Generator().manual_seed(100 * step + micro_batch)
    return torch.randn(3, 6, generator=draw, dtype=torch.float64)


def planned(name, workers, options):
    examples = [batch_of(0, number) for number in range(workers)]
    return face.plan_for(layers(), mean_square, examples, workers, schedule=str(Choice(name, options)))


def in_one_process(plan):
    """Weights of the loop over the plan's stages: in the midst of training, where it drains, and at its end."""
    model, options = layers(), options_of(plan)
    begins = [int(stage.begins.partition(".")[0] or 0) for stage in plan.stages] if options.method.is_cut else [0]
    stages = [model[first:end] for first, end in pairwise([*begins, len(model)])]
    cut = CutModel(stages, lambda output, batch: output.square().mean(), lambda batch: batch)
    truth, seen = ScheduleTruth(plan, model, sgd(model), cut, seed=0), []
    for step in range(STEPS):
        if step == MIDST:
            seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
            truth.drain()
        truth.step([batch_of(step, m) for m in range(options.total(plan.workers))])
    return seen[0], dict(model.named_parameters())


def trained(rank, world, plans):
    """By plan the same, of a run."""
    found = []
    for plan in plans:
        model = layers()
        run = face.start(plan, model, sgd(model), mean_square, batch_of(0, 0), timeout=20.0).run
        for step in range(STEPS):
            if step == MIDST:
                exported = run.export()
                run._engine.drain()
            run.step([batch_of(step, m) for m in options_of(plan).handed_in(rank, world)])
        run.close()
        found.append((exported and exported["model"], dict(model.state_dict())))
    Transport().close()
    return found


def apart(got, want):
    return [name for name in want if not torch.allclose(got[name], want[name], rtol=1e-12, atol=1e-12)]


@pytest.mark.parametrize("workers", [2, 3])
def test_corners_train_as_in_one_process_with_a_drain_in_the_middle(crew, workers):
    mine = [
        (name, options) for name, count, options in CORNERS if count == workers and is_trained(name, workers, options)
    ]
    plans = [planned(name, workers, options) for name, options in mine]
    everyones, wrong = crew(workers).run(trained, plans), {}
    for place, (plan, one) in enumerate(zip(plans, mine, strict=True)):
        midst, end = in_one_process(plan)
        (exported, _), *_ = answers = [found[place] for found in everyones]
        found = [("exported", apart(exported, midst)), *((rank, apart(w, end)) for rank, (_, w) in enumerate(answers))]
        wrong |= {f"{Choice(*one)}: {who}": names for who, names in found if names}
    assert not wrong
