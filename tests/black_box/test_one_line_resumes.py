"""One line that goes on from a checkpoint goes on under its plan at once, if that is what the line asks for."""

import pytest
import torch
from small_models import OPTIMIZERS, Reader, made, word_batch, word_loss

import armillary
from armillary import Choice

LOSSY = {"*": Choice.parse("top_k(keep=0.2)")}


def started(asked):
    model = made(Reader)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    return model, optimizer, armillary.parallelize(model, optimizer, **asked)


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        word_loss(model, word_batch(rank, step)).backward()
        optimizer.step()


def exchanges(run):
    return {group.exchange.name for group in run.plan.groups}


def resumed(rank, workers, folder, first, then):
    """What differs in any bit from a run that never stopped; by what it goes on right after loading."""
    model, optimizer, run = started(first)
    train(model, optimizer, rank, range(4))
    path = run.save(folder)
    train(model, optimizer, rank, range(4, 6))
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.close(gather=True)
    model, optimizer, run = started(then)
    run.load(path)
    goes_by = exchanges(run)
    train(model, optimizer, rank, range(4, 6))
    run.close(gather=True)
    return [name for name, p in model.named_parameters() if not torch.equal(p, want[name])], goes_by


def test_a_lossy_exchange_that_is_named_again_loses_nothing(crew, tmp_path):
    assert crew(2).run(resumed, tmp_path, {"constraints": LOSSY}, {"constraints": LOSSY}) == [([], {"top_k"})] * 2


@pytest.mark.filterwarnings("ignore:load")
def test_one_that_is_named_no_more_is_not_gone_on_with(crew, tmp_path):
    for _, goes_by in crew(2).run(resumed, tmp_path, {"constraints": LOSSY}, {}):
        assert "top_k" not in goes_by
