"""The truth of schedules with versions, held against formulas and loops that share nothing with it."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from armillary.reference.versions import Reference
from armillary.schedules import NORMS, Clip
from armillary.schedules.accumulation import accumulation
from armillary.schedules.cyclic import cyclic
from armillary.schedules.simultaneous import simultaneous
from staged_models import OPTIMIZERS, WIDTH, Careful, Twice, data, drop, same, squared_error, stages_of, weights

STEPS = 6
MAX_NORM = 0.9  # that most gradients exceed, but not all


def train(schedule, stages, optimizer, drains=(), at=3, **options):
    reference = Reference(stages, optimizer, schedule, squared_error, **options)
    scheduler = drop(optimizer, at)
    for step, batches in enumerate(data(STEPS, schedule.micro_batches)):
        if step in drains:
            reference.drain()
        reference.step(batches)
        scheduler.step()
    return reference


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_staleness_it_is_the_plain_loop_with_accumulated_gradients(name):
    stages = stages_of(2, dropout=0)
    train(simultaneous(3, 2), stages, OPTIMIZERS[name](stages.parameters()))

    plain = stages_of(2, dropout=0)
    optimizer = OPTIMIZERS[name](plain.parameters())
    scheduler = drop(optimizer, 3)
    for batches in data(STEPS, 3):
        for inputs, target in batches:
            squared_error(plain[1](plain[0](inputs)), target).backward()
        for parameter in plain.parameters():
            parameter.grad /= 3
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert same(weights(stages), weights(plain))


@pytest.mark.parametrize("by", NORMS)
def test_without_staleness_clipping_is_torchs(by):
    """Of the whole gradient, stage by stage, or by a norm that was noted a step before."""
    stages = stages_of(2, dropout=0)
    optimizer = OPTIMIZERS["momentum"](stages.parameters())
    reference = train(simultaneous(3, 2), stages, optimizer, drains=(2,), clip=Clip(MAX_NORM, by))
    assert reference.drains == [2]

    plain = stages_of(2, dropout=0)
    optimizer = OPTIMIZERS["momentum"](plain.parameters())
    scheduler, norms = drop(optimizer, 3), []
    for step, batches in enumerate(data(STEPS, 3)):
        for inputs, target in batches:
            (squared_error(plain[1](plain[0](inputs)), target) / 3).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
        if by == "global":
            nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        elif by == "stage" or step in (0, 2):
            for stage in plain:
                nn.utils.clip_grad_norm_(stage.parameters(), MAX_NORM)
        else:
            nn.utils.clip_grads_with_norm_(plain.parameters(), MAX_NORM, norms[step - 1])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert min(norms) < MAX_NORM < max(norms)
    for got, want in zip(weights(stages), weights(plain)):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("around", ["step", "everything"])
def test_autocast_is_that_of_the_plain_loop_which_has_it_around_forward_and_loss_only(around):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(Twice(), Careful(), Twice())

    def on(wanted):
        return torch.autocast("cpu", torch.bfloat16, enabled=around == wanted)

    stages = model()
    optimizer = OPTIMIZERS["momentum"](stages.parameters())
    reference = Reference(list(stages), optimizer, simultaneous(3, 3), squared_error)
    with on("everything"):
        for batches in data(STEPS, 3, torch.float32):
            with on("step") if around == "step" else nullcontext():
                reference.step(batches)

    plain = model()
    optimizer = OPTIMIZERS["momentum"](plain.parameters())
    for batches in data(STEPS, 3, torch.float32):
        for inputs, target in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = squared_error(plain(inputs), target)
            loss.backward()
        for parameter in plain.parameters():
            parameter.grad /= 3
        optimizer.step()
        optimizer.zero_grad()
    assert same(weights(stages), weights(plain))


def test_one_worker_is_plain_sgd_at_slack_0_and_one_step_late_at_slack_1():
    for slack in (0, 1):
        stages = stages_of(1, dropout=0)
        train(cyclic(1, slack=slack), stages, OPTIMIZERS["momentum"](stages.parameters()), at=99)

        rate, momentum, decay = 0.1, 0.9, 0.01
        model = stages_of(1, dropout=0)
        now = weights(model)
        before, velocity = now, None
        for ((inputs, target),) in data(STEPS, 1):
            at = before if slack else now
            leaves = [w.clone().requires_grad_() for w in at]
            output = torch.func.functional_call(model[0], dict(zip(dict(model[0].named_parameters()), leaves)), inputs)
            gradients = torch.autograd.grad(squared_error(output, target), leaves)
            pull = [g.add(w, alpha=decay) for g, w in zip(gradients, now)]
            velocity = pull if velocity is None else [v.mul(momentum).add(p) for v, p in zip(velocity, pull)]
            before, now = now, [w.add(v, alpha=-rate) for w, v in zip(now, velocity)]
        assert same(weights(stages), now)


@pytest.mark.parametrize("slack", [0, 4])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_at_a_constant_rate_it_is_the_authors_replicas_with_lagged_gradients(name, slack):
    """The authors' emulation: every worker has its own weights and applies a stage's gradient at once or a step late.

    Source: `CDP.update` of the official repository, in own words; right for as many workers as stages.
    """
    n = 4
    stages = stages_of(n, dropout=0)
    reference = train(cyclic(n, slack=slack), stages, OPTIMIZERS[name](stages.parameters()), at=99)
    replicas = [stages_of(n, dropout=0) for _ in range(n)]
    optimizers = [[OPTIMIZERS[name](stage.parameters()) for stage in replica] for replica in replicas]
    lagged = None
    for batches in data(STEPS, n):
        sums = None
        for replica, (inputs, target) in zip(replicas, batches):
            value = inputs
            for stage in replica:
                value = stage(value)
            found = torch.autograd.grad(squared_error(value, target), list(replica.parameters()))
            sums = found if sums is None else [s + g for s, g in zip(sums, found)]
        means = iter([s / n for s in sums])
        fresh = [[next(means) for _ in stage.parameters()] for stage in replicas[0]]
        for worker in range(n):
            for j in range(n):
                gradients = fresh[j] if slack == 0 and j >= n - 1 - worker else lagged and lagged[j]
                if gradients is None:
                    continue
                for parameter, gradient in zip(replicas[worker][j].parameters(), gradients):
                    parameter.grad = gradient.clone()
                optimizers[worker][j].step()
        lagged = fresh
    last = STEPS - 1
    for worker in range(n):
        for j in range(n):
            version = last + 1 if slack == 0 and j >= n - 1 - worker else last
            truth = stages[j] if version > last else None
            want = weights(truth) if truth is not None else list(reference._history[last][j].values())
            assert same(weights(replicas[worker][j]), want)


def test_each_stage_is_read_at_the_age_the_table_says():
    """Linear stages and a linear loss: the gradient of a stage is the product of the others' weights, by hand."""
    schedule = cyclic(2)  # staleness 1 0 / 0 0
    stages = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]).double()
    with torch.no_grad():
        stages[0].weight.fill_(2.0)
        stages[1].weight.fill_(3.0)
    reference = Reference(stages, OPTIMIZERS["sgd"](stages.parameters()), schedule, lambda out, target: out.sum())
    one = torch.ones(1, 1, dtype=torch.float64)
    a, b, old_a = 2.0, 3.0, 2.0
    for _ in range(4):
        reference.step([(one, one), (one, one)])
        gradient_a, gradient_b = (b + b) / 2, (old_a + a) / 2
        a, b, old_a = a - 0.1 * gradient_a, b - 0.1 * gradient_b, a
        assert stages[0].weight.item() == pytest.approx(a, rel=1e-14)
        assert stages[1].weight.item() == pytest.approx(b, rel=1e-14)


