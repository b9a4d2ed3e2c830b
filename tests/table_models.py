"""A small model with tables in two of its three parts, its data, and plans for it; the same in every process."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from armillary.facts.plan import Choice, Plan
from armillary.facts.topology import Link, Topology
from armillary.planning.planner import plan
from armillary.reference.cyclic_workers import WorkersReference
from armillary.reference.replicas import NO_ROWS
from armillary.runtime.profiling.profiler import profile
from armillary.schedules.registry import read

ROWS, WIDTH, SIZE = 23, 4, 6
BY_ROW = {"0.words.weight": "row_sharded", "0.marks": "row_sharded", "2.late.weight": "row_sharded"}
CODED = {
    **BY_ROW,
    "0.words.weight": Choice.parse("owned_rows(rows_as=quantize(bits=8), gradients_as=quantize(bits=4))"),
    "2.late.weight": Choice.parse("owned_rows(owners=1, gradients_as=lower_precision)"),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3, initial_accumulator_value=0.1),
    "fused adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3, initial_accumulator_value=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}


class Read(nn.Module):
    """Two tables: one of words, and one number for each of them; the second may be left out, or read for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)
        self.marks = nn.Parameter(torch.zeros(ROWS))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        found = self.words(ids).sum(1)
        if int(ids[0, 0]) % 3:
            marks = self.marks[ids[:, 0]]
            found = found * (1 + (marks.detach() if int(ids[0, 0]) == 1 else marks))[:, None]
        return found, ids


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return functional.dropout(torch.tanh(self.inner(value[0])), 0.2), value[1]


class Late(nn.Module):
    """A table that is read far from the data, with ids that came along."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return self.head(value[0] + self.late(value[1][:, 1]))


def model_of(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(Read(), Mix(), Late()).to(dtype)
    with torch.no_grad():
        model[0].marks.copy_(torch.linspace(-1, 1, ROWS))
    return model


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def batch_of(step: int, number: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Few different rows, so that steps touch some rows twice and leave many alone."""
    generator = torch.Generator().manual_seed(100 * step + number)
    ids = torch.randint(ROWS, (SIZE, 3), generator=generator) // 2 * 2
    ids[0, 0] = 1 + step * (number + 1) % 4
    return ids, torch.randn(SIZE, 2, generator=generator, dtype=torch.float64).to(dtype)


def plan_of(choice, processes, request=BY_ROW, lazy=(), dtype=torch.float64) -> Plan:
    """As the user would ask for it."""
    link = Link(1e-4, 1e8)
    facts = profile(model_of(dtype), [batch_of(1, m, dtype) for m in range(processes)], loss, workers=processes)
    topology = Topology(processes, 1, link, link, 1 << 33)
    return plan(facts, topology, schedule=Choice.parse(choice), constraints=request, lazy=lazy)


def cut_of(model: nn.Sequential, stages: int) -> list[nn.Module]:
    """The parts of each stage, as `points=2` (two stages) or every part its own."""
    return {1: [model], 2: [model[:2], model[2:]], 3: [model[:1], model[1:2], model[2:]]}[stages]


def points_of(stages: int) -> list[str]:
    return {1: [], 2: ["2"], 3: ["1", "2"]}[stages]


def truth(choice, processes, steps, optimizer="sgd", lazy=(), drains=(), dtype=torch.float64, rows=NO_ROWS):
    """(model, optimizer, losses [step][worker][micro-batch]) of plain loops, the rate falling after two steps."""
    model = model_of(dtype)
    made, found = OPTIMIZERS[optimizer](model.parameters()), read(Choice.parse(choice), processes)
    workers = processes if found.method.is_side_by_side else 1
    named = dict(model.named_parameters())
    tables = {named[name]: name in lazy for name in BY_ROW}
    parts = cut_of(model, found.stages)
    reference = WorkersReference(parts, made, found.schedule(), functional.mse_loss, tables, seed=5)
    reference.rows = {named[name]: meanings for name, meanings in rows.items()}
    scheduler, losses = torch.optim.lr_scheduler.MultiStepLR(made, [2], 0.1), []
    for step in range(steps):
        if step in drains:
            reference.drain()
        count = found.micro_batches
        mine = [[batch_of(step, w * count + m, dtype) for m in range(count)] for w in range(workers)]
        losses.append(reference.step(mine))
        scheduler.step()
    return model, made, losses
