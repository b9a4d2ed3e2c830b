"""GPipe, 1F1B and accumulation, by name: bit for bit a plain loop over the same micro-batches in one process."""

import itertools

import pytest
import torch
from torch import nn

from armillary.planning.planner import plan
from armillary.plans import Choice, Link, Topology
from armillary.profiler.profiler import profile
from owned import loss, optimizer_of, same, started

WIDTH, ROWS, VOCABULARY, STEPS, TIGHT = 4, 3, 11, 4, 0.05
CUTS = {1: [], 2: ["2"], 3: ["2", "4"]}  # by number of stages


class Words(nn.Module):
    """A table that is read by row, with repeats."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids):
        return self.words(ids).mean(1)


def model_of(has_table):
    """Six modules, so three stages of two; nothing is drawn while it trains, so that a plain loop is enough."""
    torch.manual_seed(3)
    first = Words() if has_table else nn.Linear(WIDTH, WIDTH)
    rest = itertools.chain(*((nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
    return nn.Sequential(first, *rest, nn.Tanh()).double()


def batch_of(step, number, has_table):
    draw = torch.Generator().manual_seed(100 * step + number)
    target = torch.randn(ROWS, WIDTH, generator=draw).double()
    if has_table:
        return torch.randint(VOCABULARY, (ROWS, 3), generator=draw), target
    return torch.randn(ROWS, WIDTH, generator=draw).double(), target


def plain_loop(micro_batches, workers=1, stages=1, clip_norm=None, has_table=False):
    """(weights, optimizer state, losses by step and micro-batch) of one process.

    A gradient is the sum over micro-batches, in their order, divided by their number; with several workers the mean of
    their means.
    """
    model = model_of(has_table)
    optimizer, losses, named = optimizer_of(model), [], dict(model.named_parameters())
    for step in range(STEPS):
        means, losses = {}, [*losses, []]
        for worker in range(workers):
            optimizer.zero_grad(set_to_none=True)
            for number in range(worker * micro_batches, (worker + 1) * micro_batches):
                value = loss(model, batch_of(step, number, has_table))
                value.backward()
                losses[-1].append(value.detach())
            for name, parameter in named.items():
                mean = parameter.grad / micro_batches
                means[name] = means[name] + mean if name in means else mean
        for name, parameter in named.items():
            parameter.grad = means[name] / workers
        if clip_norm is not None:
            clip(model, stages, clip_norm)
        optimizer.step()
    return dict(model.state_dict()), optimizer.state_dict(), losses


def clip(model, stages, max_norm):
    """As torch does it, squares being added stage by stage, the last first: so the last bit is no matter of chance."""
    starts = [0, *map(int, CUTS[stages]), len(model)]
    square = torch.zeros((), dtype=torch.float64)
    for first, end in reversed(list(itertools.pairwise(starts))):
        own = torch.zeros((), dtype=torch.float64)
        for parameter in model[first:end].parameters():
            own = own + parameter.grad.square().sum()
        square = square + own
    true = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert torch.allclose(square.sqrt(), true, rtol=1e-14) and true > max_norm  # every step is clipped
    for parameter in model.parameters():
        parameter.grad = parameter.grad * (max_norm / (square.sqrt() + 1e-6))


def plan_of(choice, processes, has_table=False):
    link = Link(1e-4, 1e8)
    batches = [batch_of(1, number, has_table) for number in range(processes)]
    facts = profile(model_of(has_table), batches, loss, workers=processes)
    return plan(facts, Topology(processes, 1, link, link, 1 << 33), schedule=choice)


def job(rank, world, cases):
    """For every plan, with a table or without: the losses known here, and what rank 0 exports."""
    torch.set_num_threads(1)
    found = []
    for made, has_table in cases:
        model = model_of(has_table)
        run = started(made, model, optimizer_of(model), loss, batch_of(0, 0, has_table))
        known = []
        for step in range(STEPS):
            known += run.step([batch_of(step, number, has_table) for number in run._engine.micro_batches])
        run._engine.drain()
        known += run._engine.losses()
        found.append(([list(one.losses) for one in known], run.export()))
        run.close()
    return found


def refuted(answers, truth, micro_batches, is_side_by_side):
    """What is not the plain loop's; empty if nothing is."""
    weights, state, losses = truth
    whole = answers[0][1]
    found = [name for name in weights if not same(whole["model"][name], weights[name])]
    found += [] if same(whole["optimizer"], state) else ["optimizer"]
    for rank, (known, _) in enumerate(answers):
        own = slice(rank * micro_batches, (rank + 1) * micro_batches) if is_side_by_side else slice(None)
        found += [] if same(known, [step[own] for step in losses]) else [f"losses of rank {rank}"]
    return found


# Each: options of the schedule, and whether the model has a table, which every schedule keeps whole.
VARIETY = [
    ({}, False),
    ({"micro_batches": 5}, False),
    ({"micro_batches": 1, "recompute": [0]}, False),
    ({"micro_batches": 4, "recompute": [0], "clip_norm": TIGHT}, False),
    ({"micro_batches": 3, "clip_norm": TIGHT}, False),
    ({"micro_batches": 3}, True),
    ({"micro_batches": 4, "recompute": [0]}, True),
]


@pytest.mark.parametrize(
    ("name", "processes", "stages"),
    [
        ("gpipe", 2, 2),
        ("gpipe", 3, 3),
        ("one_f_one_b", 2, 2),
        ("one_f_one_b", 3, 3),
        ("accumulation", 1, 1),
        ("accumulation", 2, 1),
        ("accumulation", 2, 3),
    ],
)
def test_it_equals_one_process_bit_for_bit(crew, name, processes, stages):
    cut = {"points": CUTS[stages]}
    plans = [(plan_of(Choice(name, {**cut, **said}), processes, tables), tables) for said, tables in VARIETY]
    answers = crew(processes).run(job, plans)
    is_side_by_side = name == "accumulation"
    for number, ((said, has_table), (made, _)) in enumerate(zip(VARIETY, plans, strict=True)):
        assert made.departures == ()
        count = said.get("micro_batches", 2 if is_side_by_side else processes)
        workers = processes if is_side_by_side else 1
        truth = plain_loop(count, workers, stages, said.get("clip_norm"), has_table)
        found = refuted([answer[number] for answer in answers], truth, count, is_side_by_side)
        assert not found, (said, has_table, found)


def test_another_rule_is_seen(crew):
    """Stale weights beside fresh ones; one micro-batch more; clipped gradients beside whole ones."""
    stale = plan_of(Choice("pipeline", {"points": CUTS[2]}), 2)
    exact = plan_of(Choice("gpipe", {"points": CUTS[2]}), 2)
    (stale_one, exact_one), (stale_two, exact_two) = crew(2).run(job, [(stale, False), (exact, False)])
    truth = plain_loop(2, stages=2)
    assert not refuted([exact_one, exact_two], truth, 2, False)
    assert "0.weight" in refuted([stale_one, stale_two], truth, 2, False)
    for other in (plain_loop(3, stages=2), plain_loop(2, stages=2, clip_norm=TIGHT)):
        assert refuted([exact_one, exact_two], other, 2, False)
