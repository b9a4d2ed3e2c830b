"""What docs/ddp.md says holds as under DDP: a loop under DDP and the same loop under `parallelize`, side by side."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import armillary

STEPS = 4


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(rank, step):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, generator=draw, dtype=torch.float64)


def loss(model, rank, step):
    return model(batch(rank, step)).square().mean()


def once(model, rank, step, told):
    loss(model, rank, step).backward()


def twice(model, rank, step, told):
    loss(model, rank, step).backward()
    loss(model, rank, step + 50).backward()


def two_forwards(model, rank, step, told):
    (loss(model, rank, step) + loss(model, rank, step + 50)).backward()


def penalty(model, rank, step, told):
    x = batch(rank, step).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (loss(model, rank, step) + slope.square().mean()).backward()


def local(model, rank, step, told):
    told += [one.clone() for one in torch.autograd.grad(loss(model, rank, step), [*model.parameters()])]
    loss(model, rank, step).backward()


def clipped(model, rank, step, told):
    loss(model, rank, step).backward()
    told.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))


HABITS = {"once": once, "two backwards": twice, "two forwards": two_forwards, "gradient penalty": penalty,
          "autograd.grad": local, "clipping": clipped}  # fmt: skip
LOOPS = [*HABITS, "zeros in place", "no_sync", "hook", "scheduler"]


def trained(rank, name, is_ours):
    """What the loop came to: the weights, and what it looked at on the way."""
    inner, told = made(), list[torch.Tensor]()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    run = armillary.parallelize(inner, optimizer) if is_ours else None
    model = inner if is_ours else DistributedDataParallel(inner)
    habit = HABITS.get(name, once)
    if name == "hook":
        inner[0].weight.register_hook(lambda gradient: told.append(gradient.clone()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if name == "scheduler" else None
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=name != "zeros in place")
        if name == "no_sync":
            with (run or model).no_sync():
                loss(model, rank, step + 50).backward()
        habit(model, rank, step, told)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    if run is not None:
        run.close()
    return [one.detach() for one in inner.parameters()] + told


def compared(rank, workers, names):
    return {name: (trained(rank, name, False), trained(rank, name, True)) for name in names}


def test_the_same_loop_under_ddp_and_here_comes_to_the_same(crew):
    for found in crew(2).run(compared, LOOPS):
        for name, (theirs, ours) in found.items():
            assert len(theirs) == len(ours), name
            for one, other in zip(theirs, ours, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=name)


def frozen(rank, workers):
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = armillary.parallelize(model, optimizer)
    for step in range(2 * STEPS):
        if step == STEPS:
            model[0].requires_grad_(False)
            before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    run.close()
    return before, model[0].weight.detach(), model[2].weight.detach()


def test_a_layer_may_be_frozen_in_mid_run(crew):
    (before, after, other), (_, _, others) = crew(2).run(frozen)
    assert torch.equal(before, after) and torch.equal(other, others) and not torch.equal(other, made()[2].weight)
