"""A schedule trains by its published rule to the last bit: one process, plain loops over steps and micro-batches."""

import pytest
import torch
from plain_loop import apart, differ, same, state_of, train
from small_models import OPTIMIZERS, chain, pair_batch, pair_loss
from torch import nn
from torch.nn import functional

import face
from armillary.reference.versions import Reference
from armillary.schedules.cyclic import cyclic
from armillary.schedules.cyclic_pipeline import cyclic_pipeline

SEED, STEPS = 5, 4
RINGS = ("ring", "zero_ring")
# name -> (processes, stages, micro-batches of a step, options)
SHAPES = {
    "one_device": (1, 2, 2, "micro_batches=2, stages=2"),
    "pipeline": (2, 2, 2, ""),
    "ring": (2, 2, 2, "stages=2"),
    "zero_ring": (2, 2, 2, "stages=2"),
    "shared_stages": (3, 2, 2, ""),
}


def schedule(name, **options):
    """ "ring(stages=2, slack=1)"."""
    own = SHAPES[name][3] if name in SHAPES else ""
    said = [own, *(f"{key}={value!r}" for key, value in options.items())]
    inner = ", ".join(filter(None, said))
    return f"{name}({inner})" if inner else name


def plan_of(text, processes, dropout=0.3, dtype=torch.float64):
    batches = [pair_batch(0, number, dtype) for number in range(processes)]
    return face.plan_for(chain(dropout, dtype), pair_loss, batches, processes, schedule=text)


def steps_of(count, steps=STEPS, dtype=torch.float64):
    return [[pair_batch(step, number, dtype) for number in range(count)] for step in range(steps)]


