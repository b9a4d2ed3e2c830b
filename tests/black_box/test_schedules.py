"""With all the slack that it has, a schedule is a plain loop over gradients that are one step late, to the last bit."""

import pytest
import torch
from plain_loop import apart, differ, state_of, train
from small_models import OPTIMIZERS, chain, pair_batch, pair_loss
from torch import nn

import face

STEPS = 4
LATE = [  # text, processes, micro-batches of a step
    ("one_device(micro_batches=3, stages=4, slack=3)", 1, 3),
    ("pipeline(micro_batches=3, slack=3)", 2, 3),
    ("ring(stages=2, slack=2)", 2, 2),
    ("zero_ring(stages=4, slack=2)", 2, 2),
    ("shared_stages(slack=2)", 3, 2),
    ("delayed_all_reduce", 1, 1),
    ("delayed_all_reduce", 2, 2),
]


def falling(optimizer):
    """The rate is a tenth from the middle on."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [STEPS // 2], 0.1)


def late(optimizer, count, clip=lambda model: None):
    """What a loop that knows no schedule makes of gradients at the weights of the step before."""
    model = chain()
    made = OPTIMIZERS[optimizer](model.parameters())
    rate = falling(made)
    made.register_step_post_hook(lambda *_: rate.step())
    steps = [[pair_batch(step, number) for number in range(count)] for step in range(STEPS)]
    train(model, made, pair_loss, steps, is_late=True, clip=clip)
    return state_of(model)


def trained(rank, world, plan, count, optimizer):
    model = chain()
    made = OPTIMIZERS[optimizer](model.parameters())
    run = face.start(plan, model, made, pair_loss, pair_batch(0, 0))
    rate = falling(made)
    for step in range(STEPS):
        face.step(run, face.own(run, [pair_batch(step, number) for number in range(count)]))
        rate.step()
    got = face.weights(run)
    face.close(run)
    return got


def answers_of(crew, text, processes, count, optimizer):
    batches = [pair_batch(0, number) for number in range(processes)]
    plan = face.plan_for(chain(), pair_loss, batches, processes, schedule=text)
    return crew(processes).run(trained, plan, count, optimizer)


@pytest.mark.parametrize(("text", "processes", "count"), LATE)
def test_all_the_slack_there_is_means_gradients_one_step_late(crew, text, processes, count):
    want = late("momentum", count)
    assert [apart(got, want) for got in answers_of(crew, text, processes, count, "momentum")] == [{}] * processes


@pytest.mark.parametrize(("text", "processes", "count"), LATE[:5])
def test_clipping_by_the_global_norm_is_torchs_on_the_mean_gradient(crew, text, processes, count):
    norms = []

    def clip(model):
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))

    want = late("sgd", count, clip)
    assert min(norms) > 0.1
    for got in answers_of(crew, text[:-1] + ", clip_norm=0.1)", processes, count, "sgd"):
        assert differ(got, want) == {}
