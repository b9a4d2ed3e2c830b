"""In debug mode every message between stages and workers is compared by its receiver, under every schedule."""

from contextlib import contextmanager

import pytest
import torch
from plain_loop import apart, state_of, train
from small_models import OPTIMIZERS, chain, pair_batch, pair_loss

import face
from armillary.plans import summed
from armillary.schedules.lowering import Lowering

SEED = 5
SCHEDULES = [  # text, processes, micro-batches of a step
    ("pipeline(slack=1)", 2, 2),
    ("ring(stages=2, slack=1)", 2, 2),
    ("zero_ring(stages=2, slack=1)", 2, 2),
    ("shared_stages(slack=1)", 3, 2),
]


def plan_of(text, processes):
    batches = [pair_batch(0, number, torch.float64) for number in range(processes)]
    return face.plan_for(chain(0.3, torch.float64), pair_loss, batches, processes, schedule=text)


def steps_of(count, steps=4):
    return [[pair_batch(step, number, torch.float64) for number in range(count)] for step in range(steps)]


@contextmanager
def leaving(run):
    """Who leaves by an exception lets go of its run, so that nobody waits for it."""
    try:
        yield
    except BaseException as error:
        run.run.__exit__(type(error), error, error.__traceback__)
        raise


def trained(rank, world, plan, count, steps=4, check_order=True):
    model = chain(0.3, torch.float64)
    made = OPTIMIZERS["momentum"](model.parameters())
    run = face.start(
        plan, model, made, pair_loss, pair_batch(0, 0, torch.float64), SEED, timeout=60.0, check_order=check_order
    )
    rate = torch.optim.lr_scheduler.MultiStepLR(made, [steps // 2], 0.1)
    with leaving(run):
        for batches in steps_of(count, steps):
            face.step(run, face.own(run, batches))
            rate.step()
    got = face.weights(run)
    face.close(run)
    return got


@pytest.mark.parametrize(("text", "processes", "count"), SCHEDULES)
def test_nothing_is_changed_and_nobody_hangs(crew, text, processes, count):
    plan = plan_of(text, processes)
    want = crew(processes).run(trained, plan, count, 4, False)
    answers = crew(processes).run(trained, plan, count)
    assert [apart(got, plain) for got, plain in zip(answers, want, strict=True)] == [{}] * processes


def mixed_up(rank, world, plan):
    """Rank 1 makes room for two micro-batches in the wrong order: both fit, so without a check nobody would know."""
    if rank == 1:
        next_step = Lowering.next_step

        def swapped(lowering):
            made = next_step(lowering)
            first, second = [place for place, one in enumerate(made) if one.op == "RECV"][:2]
            made[first], made[second] = made[second], made[first]
            return made

        Lowering.next_step = swapped
    try:
        trained(rank, world, plan, 3, steps=1)
    except RuntimeError as error:
        return str(error)
    finally:
        if rank == 1:
            Lowering.next_step = next_step
    return ""


def test_a_receiver_that_takes_micro_batches_in_another_order_is_told_who_sent_what(crew):
    error = crew(2).run(mixed_up, plan_of("gpipe(micro_batches=3)", 2))[1]
    assert (
        "messages out of order: rank 0 sends #1 length of the form of activation of stage 0 (step 0, micro-batch 0)"
        in error
    )
    assert "rank 1 wants #1 length of the form of activation of stage 0 (step 0, micro-batch 1)" in error


class Narrow(torch.nn.Module):
    """In another dtype than what is around it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, value):
        return self.inner(value.float()).to(value)


def of_two_dtypes():
    return torch.nn.Sequential(*chain()[:2], Narrow(), *chain()[2:])


def trained_of_two_dtypes(rank, world, plans):
    """Of every plan, the weights; between the steps all ranks ask for something together."""
    found = []
    for plan in plans:
        model = of_two_dtypes()
        run = face.start(
            plan, model, OPTIMIZERS["momentum"](model.parameters()), pair_loss, pair_batch(0, 0), check_order=True
        )
        with leaving(run):
            for batches in steps_of(world // 2, 2):
                face.step(run, face.own(run, batches))
                run.run._transport.complete(summed(torch.ones(1)), "of all")
        found.append(face.weights(run))
        face.close(run)
    return found


def test_a_stage_of_two_dtypes_on_several_replicas_is_no_false_alarm(crew):
    """Its ranks make more requests than those of the other stage."""
    for processes, limit in ((4, 0.0), (6, 1e-6)):
        batches = [pair_batch(0, number) for number in range(processes)]
        plan = face.plan_for(
            of_two_dtypes(), pair_loss, batches, processes, schedule="gpipe(stages=2, micro_batches=1)"
        )
        assert len(plan.groups) == 3 and {len(group.parameters) for group in plan.groups} == {2, 4}
        model = of_two_dtypes()
        train(model, OPTIMIZERS["momentum"](model.parameters()), pair_loss, steps_of(processes // 2, 2))
        for (got,) in crew(processes).run(trained_of_two_dtypes, [plan]):
            assert max(apart(got, state_of(model)).values(), default=0.0) <= limit
