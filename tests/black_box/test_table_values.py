"""What a loop asks of every parameter, asked of a table whose rows are spread: norms, sums, extremes, histograms.

The answer is the one-process one, on every rank; what cannot be answered is refused by name, with what to do instead.
"""

import ast
import copy
import pickle
import re
from dataclasses import replace

import numpy
import pytest
import torch
from plain_loop import train
from small_models import OPTIMIZERS, WIDTH, Reader, made, word_batch, word_loss
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import face

TABLE = "words.weight"
STEPS = 8  # gradients begin to wait in the sixth
ASKED = {
    "norm": lambda p: p.norm(),
    "norm of order 1": lambda p: p.norm(1),
    "norm of order 3": lambda p: torch.norm(p, 3),
    "norm of order 0.5": lambda p: torch.linalg.vector_norm(p, 0.5),
    "norm of order 0": lambda p: torch.linalg.vector_norm(p.clamp(min=0), 0),
    "norm of order inf": lambda p: p.norm(float("inf")),
    "norm of order -inf": lambda p: torch.linalg.vector_norm(p, -float("inf")),
    "norm of order -1": lambda p: torch.linalg.vector_norm(p, -1),
    "Frobenius norm": lambda p: torch.linalg.norm(p),
    "sum": lambda p: p.sum(),
    "sum of float32": lambda p: torch.sum(p, dtype=torch.float32),
    "mean": lambda p: torch.mean(p),
    "std": lambda p: p.std(),
    "variance of the population": lambda p: p.var(unbiased=False),
    "variance corrected by 3": lambda p: torch.var(p, correction=3),
    "largest": lambda p: p.max(),
    "smallest": lambda p: torch.min(p),
    "largest of the absolutes": lambda p: p.abs().max(),
    "amax": lambda p: p.detach().amax(),
    "L2 penalty": lambda p: (p**2).sum() * 0.01,
    "L1 of the data": lambda p: p.data.abs().sum(),
    "square mean": lambda p: p.square().mean().sqrt(),
    "product with itself": lambda p: (p * p).sum(),
    "distance to the mean": lambda p: (p - p.mean()).abs().max(),
    "one minus, in half": lambda p: ((1 - p) / 2).norm(),
    "negative, inverted": lambda p: (1 / -p).max(),
    "finite": lambda p: torch.isfinite(p).all(),
    "not a number": lambda p: p.isnan().any(),
    "share of positives": lambda p: (p > 0).float().mean(),
    "how many zeros": lambda p: (p == 0).sum(),
    "how many others": lambda p: torch.count_nonzero(p),
    "histc": lambda p: p.histc(),
    "histc in a range": lambda p: torch.histc(p, bins=7, min=-0.5, max=1),
    "histc of the detached": lambda p: p.detach().cpu().histc(5),
    "histogram": lambda p: torch.histogram(p.detach(), 8),
    "histogram in a range": lambda p: p.detach().histogram(4, range=(-1.0, 1.0)),
}


def plan_of(exchange, workers=2, kind=Reader, prefetch="none"):
    batches = [word_batch(worker, 0) for worker in range(workers)]
    plan = face.plan_for(made(kind), word_loss, batches, workers, exchange={TABLE: exchange})
    groups = [replace(g, prefetch=prefetch) if TABLE in g.parameters else g for g in plan.groups]
    return replace(plan, groups=tuple(groups))


def answers_of(model):
    with torch.no_grad():  # the total norm of parameters that learn is no leaf's
        total = nn.utils.get_total_norm(list(model.parameters()))
    return {**answers_for(model.words.weight), "total norm of all parameters": total}


def answers_for(p):
    return {name: ask(p) for name, ask in ASKED.items()}


def plainly(found):
    """Of tensors that may be part of a graph, copies for another process."""
    return {
        name: [one.detach().clone() for one in value] if isinstance(value, tuple) else [value.detach().clone()]
        for name, value in found.items()
    }


