"""Workers of the runtime in one process: their units' programs are read in lockstep, beside replicas that the oracle
joins. What differs in any bit is found after every step."""

from dataclasses import replace

import torch
from torch import nn

from armillary.exchanges import RankInfo, build_dense
from armillary.plans import Choice
from armillary.reference import lockstep
from armillary.reference.replicas import Replicas, SharedGroup
from armillary.runtime.dense_unit import dense_unit

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


def built(text):
    choice = Choice.parse(text)
    return build_dense(choice.name, **choice.options)


class Net(nn.Module):
    """`rare` is used by worker 0 or 1, in two of three steps; `never` by nobody; `tied` twice in a forward."""

    def __init__(self):
        super().__init__()
        self.first, self.tied, self.last = nn.Linear(5, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.rare, self.never = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(3))

    def forward(self, batch):
        inputs, target, uses_rare, odd = batch
        hidden = torch.tanh(self.tied(torch.tanh(self.tied(torch.tanh(self.first(inputs * odd))))))
        return (self.last(hidden * self.rare if uses_rare else hidden) - target).square().mean()


GROUPS = (("last.bias", "last.weight", "never", "rare"), ("tied.weight", "first.weight", "first.bias"))


def net(dtype):
    torch.manual_seed(5)
    return Net().to(dtype)


def batch_of(worker, step, dtype, odd=1.0):
    generator = torch.Generator().manual_seed(1000 * step + worker)
    inputs, target = torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator) + worker
    return inputs.to(dtype), target.to(dtype), step % 3 < 2 and worker == step % 2, odd


def batches_of(workers, step, dtype):
    """At step 3 the last worker overflows."""
    odd = [float("inf") if (step, worker) == (3, workers - 1) else 1.0 for worker in range(workers)]
    return [batch_of(worker, step, dtype, odd[worker]) for worker in range(workers)]


def skips_what_is_not_finite(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(bool(one.isfinite().all()) for one in gradients):
        model.zero_grad(set_to_none=True)


class Workers:
    """N workers of the runtime, without a network: their units' programs are read in lockstep."""

    def __init__(self, exchange, workers, dtype, optimizer):
        self.models = [net(dtype) for _ in range(workers)]
        self.optimizers = [optimizer(model.parameters()) for model in self.models]
        self.units = [[self._unit(model, names, exchange, rank, workers) for names in GROUPS]
                      for rank, model in enumerate(self.models)]  # fmt: skip
        self.workers = workers

    def _unit(self, model, names, exchange, rank, workers):
        members = dict(model.named_parameters())
        return dense_unit("group", {name: members[name] for name in names}, exchange, RankInfo(rank, workers))

    def step(self, batches, parts, scale=1.0):
        for model, batch in zip(self.models, batches):
            model.zero_grad(set_to_none=True)
            (model(batch) * scale).backward()
        with torch.no_grad():
            for number in range(len(GROUPS)):
                self._exchange([units[number] for units in self.units], parts, scale)
            for model, optimizer in zip(self.models, self.optimizers):
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
                skips_what_is_not_finite(model)
                optimizer.step()

    def _exchange(self, units, parts, scale):
        programs = []
        for rank, (unit, part) in enumerate(zip(units, parts)):
            unit.open(1)
            parcel = replace(unit.bucket.seal(part), scale=scale)
            programs.append(unit.push(parcel, RankInfo(rank, self.workers)))
        for unit, moved in zip(units, lockstep.run(programs)[0]):
            unit.take_gradients(moved)


def unlike(workers, truth):
    """What is not the same bit for bit."""
    found = []
    for rank, model in enumerate(workers.models):
        found += [(rank, n) for n, p in model.named_parameters() if not torch.equal(p, truth.named[rank][n])]
        for number, unit in enumerate(workers.units[rank]):
            want = truth.states[number][rank]
            assert unit.state.keys() == want.keys()
            found += [(rank, number, key) for key, mine in unit.state.items() if not torch.equal(mine, want[key])]
    return found


def trained(text, count, dtype, optimizer="momentum", weights=None, scales=(), fault=None, steps=5):
    """Workers beside their replicas, one step beyond that which overflows; what differs in any bit after any step."""
    exchange, make = built(text), OPTIMIZERS[optimizer]
    groups = [SharedGroup(names, exchange) for names in GROUPS]
    truth = Replicas(net(dtype), lambda model: make(model.parameters()), count, groups)
    workers = Workers(fault(exchange) if fault else exchange, count, dtype, make)
    parts = [1 / count] * count if weights is None else [one / sum(weights) for one in weights]
    found = []
    for step in range(steps):
        batches = batches_of(count, step, dtype)
        truth.step(batches, lambda model, batch: model(batch), weights, skips_what_is_not_finite)
        workers.step(batches, parts, scales[step % len(scales)] if scales else 1.0)
        found += unlike(workers, truth)
    return found