def trained(rank, world, plan, count, optimizer="momentum", dropout=0.3, dtype=torch.float64, autocast=False):
    """(weights, losses) after training on all the micro-batches, the rate falling to a tenth half-way."""
    model = chain(dropout, dtype)
    made = OPTIMIZERS[optimizer](model.parameters())
    run = face.start(plan, model, made, pair_loss, pair_batch(0, 0, dtype), SEED)
    rate = torch.optim.lr_scheduler.MultiStepLR(made, [STEPS // 2], 0.1)
    for batches in steps_of(count, dtype=dtype):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            face.step(run, face.own(run, batches))
        rate.step()
    told = face.losses(run)
    got = face.weights(run)
    face.close(run)
    return got, told


def rule(name, slack):
    """The table of actions and of the staleness of weights, of 2 stages and 2 micro-batches."""
    stages, count = SHAPES[name][1:3]
    return cyclic_pipeline(stages, count, slack) if name == "pipeline" else cyclic(count, stages, slack)


def truth(name, slack, optimizer="momentum", dtype=torch.float64, autocast=False):
    """(weights, losses of the micro-batches by step) of plain loops."""
    model = chain(0.3, dtype)
    made = OPTIMIZERS[optimizer](model.parameters())
    parts = [nn.Sequential(*model[:2]), nn.Sequential(*model[2:])]
    reference = Reference(parts, made, rule(name, slack), functional.mse_loss, seed=SEED)
    rate = torch.optim.lr_scheduler.MultiStepLR(made, [STEPS // 2], 0.1)
    losses = []
    for batches in steps_of(2, dtype=dtype):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(tuple(map(float, reference.step(batches))))
        rate.step()
    return state_of(model), losses


@pytest.mark.parametrize("slack", [0, 1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_a_cyclic_schedule_is_the_rule_bit_for_bit_with_dropout_and_a_falling_rate(crew, name, slack):
    processes, _, count, _ = SHAPES[name]
    want, losses = truth(name, slack)
    answers = crew(processes).run(trained, plan_of(schedule(name, slack=slack), processes), count)
    assert [apart(got, want) for got, _ in answers] == [{}] * processes
    for rank, (_, told) in enumerate(answers):  # every rank knows the losses of its data; the last steps come later
        want_told = [(step[rank],) for step in losses] if name in RINGS else losses
        assert len(told) >= STEPS - 2 and told == want_told[: len(told)], (rank, told)


@pytest.mark.parametrize("name", SHAPES)
def test_in_float32_under_autocast_too_and_with_adam(crew, name):
    processes, _, count, _ = SHAPES[name]
    plan = plan_of(schedule(name), processes, dtype=torch.float32)
    want, _ = truth(name, 0, "adam", torch.float32, autocast=True)
    answers = crew(processes).run(trained, plan, count, "adam", 0.3, torch.float32, True)
    assert [apart(got, want) for got, _ in answers] == [{}] * processes


def test_another_slack_is_another_rule():
    """So the comparisons above can tell the rules apart."""
    for name in SHAPES:
        assert all(differ(truth(name, 0)[0], truth(name, slack)[0]) for slack in (1, 2)), name


@pytest.mark.parametrize(
    ("text", "processes", "workers"),
    [
        ("one_device(micro_batches=3, stages=4, slack=3)", 1, 3),
        ("pipeline(micro_batches=3, slack=3)", 2, 3),
        ("ring(stages=2, slack=2)", 2, 2),
        ("zero_ring(stages=4, slack=2)", 2, 2),
        ("shared_stages(slack=2)", 3, 2),
        ("delayed_all_reduce", 1, 1),
        ("delayed_all_reduce", 2, 2),
    ],
)
def test_all_the_slack_there_is_means_gradients_one_step_late(crew, text, processes, workers):
    """By a loop that knows no schedule: gradients at the weights of the step before."""
    model = chain()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, [STEPS // 2], 0.1)
    optimizer.register_step_post_hook(lambda *_: rate.step())
    train(model, optimizer, pair_loss, steps_of(workers), is_late=True)
    answers = crew(processes).run(trained, plan_of(text, processes, 0.0), workers, "momentum", 0.0)
    assert [apart(got, state_of(model)) for got, _ in answers] == [{}] * processes


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "processes"), [("gpipe", 2), ("one_f_one_b", 2), ("gpipe", 3), ("one_f_one_b", 3), ("accumulation", 1)]
)
def test_an_exact_schedule_is_one_process_that_takes_the_same_micro_batches_bit_for_bit(crew, name, processes, count):
    model = chain()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, [STEPS // 2], 0.1)
    optimizer.register_step_post_hook(lambda *_: rate.step())
    losses = train(model, optimizer, pair_loss, steps_of(count))
    plan = plan_of(f"{name}(micro_batches={count})", processes, 0.0)
    answers = crew(processes).run(trained, plan, count, "momentum", 0.0)
    assert [apart(got, state_of(model)) for got, _ in answers] == [{}] * processes
    assert all(told == [tuple(step) for step in losses] for _, told in answers)  # exact: each step is complete at once


def test_accumulation_on_two_workers_is_one_process_over_all_their_micro_batches(crew):
    model = chain()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, [STEPS // 2], 0.1)
    optimizer.register_step_post_hook(lambda *_: rate.step())
    train(model, optimizer, pair_loss, steps_of(6))
    for got, _ in crew(2).run(trained, plan_of("accumulation(micro_batches=3)", 2, 0.0), 6, "sgd", 0.0):
        assert differ(got, state_of(model)) == {}


@pytest.mark.parametrize("name", SHAPES)
def test_clipping_by_the_global_norm_is_torchs_on_the_mean_gradient(crew, name):
    """At the first steps' weights: with all the slack there is the loop of late gradients is the truth."""
    processes, _, count, _ = SHAPES[name]
    norms = []
    model = chain()
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    def clip(model):
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))

    rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, [STEPS // 2], 0.1)
    optimizer.register_step_post_hook(lambda *_: rate.step())
    train(model, optimizer, pair_loss, steps_of(count), is_late=True, clip=clip)
    assert min(norms) > 0.1
    plan = plan_of(schedule(name, slack=count, clip_norm=0.1), processes, 0.0)
    for got, _ in crew(processes).run(trained, plan, count, "sgd", 0.0):
        assert differ(got, state_of(model)) == {}


def looked_at(rank, world, plan, count):
    """Losses of an evaluation after every step, and the weights at the end."""
    model = chain(0.3)
    run = face.start(plan, model, OPTIMIZERS["momentum"](model.parameters()), pair_loss, pair_batch(0, 0), SEED)
    seen = []
    for batches in steps_of(count):
        face.step(run, face.own(run, batches))
        seen.append(face.evaluate(run, lambda model, batch: float(pair_loss(model, batch)), [pair_batch(9, 9)])[0])
    got = face.weights(run)
    face.close(run)
    return seen, got


@pytest.mark.parametrize("name", [*SHAPES, "delayed_all_reduce"])
def test_an_evaluation_between_steps_sees_the_same_on_every_rank_and_changes_nothing(crew, name):
    processes, _, count, _ = SHAPES.get(name, (2, 1, 2, ""))
    plan = plan_of(schedule(name), processes)
    answers = crew(processes).run(looked_at, plan, count)
    assert all(same(seen, answers[0][0]) for seen, _ in answers)
    model = chain(0.3)
    model.load_state_dict(answers[0][1])
    with torch.no_grad():
        assert answers[0][0][-1] == float(pair_loss(model.eval(), pair_batch(9, 9)))
    assert len(set(answers[0][0])) == STEPS


def test_evaluations_leave_the_weights_of_a_run_without_any(crew):
    for name in ("pipeline", "ring"):
        plan = plan_of(schedule(name), 2)
        (_, looked), (plain, _) = crew(2).run(looked_at, plan, 2)[0], crew(2).run(undisturbed, plan, 2)[0]
        assert apart(looked, plain) == {}, name


def undisturbed(rank, world, plan, count):
    model = chain(0.3)
    run = face.start(plan, model, OPTIMIZERS["momentum"](model.parameters()), pair_loss, pair_batch(0, 0), SEED)
    for batches in steps_of(count):
        face.step(run, face.own(run, batches))
    got = face.weights(run)
    face.close(run)
    return got, None