def asked_of_ranks(rank, world, plan):
    """After each of the steps, and once between backward and step."""
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    seen = [plainly(answers_of(model))]
    for step, batch in enumerate(face.batches_of(run, [word_batch(rank, step) for step in range(STEPS)])):
        run.optimizer.zero_grad()
        word_loss(model, batch).backward()
        if step == 1:
            assert torch.equal(model.words.weight.norm(), seen[-1]["norm"][0])
        run.optimizer.step()
        seen.append(plainly(answers_of(model)))
    face.close(run)
    return seen


def truth_of_ranks(workers):
    model = made(Reader)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    seen = [plainly(answers_of(model))]
    for step in range(STEPS):
        train(model, optimizer, word_loss, [[word_batch(worker, step) for worker in range(workers)]])
        seen.append(plainly(answers_of(model)))
    return seen


def apart(got, want):
    """Names of the answers that are of another dtype, shape, or further off than rounding."""
    return [
        name
        for name, there in want.items()
        if [(one.dtype, one.shape) for one in got[name]] != [(one.dtype, one.shape) for one in there]
        or not all(
            torch.allclose(a.double(), b.double(), rtol=1e-6 if a.dtype == torch.float32 else 1e-12, atol=1e-14)
            for a, b in zip(got[name], there, strict=True)
        )
    ]


WAYS = {
    "owned_rows": ("owned_rows", "none"),
    "one owner": (face.armillary.Choice("owned_rows", {"owners": 1}), "none"),
    "gather_rows": ("gather_rows", "none"),
    "rows that go early": ("owned_rows", "rows"),
    "gradients that wait": ("owned_rows", "gradients"),
}


@pytest.mark.parametrize("way", WAYS)
def test_norms_sums_extremes_and_histograms_of_a_spread_table_are_those_of_one_process(crew, way):
    exchange, prefetch = WAYS[way]
    want = truth_of_ranks(2)
    for seen in crew(2).run(asked_of_ranks, plan_of(exchange, prefetch=prefetch)):
        assert [apart(got, there) for got, there in zip(seen, want, strict=True)] == [[]] * (STEPS + 1)


def test_the_rows_of_one_rank_would_give_other_answers():
    """So an answer that left the other rank's out would show."""
    p = made(Reader).words.weight.detach()
    whole, halves = plainly(answers_for(p)), [plainly(answers_for(half)) for half in (p[::2], p[1::2])]
    alike = {name for name in whole if not any(apart({name: half[name]}, {name: whole[name]}) for half in halves)}
    assert alike == {"finite", "not a number", "how many zeros"}


def test_in_one_process_a_spread_table_answers_the_same():
    (seen,) = [asked_of_ranks(0, 1, plan_of("owned_rows", workers=1))]
    assert [apart(got, want) for got, want in zip(seen, truth_of_ranks(1), strict=True)] == [[]] * (STEPS + 1)


def spoilt(rank, world, plan):
    """A row of each kind, all of one rank."""
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    whole, found = made(Reader).state_dict(), {}
    for value in ("nan", "inf"):
        whole[TABLE][17] = float(value)
        model.load_state_dict(whole)
        p = model.words.weight.detach()
        found[value] = [str(one.item()) for one in (torch.isfinite(p).all(), p.max(), p.norm(), p.min())]
    whole[TABLE][:] = 0.25  # a histogram of no width
    model.load_state_dict(whole)
    p, there = model.words.weight.detach(), whole[TABLE]
    same = torch.equal(p.histc(6), there.histc(6)), torch.equal(p.histogram(6).hist, there.histogram(6).hist)
    face.close(run)
    return found, same


def test_what_is_not_finite_on_one_rank_is_seen_on_all(crew):
    for found, same in crew(2).run(spoilt, plan_of("owned_rows")):
        assert found["nan"] == ["False", "nan", "nan", "nan"]
        assert found["inf"][:3] == ["False", "inf", "inf"] and float(found["inf"][3]) < 0
        assert same == (True, True)


def said_by(attempt):
    try:
        attempt()
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "nothing"


