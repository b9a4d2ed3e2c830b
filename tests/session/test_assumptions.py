"""What planning assumes of an optimizer is found by trying it, whatever its groups, and leaves it alone."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from armillary import Choice, Plan, assumptions_of, plan, profile
from armillary.cli.resolve import assumed
from armillary.planning.memory import NothingFits
from armillary.planning.pricing import Case, assumptions_behind
from planning_cases import machines

MOMENTUM, DECAY = {"momentum": 0.9}, {"weight_decay": 1e-5}


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(("options", "slots"), [(MOMENTUM, 1), (DECAY, 0)])
def test_of_groups_with_other_options_the_most_is_assumed(options, slots, is_first):
    plain, other = {"params": [nn.Parameter(torch.ones(2, 3))]}, {"params": [nn.Parameter(torch.ones(3, 2))], **options}
    optimizer = torch.optim.SGD([other, plain] if is_first else [plain, other], lr=0.1)
    for steps in range(2):
        found = assumptions_of(optimizer)
        assert (found.optimizer_slots, found.moves_quiet_rows) == (slots, True), steps
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()


class Scaled(torch.optim.Optimizer):
    """Its step reads an attribute of its own."""

    def __init__(self, parameters):
        self.scale = 0.5
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"] * self.scale)


def test_an_optimizer_is_tried_with_the_attributes_that_its_step_reads():
    parameter = nn.Parameter(torch.ones(3, 2))
    found = assumptions_of(Scaled([parameter]))
    assert (found.optimizer_slots, found.moves_quiet_rows) == (0, False)
    assert torch.equal(parameter, torch.ones(3, 2))


def test_an_optimizer_that_steps_by_a_closure_alone_counts_as_adam_and_is_left_alone():
    parameter = nn.Parameter(torch.ones(3, 2))
    found = assumptions_of(torch.optim.LBFGS([parameter]))
    assert (found.optimizer_slots, found.moves_quiet_rows, found.step_slots) == (2, True, 0)
    assert torch.equal(parameter, torch.ones(3, 2))


def test_a_count_of_steps_is_no_tensor_of_state_though_a_single_number_is_trained_first():
    parameters = [nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(3, 2))]
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert assumptions_of(optimizer).optimizer_slots == 2


class Rater(nn.Module):
    """A table of 800 kB, of which little is read, under a layer."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10_000, 20), nn.Linear(20, 1)

    def forward(self, ids):
        return self.head(self.table(ids))


TABLE_BYTES = 4 * 10_000 * 20


def rated(table, **asked):
    """A plan for a table that is trained by SGD with these options, beside Adam; with what it was made from."""
    model = Rater()
    both = [torch.optim.SGD(model.table.parameters(), lr=0.1, **table), torch.optim.Adam(model.head.parameters())]
    seen = profile(
        model, [torch.arange(8) + 50 * worker for worker in range(4)], lambda m, ids: m(ids).sum(), workers=2
    )
    asked = {"topology": machines(2), "assumptions": assumptions_of(both, model), **asked}
    return plan(seen, **asked), Case(seen, asked["topology"], asked["assumptions"])


@pytest.mark.parametrize(("way", "least"), [("all_reduce", 2), ("gather_rows", 1), ("owned_rows", 0.5)])
def test_of_several_optimizers_each_parameter_has_its_own_state_in_the_plan(way, least):
    made, _ = rated({}, constraints={"table.weight": Choice(way)})
    held = sum(group.forecast.memory_bytes for group in made.groups)
    assert held == pytest.approx(least * TABLE_BYTES, rel=0.01)


def test_a_plan_is_not_refused_for_state_that_no_optimizer_keeps():
    room = machines(2, memory=TABLE_BYTES)
    made, case = rated({}, topology=room)
    assert made.forecast.memory_bytes <= TABLE_BYTES
    with pytest.raises(NothingFits):
        plan(case.profile, room, assumptions=replace(case.assumptions, own={}))


@pytest.mark.parametrize(("table", "kinds"), [({}, {"rows", "gradients"}), ({"weight_decay": 1e-5}, {"ids"})])
def test_rows_go_early_where_the_tables_own_optimizer_leaves_quiet_rows(table, kinds):
    slow = machines(2, megabits=1.0)
    made, _ = rated(table, topology=slow, constraints={"table.weight": "owned_rows"}, prefetch=True)
    assert made.group_of("table.weight").prefetch in kinds


def test_what_each_optimizer_keeps_is_in_the_plans_file_where_they_differ():
    made, case = rated({})
    assert list(case.assumptions.own) == ["table.weight"]
    assert assumptions_behind(Plan.from_json(made.to_json())) == case.assumptions
    assert "optimizer with 0 or 2 tensors of state" in assumed(case)[0]


def test_groups_that_are_kept_alike_leave_the_plan_as_of_one_optimizer():
    model = Rater()
    groups = [{"params": model.table.parameters(), "weight_decay": 0.0}, {"params": model.head.parameters()}]
    alike = assumptions_of(torch.optim.AdamW(groups), model)
    assert alike == assumptions_of(torch.optim.AdamW(model.parameters()))
    assert "own" not in alike.as_fields()


def test_a_model_that_the_optimizer_does_not_train_is_refused():
    with pytest.raises(ValueError, match="no tensor of the optimizer is a parameter of this model"):
        assumptions_of(torch.optim.Adam(Rater().parameters()), Rater())
