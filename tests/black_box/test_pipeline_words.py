"""What a pipeline cannot do is refused in the caller's words before the first step; a sparse table trains in one."""

import re

import pytest
import torch
from plain_loop import differ, state_of, train
from torch import nn
from torch.nn import functional

import armillary

COUNT, WIDTH = 4, 6


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, value):
        return self.b(self.a(value).tanh())


class Branching(Body):
    def forward(self, value):
        hidden = self.a(value)
        return self.b(hidden) if hidden.sum() > 0 else self.b(-hidden)


class Looping(Body):
    def forward(self, value):
        for _ in range(int(value.abs().max().item()) + 1):
            value = self.a(value)
        return self.b(value)


class Held:
    def __init__(self, logits):
        self.logits = logits


class InObject(Body):
    def forward(self, value):
        return Held(super().forward(value))


class Tied(Body):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight


class Spectral(Body):
    """Each forward moves buffers that the next one reads."""

    def __init__(self):
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.a, self.b = norm(self.a), norm(self.b)


class Unlike(Body):
    """When traced."""

    def forward(self, value):
        return super().forward(value * 2 if torch.compiler.is_compiling() else value)


class InOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def forward(self, value):
        return self.net(value)


def mean_square(model, batch):
    return model(batch).square().mean()


def penalised(model, batch):
    batch = batch.clone().requires_grad_()
    output = model(batch)
    (gradient,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
    return output.square().mean() + gradient.square().mean()


def gently_penalised(model, batch):
    batch = batch.clone().requires_grad_()
    output = model(batch)
    (gradient,) = torch.autograd.grad(output.sum(), batch, create_graph=True, allow_unused=True)
    return output.square().mean() + gradient.square().mean()


def by_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def by_two(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


REMEDY = r"Name the model's modules in an nn.Sequential.*replace branches on values by torch.where"
PENALTY = r"the loss fails on the model's output alone.*gradient penalty.*inside of the model's forward"
# What is asked for -> what is said.
REFUSED = {
    "a branch": (Branching, by_sgd, mean_square, "gpipe", REMEDY),
    "a loop": (Looping, by_sgd, mean_square, "1f1b", REMEDY),
    "a penalty": (Body, by_sgd, penalised, "gpipe", PENALTY),
    "another penalty": (Body, by_sgd, gently_penalised, "gpipe", PENALTY),
    "two optimizers": (
        Body,
        by_two,
        mean_square,
        "gpipe",
        "without a schedule, where several optimizers work together",
    ),
    "an object": (InObject, by_sgd, lambda m, b: m(b).logits.square().mean(), "gpipe", "returns a Held.*dataclasses"),
    "one module": (InOne, by_sgd, mean_square, "gpipe", r"1 modules make no 2 stages.*stages=\['net.0', 'net.2'\]"),
    "spectral norm": (Spectral, by_sgd, mean_square, "gpipe", "Its forward changes buffers .*nn.Sequential"),
    "another trace": (Unlike, by_sgd, mean_square, "gpipe", "do not compute what Unlike does: they return other"),
    "tied": (Tied, by_sgd, mean_square, "pipeline", "a.weight of stage 0 and b.weight of stage 1 are one parameter"),
}


def batches():
    draws = [torch.Generator().manual_seed(number) for number in range(COUNT)]
    return [torch.randn(5, WIDTH, generator=draw, dtype=torch.float64) for draw in draws]


def run_of(make, optimizer, loss, schedule, given, **asked):
    torch.manual_seed(0)
    model = make().double()
    wanted = armillary.Choice(schedule, {"micro_batches": COUNT})
    return model, armillary.parallelize(model, optimizer(model), given, loss, schedule=wanted, timeout=20.0, **asked)


def refusals(rank, world):
    said = {}
    for name, (make, optimizer, loss, schedule, _) in REFUSED.items():
        try:
            run_of(make, optimizer, loss, schedule.replace("1f1b", "one_f_one_b"), batches())[1].close()
        except ValueError as error:
            said[name] = str(error)
    return said


def test_what_a_pipeline_cannot_do_is_said_in_the_words_of_the_caller(crew):
    for said in crew(2).run(refusals):
        silent = {
            name: said.get(name) for name, (*_, words) in REFUSED.items() if not search(words, said.get(name, ""))
        }
        assert not silent, silent
        assert not any("torch.org" in one or "graph break" in one for one in said.values())


def search(words, said):
    return re.search(words, said, re.DOTALL)


# What does work.


def sparse_table():
    return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 2))


def sparse_bag():
    return nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def by_adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def classified(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def words():
    draws = [torch.Generator().manual_seed(number) for number in range(COUNT)]
    return [(torch.randint(20, (4, 3), generator=draw), torch.randint(2, (4,), generator=draw)) for draw in draws]


def spectral():
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), norm(nn.Linear(WIDTH, 3)))


TRAINED = {
    "sparse": (sparse_table, by_sgd, classified, words, {}),
    "sparse, Adagrad": (sparse_table, by_adagrad, classified, words, {}),
    "sparse bag": (sparse_bag, by_sgd, classified, words, {}),
    "named stages": (InOne, by_sgd, mean_square, batches, {"stages": ["net.0", "net.2"]}),
    "buffers that a chain's forwards change": (spectral, by_sgd, mean_square, batches, {}),
}


def trainings(rank, world, schedule):
    found = {}
    for name, (make, optimizer, loss, given, asked) in TRAINED.items():
        model, run = run_of(make, optimizer, loss, schedule, given(), **asked)
        told = [float(value) for _ in range(2) for one in run.step(given()) for value in one.losses]
        run.close()
        found[name] = told, state_of(model)
    return found


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of the plain loop, once a process
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_what_does_work_in_a_pipeline_is_one_process(crew, schedule):
    for found in crew(2).run(trainings, schedule):
        wrong = {}
        for name, (make, optimizer, loss, given, _) in TRAINED.items():
            torch.manual_seed(0)
            model = make().double()
            losses = [loss for step in train(model, optimizer(model), loss, [given(), given()]) for loss in step]
            told, weights = found[name]
            if told != pytest.approx(losses, rel=1e-12) or differ(weights, state_of(model), 1e-12):
                wrong[name] = told, losses, differ(weights, state_of(model), 1e-12)
        assert not wrong


def losses_of(rank, world, dtype):
    """In words, so that their dtype counts. dtype: of the loss alone, as under autocast."""
    loss = lambda model, batch: mean_square(model, batch).to(dtype)  # noqa: E731
    _, run = run_of(Body, by_sgd, loss, "gpipe", batches())
    with run:
        return [repr(one.losses) for _ in range(2) for one in run.step(batches())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_rank_is_told_a_loss_as_the_loss_function_gave_it(crew, dtype):
    first, last = crew(2).run(losses_of, dtype)
    assert first == last and (str(dtype) in last[0] or dtype == torch.float32), (first, last)
