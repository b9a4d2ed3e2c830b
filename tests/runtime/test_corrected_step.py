"""Corrections at work: the reference by hand, one device and pipeline bit for bit the reference, drains included."""

import pytest
import torch
from torch.func import functional_call

from armillary.reference.versions import Reference
from armillary.schedules import build_correction
from armillary.schedules.corrections.stable_rate import rate_scale
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.simultaneous import simultaneous
from armillary.stages.interpreter import Interpreter
from armillary.stages.optimizer_step import CorrectedStep
from armillary.stages.train_spec import TrainSpec, in_a_row
from channels import in_threads
from staged_models import OPTIMIZERS, as_stages, data, drop, rings, same, squared_error, stages_of, weights

STEPS, DROP = 6, 3
ALL = ("nesterov", "weight_prediction", "stable_rate", "error_feedback")


def corrected(names):
    return tuple(map(build_correction, names))


def by_reference(schedule, names, optimizer="momentum", drains=(), dtype=torch.float64, **options):
    stages = stages_of(schedule.stages, dtype, **options)
    made = OPTIMIZERS[optimizer](stages.parameters())
    reference, scheduler = Reference(stages, made, schedule, squared_error), drop(made, DROP)
    reference.corrections = corrected(names)
    for step, batches in enumerate(data(STEPS, schedule.micro_batches, dtype)):
        if step in drains:
            reference.drain()
        reference.step(batches)
        scheduler.step()
    return weights(stages)


def by_one_device(schedule, names, optimizer="momentum", drains=(), dtype=torch.float64, settles=(), **options):
    stages = stages_of(schedule.stages, dtype, **options)
    made = OPTIMIZERS[optimizer](stages.parameters())
    run = Interpreter(as_stages(stages), made, TrainSpec(schedule, squared_error, corrections=corrected(names)))
    scheduler = drop(made, DROP)
    for step, batches in enumerate(data(STEPS, schedule.micro_batches, dtype)):
        if step in drains:
            run.drain()
        if step in settles:
            run.settle()
        run.step(batches)
        scheduler.step()
    run.settle()
    return weights(stages)


def by_hand(name, momentum=0.9, decay=0.01):
    """One worker, one stage, all one step late, SGD with momentum; nothing shared but the model."""
    model = stages_of(1, dropout=0.0)[0]
    now, before, velocity, seen_before = weights(model), weights(model), None, None
    names, made = list(dict(model.named_parameters())), []  # [step]: its rate, and the velocity it left
    for step, ((inputs, target),) in enumerate(data(STEPS, 1)):
        rate = 0.1 * (0.1 if step >= DROP else 1.0)
        read = before
        if name == "weight_prediction" and step > 1:  # the step before the last made what is read
            then, left = made[step - 2]
            read = [w - then * v for w, v in zip(before, left)]
        leaves = [w.clone().requires_grad_() for w in read]
        output = functional_call(model, dict(zip(names, leaves)), inputs)
        gradients = torch.autograd.grad(squared_error(output, target), leaves)
        seen = gradients
        if name == "error_feedback" and seen_before is not None:
            gradients = [2 * g - b for g, b in zip(seen, seen_before)]
        if name == "stable_rate":
            rate = rate * rate_scale(1.0, momentum)
        pull = [g.add(w, alpha=decay) for g, w in zip(gradients, now)]
        velocity = pull if velocity is None else [v.mul(momentum).add(p) for v, p in zip(velocity, pull)]
        moves = [p.add(v, alpha=momentum) for p, v in zip(pull, velocity)] if name == "nesterov" else velocity
        before, now = now, [w.add(m, alpha=-rate) for w, m in zip(now, moves)]
        seen_before = seen
        made.append((rate, velocity))
    return now


@pytest.mark.parametrize("name", ALL)
def test_the_reference_does_what_each_remedy_says_by_hand(name):
    got, want = by_reference(cyclic(1, slack=1), (name,), dropout=0.0), by_hand(name)
    plain = by_reference(cyclic(1, slack=1), (), dropout=0.0)
    assert all(torch.allclose(mine, true, rtol=1e-12, atol=1e-14) for mine, true in zip(got, want, strict=True))
    assert not any(torch.allclose(true, other, rtol=1e-6) for true, other in zip(want, plain))


@pytest.mark.parametrize("names", [*((name,) for name in ALL), ALL, ALL[::-1]], ids="-".join)
def test_one_device_is_the_reference_bit_for_bit(names):
    for schedule in (*rings(2), *rings(3)):
        assert same(by_one_device(schedule, names), by_reference(schedule, names)), schedule
    late = cyclic(3, slack=3)
    wishes = {"drains": (2, 5), "dtype": torch.float32}
    assert same(by_one_device(late, names, settles=(1, 4), **wishes), by_reference(late, names, **wishes))


def test_a_dropped_residual_is_seen(monkeypatch):
    """Planted fault: what error feedback keeps for the next step is lost."""
    schedule = cyclic(3, slack=1)
    truth, step = by_reference(schedule, ("error_feedback",)), CorrectedStep.step

    def forgetful(self, means, options):
        step(self, means, options)
        self._before = {}

    monkeypatch.setattr(CorrectedStep, "step", forgetful)
    assert not same(by_one_device(schedule, ("error_feedback",)), truth)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "nadam", "nesterov"])
def test_every_optimizer_with_momentum_is_predicted_alike(optimizer):
    names = ("weight_prediction", "stable_rate", "error_feedback")
    got = by_one_device(cyclic(3, slack=1), names, optimizer)
    assert same(got, by_reference(cyclic(3, slack=1), names, optimizer))


def test_stages_and_schedules_that_read_nothing_old_are_left_alone():
    for schedule in (simultaneous(3, 2), cyclic(1, 2)):
        assert same(by_one_device(schedule, ALL), by_one_device(schedule, ()))
    every = range(STEPS)  # drained before every step, nothing is old: only the step's options may differ
    names = ("weight_prediction", "error_feedback")
    assert same(by_one_device(cyclic(3), names, drains=every), by_one_device(cyclic(3), (), drains=every))


def by_pipeline(rank, channel, schedule, names, drains):
    stages = stages_of(schedule.stages, dropout=0.0)  # threads share one random number generator
    made = OPTIMIZERS["momentum"](stages[rank].parameters())
    spec = TrainSpec(schedule, squared_error, corrections=corrected(names))
    run = Interpreter(as_stages(stages), made, spec, in_a_row(schedule, rank, channel))
    scheduler = drop(made, DROP)
    for step, batches in enumerate(data(STEPS, schedule.micro_batches)):
        if step in drains:
            run.drain()
        run.step(batches)
        scheduler.step()
    run.settle()
    return weights(stages[rank])


@pytest.mark.parametrize("schedule", [cyclic_pipeline(2, 2), cyclic_pipeline(3, 2), cyclic_pipeline(3, 4, 4)])
def test_the_pipeline_is_the_reference_bit_for_bit(schedule):
    for names, drains in ((ALL, (3,)), (("weight_prediction",), ())):
        job = lambda rank, channel: by_pipeline(rank, channel, schedule, names, drains)  # noqa: B023, E731
        got = [weight for stage in in_threads(schedule.stages, job) for weight in stage]
        assert same(got, by_reference(schedule, names, drains=drains, dropout=0.0))