def test_a_drain_makes_a_step_start_as_the_first_one_did():
    """Drained before every step, every schedule is the synchronous one."""
    results = []
    for schedule in (cyclic(3, slack=3), simultaneous(3, 3)):
        stages = stages_of(3)
        train(schedule, stages, OPTIMIZERS["adamw"](stages.parameters()), drains=range(STEPS))
        results.append(weights(stages))
    assert same(*results)
    undrained = stages_of(3)
    train(cyclic(3, slack=3), undrained, OPTIMIZERS["adamw"](undrained.parameters()))
    assert not same(weights(undrained), results[0])


def test_dropout_depends_on_the_place_and_not_on_what_was_drawn_before():
    results = []
    for draws in (0, 3):
        stages = stages_of(2, dropout=0.5)
        torch.manual_seed(draws)
        torch.rand(draws)
        before = torch.get_rng_state()
        train(accumulation(2, 2), stages, OPTIMIZERS["sgd"](stages.parameters()))
        assert torch.equal(torch.get_rng_state(), before)
        results.append(weights(stages))
    assert same(*results)
    other = stages_of(2, dropout=0.5)
    train(accumulation(2, 2), other, OPTIMIZERS["sgd"](other.parameters()), seed=1)
    assert not same(weights(other), results[0])


def test_buffers_are_kept_once_or_once_per_worker():
    shared, apart = stages_of(2, norm=nn.BatchNorm1d), stages_of(2, norm=nn.BatchNorm1d)
    train(cyclic(2), shared, OPTIMIZERS["sgd"](shared.parameters()))
    reference = train(cyclic(2), apart, OPTIMIZERS["sgd"](apart.parameters()), copies=(0, 1))
    assert same(weights(shared), weights(apart))
    assert [int(b) for name, b in shared.named_buffers() if "num" in name] == [2 * STEPS] * 2
    kept = [[int(b) for stage in copy for name, b in stage.items() if "num" in name] for copy in reference.buffers]
    assert kept == [[STEPS] * 2] * 2
    assert all(not bool(b.any()) for name, b in apart.named_buffers() if "mean" in name)


def test_a_parameter_no_micro_batch_uses_keeps_no_gradient_and_one_some_use_counts_zero_elsewhere():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.never, self.positive = (nn.Parameter(torch.ones(WIDTH).double()) for _ in range(3))

        def forward(self, value):
            return value * self.always * (self.positive if value.sum() > 0 else 1)

    stage = Sometimes()
    optimizer = OPTIMIZERS["momentum"](stage.parameters())
    ones = torch.ones(1, WIDTH).double()
    Reference([stage], optimizer, simultaneous(2), lambda out, target: out.sum()).step([(ones, ones), (-ones, ones)])
    assert stage.never not in optimizer.state and torch.equal(stage.never, torch.ones(WIDTH).double())
    decay, rate = 0.01, 0.1
    assert torch.allclose(stage.positive, torch.full((WIDTH,), 1 - rate * (1 / 2 + decay)).double(), rtol=1e-14)


def test_models_that_do_not_fit_are_refused():
    stages = stages_of(2)
    optimizer = OPTIMIZERS["sgd"](stages.parameters())
    with pytest.raises(ValueError, match="3 stages, the model 2"):
        Reference(stages, optimizer, cyclic(3), squared_error)
    with pytest.raises(ValueError, match="tied weights"):
        Reference([stages[0], stages[0]], optimizer, cyclic(2), squared_error)
