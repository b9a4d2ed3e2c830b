"""What does not fit a run whose schedule owns the loop is refused before anything is overwritten."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import armillary
import face

WIDTH = 4


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factors", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, values):
        return values * self.factors


def model_of(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Factors(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def optimizer_of(model, groups=2):
    """The parameters in so many groups."""
    parameters = list(model.parameters())
    return torch.optim.Adam([{"params": parameters[number::groups]} for number in range(groups)], lr=0.05)


def loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def batch_of(number):
    draw = torch.Generator().manual_seed(number)
    return torch.randn(3, WIDTH, generator=draw), torch.randn(3, 2, generator=draw)


def begun(made):
    model = model_of()
    return model, armillary.attach(made, model, optimizer_of(model), loss=loss, example=batch_of(0))


def trained(run, steps):
    for step in steps:
        run.step([batch_of(10 * step + number) for number in run._engine.micro_batches])


def refused(rank, world, made, path):
    """What load says, and whether the run goes on as one that loaded nothing."""
    exported = []
    said = ""
    for is_given in (True, False):
        _, run = begun(made)
        trained(run, range(2))
        if is_given:
            with pytest.raises(ValueError, match=f"load: rank 0: {re.escape(str(path))}: ") as error:
                run.load(path)
            said = str(error.value)
        trained(run, range(2, 4))
        exported.append(run.export())
        run.close()
    mine, others = exported
    return said, mine is None or all(torch.equal(mine["model"][key], value) for key, value in others["model"].items())


def stepped(model, optimizer):
    loss(model, batch_of(1)).backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def other_parameters():
    model = model_of(seed=7)
    return stepped(model, torch.optim.Adam([model[0].weight, model[0].bias]))


def other_groups():
    model = model_of(seed=7)
    return stepped(model, optimizer_of(model, groups=1))


def other_buffer():
    saved = model_of(seed=7).state_dict()
    return {**saved, "1.factors": torch.ones(WIDTH + 1)}


MISFITS = {
    other_parameters: "the saved optimizer has 2 parameters, this one 6",
    other_groups: "the saved optimizer's groups hold",
    other_buffer: "'1.factors' was saved with shape (5,), the model has (4,)",
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("schedule", ["pipeline", "accumulation(micro_batches=2)"])
def test_what_does_not_fit_leaves_weights_as_they_were_and_the_run_trains_on(crew, tmp_path, schedule, misfit):
    made = face.plan_for(model_of(), loss, [batch_of(0), batch_of(1)], 2, schedule=schedule)
    torch.save(misfit(), tmp_path / "other.pt")
    for said, is_as_before in crew(2).run(refused, made, tmp_path / "other.pt"):
        assert MISFITS[misfit] in said and is_as_before


def told_after(rank, world, made, folder):
    """Which steps are told of after a load, until the run is over; and their losses in a run that never did more."""
    found = []
    for further in (2, 0):
        _, run = begun(made)
        trained(run, range(2))
        path = run.save(folder)
        trained(run, range(2, 2 + further))
        run.load(path)
        numbers = run._engine.micro_batches
        told = [one for step in (7, 8) for one in run.step([batch_of(10 * step + number) for number in numbers])]
        found.append([(one.step, [float(loss) for loss in one.losses]) for one in [*told, *run.close()]])
    return found


@pytest.mark.parametrize("schedule", ["pipeline", "pipeline(slack=1)"])
def test_after_a_load_nobody_is_told_losses_of_the_training_that_was_left(crew, tmp_path, schedule):
    made = face.plan_for(model_of(), loss, [batch_of(0), batch_of(1)], 2, schedule=schedule)
    for after_more, after_none in crew(2).run(told_after, made, tmp_path):
        assert [step for step, _ in after_more] == [2, 3] and after_more == after_none
