"""Exact schedules that own the loop: taken by price only where that was tried and the caller steps by run.step."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import armillary
from armillary.planning.pricing import Case
from armillary.planning.quicker_ways import OTHER, stepping
from armillary.planning.request import PlanRequest
from armillary.plans import Link, Topology
from armillary.session.plan_job import JobRequest, ModelToPlan, plan_job

GIB = 1 << 30
SLOW = Link(1e-4, 1e6)  # the weights take a second, activations a hundredth


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def made():
    torch.manual_seed(0)
    parts = [module for _ in range(4) for module in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(256, 4))


def batches():
    return [(torch.randn(8, 256), torch.randint(4, (8,))) for _ in range(2)]


@pytest.fixture(scope="module")
def profile():
    return armillary.profile(made(), batches(), loss, workers=2)


def topology(memory: int = GIB) -> Topology:
    return Topology(2, 1, SLOW, SLOW, memory)


def test_a_loop_of_the_users_own_keeps_its_plan_and_reads_what_a_pipeline_would_bring(profile):
    plan = armillary.plan(profile, topology())
    assert plan.schedule.name == "simultaneous"
    (way,) = stepping(plan, Case(profile, topology()), None)
    assert "run.step(micro_batches)" in way.ask and "equal to one process with the same micro-batches" in way.ask
    assert way.gain > 1 and any(note.startswith(OTHER) for note in plan.notes)


def test_steps_taken_by_run_get_the_exact_schedule_that_takes_least(profile):
    plan = armillary.plan(profile, topology(), steps_by_run=True)
    assert plan.schedule.name in ("gpipe", "one_f_one_b") and not plan.departures and plan.mesh.sizes == {"stage": 2}


def test_what_was_not_tried_or_failed_is_noted_with_the_reason_and_not_taken(profile):
    for splits, said in (("untried", "nobody tried"), ("1 keeps statistics of its batches", "keeps statistics")):
        plan = armillary.plan(replace(profile, splits=splits), topology(), steps_by_run=True)
        assert plan.schedule.name == "simultaneous"
        (way,) = stepping(plan, Case(replace(profile, splits=splits), topology()), None)
        assert said in way.ask and "not by price" in way.ask


def test_micro_batches_that_the_user_cuts_need_no_trial(profile):
    plan = armillary.plan(replace(profile, splits="untried"), topology(), steps_by_run=True, micro_batches=4)
    assert plan.schedule.name in ("gpipe", "one_f_one_b") and plan.schedule.options["micro_batches"] == 4


def test_where_compute_is_all_a_pipeline_with_its_bubble_is_not_taken(profile):
    fast = Link(1e-7, 1e12)
    stages = [replace(stage, forward_seconds=1.0, backward_seconds=2.0) for stage in profile.stages]
    plan = armillary.plan(
        replace(profile, stages=tuple(stages)), Topology(2, 1, fast, fast, GIB), steps_by_run=True, micro_batches=2
    )
    assert plan.schedule.name == "simultaneous" and not any("run.step" in note for note in plan.notes)


def test_what_the_user_demands_of_parameters_keeps_the_loop_his_own(profile):
    plan = armillary.plan(profile, topology(), steps_by_run=True, constraints={"0.weight": "replicated"})
    assert plan.schedule.name == "simultaneous"


def test_where_no_plan_of_the_users_loop_fits_a_pipeline_is_taken_or_named(profile):
    weights = sum(fact.bytes for fact in profile.parameters)
    small = topology(int(2.5 * weights))  # Adam's state alone takes twice the weights
    with pytest.raises(ValueError, match=r"stage a worker, by schedule (gpipe|one_f_one_b).*as in one process"):
        armillary.plan(profile, small)
    plan = armillary.plan(profile, small, steps_by_run=True)
    assert plan.schedule.name in ("gpipe", "one_f_one_b")
    assert plan.forecast.memory_bytes + plan.forecast.peak_bytes <= small.memory_bytes


def a_gradient_hook(model, optimizer):
    model[2].weight.register_hook(lambda gradient: gradient)


def a_step_hook(model, optimizer):
    optimizer.register_step_post_hook(lambda *_: None)


class Counted(torch.optim.SGD):
    """Keeps a number in its group."""

    def step(self, closure=None):
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        return super().step(closure)


def a_counter(model, optimizer):
    optimizer.__class__ = Counted


HABITS = {
    a_gradient_hook: "2.weight has a gradient hook",
    a_step_hook: "SGD has a step hook",
    a_counter: "Counted changes its options count when",
}


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_that_attach_would_refuse_keeps_such_a_schedule_from_being_taken_by_price(profile, habit):
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subject = ModelToPlan(model, optimizer, loss, lambda workers: batches())
    request = JobRequest(PlanRequest(steps_by_run=True), topology=topology(), profile=profile)
    assert plan_job(subject, request).plan.schedule.name in ("gpipe", "one_f_one_b")
    habit(model, optimizer)
    plan = plan_job(subject, request).plan
    assert plan.schedule.name == "simultaneous"
    said = f"no schedule that owns the loop is taken by price, as {HABITS[habit]}"
    assert any(note.startswith(said) for note in plan.notes), plan.notes
