"""What judges a cut model is the model as the user wrote it: faults planted in stages, in their loss and in a run."""

import dataclasses

import pytest
import torch
from torch import nn

import armillary
from armillary.session import verifiers
from armillary.stages import stages as cutting
from armillary.stages import tracer

WIDTH, STEPS = 4, 4


class Skip(nn.Module):
    """No chain: its first value is read by the last module too, and a tuple of one comes back."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.c = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, value):
        first = self.a(value)
        return (self.c(self.norm(first.tanh()) + first),)


class Loose(Skip):
    """Its parameters get no gradient but zeros."""

    def forward(self, value):
        return (super().forward(value)[0] * 0,)


def mean_square(model, batch):
    return model(batch)[0].square().mean()


def batches(count=8):
    return [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)) for number in range(count)]


def verified(kind, schedule, steps=STEPS, micro_batches=2):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = (
        armillary.Choice(schedule, {"micro_batches": micro_batches}) if schedule else armillary.Choice("simultaneous")
    )
    return armillary.verify(model, optimizer, batches(), mean_square, schedule=asked, exchanges=(), steps=steps)


# Faults of what cuts a model, each put in the place of `cut_traced`.


def loses_its_structure(cut):
    def faulty(model, given, points):
        *stages, last = cut(model, given, points)
        return [*stages, dataclasses.replace(last, module=nn.Sequential(last.module, First()), names=moved(last))]

    return faulty


class First(nn.Module):
    def forward(self, value):
        return value[0]


def moved(stage):
    return {f"0.{local}": name for local, name in stage.names.items()}


def forgets_the_skip(cut):
    """The last stage sees other numbers than the model has there."""

    def faulty(model, given, points):
        *stages, last = cut(model, given, points)
        return [*stages, dataclasses.replace(last, module=nn.Sequential(Shrunk(), last.module), names={
            f"1.{local}": name for local, name in last.names.items()
        })]  # fmt: skip

    return faulty


class Shrunk(nn.Module):
    def forward(self, value):
        return {name: one * (1 - 1e-6) for name, one in value.items()}


def stops_a_gradient(cut):
    """The output is right; nothing comes back to the first stage."""

    def faulty(model, given, points):
        *stages, last = cut(model, given, points)
        return [*stages, dataclasses.replace(last, module=nn.Sequential(Cut(), last.module), names={
            f"1.{local}": name for local, name in last.names.items()
        })]  # fmt: skip

    return faulty


class Cut(nn.Module):
    def forward(self, value):
        return {name: one.detach() for name, one in value.items()}


def counts_twice(cut):
    """Running statistics move twice a forward."""

    def faulty(model, given, points):
        stages = cut(model, given, points)
        first = stages[0]
        return [dataclasses.replace(first, module=nn.Sequential(Moving(model), first.module), names={
            f"1.{local}": name for local, name in first.names.items()
        }), *stages[1:]]  # fmt: skip

    return faulty


class Moving(nn.Module):
    def __init__(self, model):
        super().__init__()
        self._norm = [model.norm]

    def forward(self, value):
        with torch.no_grad():
            self._norm[0].running_mean += 1e-6
        return value


FAULTS = {
    loses_its_structure: "the stages return *, the model (*,)",
    forgets_the_skip: "output",
    stops_a_gradient: "gradient a.weight",
    counts_twice: "buffer norm.running_mean",
}


def with_fault(rank, world, fault, schedule):
    real = cutting.cut_traced
    cutting.cut_traced = fault(tracer.cut_traced)
    try:
        return verified(Skip, schedule)
    finally:
        cutting.cut_traced = real


@pytest.mark.parametrize("fault", FAULTS)
def test_stages_that_are_not_the_model_are_not_called_equal_whatever_the_schedule(crew, fault):
    for schedule in ("gpipe", "pipeline"):
        for found in crew(2).run(with_fault, fault, schedule):
            said = " ".join(str(found).split())
            assert not found.is_equal and "NOT equal" in said and "stages beside the whole model" in said
            assert FAULTS[fault] in said, said


def without_fault(rank, world, schedule):
    return verified(Skip, schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "pipeline"])
def test_the_stages_stand_in_a_row_of_their_own_beside_the_run(crew, schedule):
    for found in crew(2).run(without_fault, schedule):
        assert found.is_equal, str(found)
        rows = {one.plan for one in found.differences}
        assert len(rows) == 2 and "stages beside the whole model" in rows
        named = {one.parameter for one in found.differences}
        assert {"output", "loss", "gradient a.weight", "buffer norm.running_mean", "norm.running_mean"} <= named


def of_another_run(rank, world, schedule):
    """A run that is not what the plan says: its second stage reads half of what it is handed."""
    real = verifiers.attach

    def faulty(plan, model, *given, **asked):
        run = real(plan, model, *given, **asked)
        last = run._engine.parts.stages[-1].module
        last.register_forward_pre_hook(lambda module, value: ({n: one * 0.5 for n, one in value[0].items()},))
        return run

    verifiers.attach = faulty
    try:
        return verified(Skip, schedule)
    finally:
        verifiers.attach = real


@pytest.mark.parametrize("schedule", ["gpipe", "pipeline"])
def test_a_run_whose_stages_are_wrong_is_not_called_equal_by_stages_of_its_own(crew, schedule):
    found = crew(2).run(of_another_run, schedule)[0]
    wrong = {one.plan for one in found.differences if one.verdict == "differs"}
    assert not found.is_equal and "stages beside the whole model" not in wrong and len(wrong) == 1


def nothing(rank, world, kind, schedule, steps):
    return verified(kind, schedule, steps)


@pytest.mark.parametrize("schedule", ["", "gpipe"])
@pytest.mark.parametrize(("kind", "steps"), [(Loose, STEPS), (Skip, 0)])
def test_where_nothing_was_trained_nothing_is_judged_which_is_not_equal(crew, kind, steps, schedule):
    for found in crew(2).run(nothing, kind, schedule, steps):
        assert not found.is_equal and "nothing judged" in str(found), str(found)