PENALTIES = {
    "L2": lambda p: 0.1 * (p**2).sum(),
    "L1": lambda p: 0.1 * p.abs().sum(),
    "norm": lambda p: 0.1 * p.norm(),
    "all parameters": lambda p: 0.1 * sum(one.pow(2).sum() for one in [p, torch.ones(2, requires_grad=True)]),
}


def penalised(rank, world, plan):
    found = {}
    for name, penalty in PENALTIES.items():
        model = made(Reader)
        run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
        loss = word_loss(model, word_batch(rank, 0)) + penalty(model.words.weight)
        found[name] = said_by(loss.backward)
        run.run._give_up(RuntimeError("the loop ends"))
    return found


def test_a_penalty_on_a_spread_table_is_refused_at_the_first_backward_and_names_weight_decay(crew):
    for found in crew(2).run(penalised, plan_of("owned_rows")):
        for said in found.values():
            assert TABLE in said and "cannot be part of the loss" in said and "weight_decay" in said, found


class ReaderOfMany(Reader):
    """Its table is so long that even whole copies of it are cheapest by row."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20_000, WIDTH)


def loss_with_a_penalty(model, batch):
    return word_loss(model, batch) + 0.1 * (model.words.weight**2).sum()


def trained_with_a_penalty(rank, world, plan):
    model = made(ReaderOfMany)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), loss_with_a_penalty)
    for step in range(STEPS):
        face.step(run, [word_batch(rank, step)])
    face.close(run)
    return model.words.weight.detach()


def test_the_constraint_that_the_refusal_of_a_penalty_names_trains_it_as_one_process(crew):
    said = crew(2).run(penalised, plan_of("owned_rows"))[0]["L2"]
    (remedy,) = re.findall(r"constraints=(\{.*?\})", said)
    weights = crew(2).run(trained_with_a_penalty, plan_of(ast.literal_eval(remedy)[TABLE], kind=ReaderOfMany))
    truth = made(ReaderOfMany)
    steps = [[word_batch(worker, step) for worker in range(2)] for step in range(STEPS)]
    train(truth, OPTIMIZERS["sgd"](truth.parameters()), loss_with_a_penalty, steps)
    for weight in weights:
        torch.testing.assert_close(weight, truth.words.weight.detach(), rtol=1e-12, atol=1e-14)


def one_rank_alone(rank, world, plan):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    face.step(run, [word_batch(rank, 0)])
    if rank == 0:
        return said_by(lambda: model.words.weight.norm())
    return said_by(lambda: face.step(run, [word_batch(rank, 1)]))


def test_a_norm_that_one_rank_alone_asks_for_is_told_at_once_on_all(crew):
    for said in crew(2).run(one_rank_alone, plan_of("owned_rows")):
        assert "ranks [0] ask for a norm" in said and "the others run a backward" in said and "every rank" in said


OF_LOOKS = {
    "numpy": (lambda m: m.words.weight.detach().numpy(), "run.export()"),
    "numpy.asarray": (lambda m: numpy.asarray(m.words.weight), "run.export()"),
    "tolist": (lambda m: m.words.weight.tolist(), "run.export()"),
    "clone": (lambda m: m.words.weight.clone(), "run.export()"),
    "pickle of the model": (lambda m: pickle.dumps(m), "run.export()"),
    "torch.save of the state_dict": (lambda m: pickle.dumps(m.state_dict()), "run.export()"),
    "half": (lambda m: m.half(), "before attach"),
    "float": (lambda m: m.float(), "before attach"),
    "nn.init": (lambda m: nn.init.normal_(m.words.weight), "before attach"),
    "xavier": (lambda m: nn.init.xavier_uniform_(m.words.weight), "before attach"),
    "in place": (lambda m: m.words.weight.mul_(0.5), "before attach"),
    "a sum over a dimension": (lambda m: m.words.weight.sum(0), "run.export()"),
    "a norm of each row": (lambda m: m.words.weight.norm(dim=1), "run.export()"),
    "the variance of each row": (lambda m: m.words.weight.var(1), "run.export()"),
    "the spectral norm": (lambda m: torch.linalg.norm(m.words.weight, 2), "run.export()"),
    "the nuclear norm": (lambda m: m.words.weight.norm("nuc"), "run.export()"),
    "the median": (lambda m: m.words.weight.median(), "'words.weight': 'all_reduce'"),
    "values of a function": (lambda m: (m.words.weight**2).numpy(), "run.export()"),
    "a function with another tensor": (lambda m: m.words.weight * torch.ones(29, 4), "run.export()"),
    "deepcopy": (lambda m: copy.deepcopy(m), "run.ema(decay)"),
    "AveragedModel": (lambda m: AveragedModel(m), "run.ema(decay)"),
}


def looked_at(rank, world, plan):
    model = made(Reader)
    averaged = {count: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for count in range(2)}
    averaged[1].update_parameters(model)
    copied = copy.deepcopy(model)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    found = {name: said_by(lambda look=look: look(model)) for name, (look, _) in OF_LOOKS.items()}
    p, mine = model.words.weight, copied.words.weight.data
    copies = {
        "AveragedModel, first update": lambda: averaged[0].update_parameters(model),
        "AveragedModel, second update": lambda: averaged[1].update_parameters(model),
        "copy, lerp_": lambda: mine.lerp_(p.data, 0.1),
        "copy, mul_ and add_": lambda: mine.mul_(0.9).add_(p.data, alpha=0.1),
        "copy, copy_": lambda: mine.copy_(0.9 * mine + 0.1 * p.data),
        "copy, load_state_dict": lambda: copied.load_state_dict(model.state_dict()),
    }
    told = {name: said_by(update) for name, update in copies.items()}
    text = f"{p}"
    face.step(run, [word_batch(rank, 0)])  # nobody was asked for anything
    face.close(run)
    return found, told, text


@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows"])
def test_what_needs_a_whole_table_is_refused_by_name_with_a_remedy_that_fits(crew, exchange):
    for found, told, text in crew(2).run(looked_at, plan_of(exchange)):
        for name, (_, remedy) in OF_LOOKS.items():
            assert found[name].startswith(f"{TABLE}: ") and remedy in found[name].split("Remedy: ")[1], found[name]
        for name, said in told.items():
            assert TABLE in said and "run.ema(decay)" in said, (name, said)
        assert TABLE in text


def copied_after(rank, world, plan):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    face.step(run, [word_batch(rank, 0)])
    exported = face.export(run)
    face.close(run)
    plain = made(Reader)
    if exported is not None:
        plain.load_state_dict(exported["model"])
    same = all(
        torch.equal(one, other)
        for copied in (copy.deepcopy(model), AveragedModel(model).module, pickle.loads(pickle.dumps(model)))
        for one, other in zip(copied.parameters(), model.parameters(), strict=True)
    )
    return same, exported is None or torch.equal(copy.deepcopy(plain).words.weight, model.words.weight)


def test_a_closed_or_exported_model_can_be_copied_averaged_and_pickled(crew):
    assert crew(2).run(copied_after, plan_of("owned_rows")) == [(True, True)] * 2


def copied_while_open(rank, world, plan):
    """Every kind of copy between two steps, on one rank alone; the run goes on. What differs from the model."""
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    face.step(run, [word_batch(rank, 0)])
    unlike, before = [], {name: value.clone() for name, value in model.state_dict().items()}
    if rank == 0:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        averaged.update_parameters(model)
        copies = [copy.deepcopy(model), averaged.module, pickle.loads(pickle.dumps(model))]
        unlike = [
            (number, name)
            for number, one in enumerate(copies)
            for name, value in one.state_dict().items()
            if not torch.equal(value, before[name])
        ]
        for one in copies:  # a copy learns by itself, and asks nobody
            word_loss(one, word_batch(rank, 1)).backward()
    face.step(run, [word_batch(rank, 1)])
    face.close(run)
    return unlike, any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_without_spread_tables_is_copied_averaged_and_pickled_while_its_run_is_open(crew):
    assert crew(2).run(copied_while_open, plan_of("all_reduce")) == [([], True)] * 2
