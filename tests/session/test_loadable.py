"""What is saved can be loaded: names with "/" and numbers of numpy; what no checkpoint can hold is refused."""

import fractions
import json

import numpy as np
import pytest
import torch
from torch import nn

import armillary
import face
from armillary import Choice
from small_words import ROWS, WIDTH, batch_of, loss, model_of, optimizer_of

SCHEDULES = ["simultaneous", "accumulation(micro_batches=2)"]


def plan_of(schedule):
    spread = {"0.weight": "row_sharded"} if schedule == "simultaneous" else {}
    return face.plan_for(model_of(), loss, [batch_of(0, 0), batch_of(0, 1)], 2, schedule=schedule, exchange=spread)


def begun(made, model):
    optimizer = optimizer_of(model)
    return optimizer, armillary.attach(made, model, optimizer, loss=loss, example=batch_of(0, 0))


def trained(run, steps):
    count = run.plan.schedule.options.get("micro_batches", 1)
    for step in steps:
        run.step([batch_of(step, run.rank + 2 * number) for number in range(count)])


def with_numbers_of_numpy(rank, world, made, folder):
    optimizer, run = begun(made, model_of())
    trained(run, range(2))
    optimizer.param_groups[0].update(lr=np.float64(0.025), betas=(np.float32(0.5), 0.75))
    path = run.save(folder)
    optimizer.param_groups[0]["lr"] = 1.0
    run.load(path)
    trained(run, range(2, 3))
    options = optimizer.param_groups[0]
    run.close()
    return options["lr"], options["betas"], [type(one) for one in (options["lr"], *options["betas"])]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_of_numpy_in_an_optimizers_options_come_back_as_pythons(crew, tmp_path, schedule):
    for lr, betas, types in crew(2).run(with_numbers_of_numpy, plan_of(schedule), tmp_path):
        assert lr == 0.025 and betas == (0.5, 0.75) and types == [float] * 3


class Telling(nn.Linear):
    """Its extra state is a tensor with what `kept` is."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.kept = "nothing"

    def get_extra_state(self):
        return {"seen": torch.ones(3), "kept": [self.kept]}

    def set_extra_state(self, state):
        [self.kept] = state["kept"]


def with_what_cannot_be_loaded(rank, world, made, folder):
    """What each save says; a loop goes on after it."""
    model = model_of()
    model[1] = Telling()
    optimizer, run = begun(made, model)
    trained(run, range(1))
    run.save(folder, keep=1)
    said = []
    for name in ("extra state", "option", "state"):
        model[1].kept = fractions.Fraction(1, 3) if name == "extra state" else "nothing"
        optimizer.param_groups[0]["label"] = fractions.Fraction(1, 3) if name == "option" else "nothing"
        if name == "state":
            optimizer.state[model[3].bias]["why"] = fractions.Fraction(1, 3)
        with pytest.raises(ValueError, match="save: rank 0") as error:
            run.save(folder, keep=1)
        said.append(str(error.value))
    del optimizer.state[model[3].bias]["why"]
    trained(run, range(1, 2))
    there = sorted(path.name for path in folder.iterdir())
    run.load(run.save(folder, keep=1))
    run.close()
    return said, there


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_could_not_be_loaded_is_refused_by_its_path_and_older_checkpoints_stay(crew, tmp_path, schedule):
    for (extra, option, state), there in crew(2).run(with_what_cannot_be_loaded, plan_of(schedule), tmp_path):
        assert "model['1._extra_state']['kept'][0] is a fractions.Fraction" in extra
        assert "optimizer['param_groups'][0]['label'] is a fractions.Fraction" in option
        assert "optimizer['state']['3.bias']['why'] is a fractions.Fraction" in state
        assert there == ["step-00000001"]


class Slashed(nn.Module):
    """Parameters named as features are, after where they come from."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.tables = nn.ModuleDict({"user/country": nn.Embedding(ROWS, WIDTH)})
        self.layers = nn.ModuleDict({"user/head": nn.Linear(WIDTH, 2)})

    def forward(self, ids):
        return self.layers["user/head"](self.tables["user/country"](ids))


def saved_and_resumed(rank, world, made, folder):
    """What differs from a run that never stopped."""
    found = []
    for path in (None, folder / "step-00000002"):
        model = Slashed()
        _, run = begun(made, model)
        average = run.ema(0.9)
        if path is None:
            trained(run, range(2))
            average.update()
            run.save(folder)
        run.load(path)
        trained(run, range(2, 4))
        average.update()
        averages = average.export() or {}
        run.close()
        found.append({f"average {name}": value for name, value in averages.items()} | dict(model.named_parameters()))
    return [name for name, value in found[0].items() if not torch.equal(value, found[1][name])]


def test_names_with_slashes_are_saved_and_loaded_with_all_that_is_kept_for_them(crew, tmp_path):
    asked = {"tables.user/country.weight": "owned_rows", "layers.*": Choice.parse("top_k(keep=0.2)")}
    made = face.plan_for(Slashed(), loss, [batch_of(0, 0), batch_of(0, 1)], 2, exchange=asked)
    assert crew(2).run(saved_and_resumed, made, tmp_path) == [[]] * 2
    keys = json.loads((tmp_path / "step-00000002" / "complete.json").read_text())["rows"]
    assert {key.split("/")[0] for key in keys} == {"model", "optimizer", "average", "exchange"}
