"""A table that is looked up but does not reach the loss keeps `.grad = None`, as in one process: neither momentum nor
decay moves it; where some rank learns from it, the others count as zero."""

import pytest
import torch
from torch import nn

from armillary.reference.serial import train_step
from beside import adam, close, differences, pair, sgd

V, D, STEPS = 11, 4, 5
EXCHANGES = ["owned_rows", "owned_rows_by_node", "gather_rows"]
OPTIMIZERS = {
    "momentum and decay": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.05),
    "adam": adam,
    "sgd": sgd,
}


class Shy(nn.Module):
    """Both tables are always read; what is read of `shy` reaches the loss only if the batch says so."""

    def __init__(self):
        super().__init__()
        self.shy, self.emb, self.lin = nn.Embedding(V, D), nn.Embedding(V, D), nn.Linear(D, 2)

    def forward(self, batch):
        ids, is_used = batch
        extra = self.shy(ids)
        hidden = self.emb(ids) + (extra if is_used else 0.0)
        return self.lin(torch.tanh(hidden)).square().sum()


def users_of(step, who):
    """At first all ranks, so that there is momentum; then those the case names."""
    return {"some": {0}, "none": set(), "another each step": {step % 2}}[who] if step else {0, 1}


def batch_of(worker, step, who):
    ids = torch.randint(0, V, (5,), generator=torch.Generator().manual_seed(100 * step + worker))
    return ids, worker in users_of(step, who)


def train(rank, workers, exchange, optimizer_name, who):
    tables = dict.fromkeys(("shy.weight", "emb.weight"), exchange)
    run, model, optimizer, reference, truth = pair(Shy, workers, tables, OPTIMIZERS[optimizer_name])
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(rank, step, who)).backward()
        assert (model.shy.weight.grad is None) == (not users_of(step, who))
        assert (run._engine.tables["shy.weight"].parameter.grad is None) == (not users_of(step, who))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        batches = [batch_of(worker, step, who) for worker in range(workers)]
        clip = lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5)  # noqa: E731
        train_step(reference, truth, batches, lambda m, batch: m(batch), before_step=clip)
    return close(run, model, reference)


@pytest.mark.parametrize("who", ["some", "none", "another each step"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_table_that_does_not_reach_the_loss_moves_as_in_one_process(crew, exchange, optimizer, who):
    assert crew(2).run(train, exchange, optimizer, who) == [{}, {}]


class Towers(nn.Module):
    """More tables than one header speaks of; each batch learns from a few."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(3, 2) for _ in range(60)])

    def forward(self, batch):
        read = [table(torch.tensor([1])) for table in self.tables]
        return sum((read[place] ** 2).sum() for place in batch)


def train_towers(rank, workers):
    tables = {f"tables.{place}.weight": "owned_rows" for place in range(60)}
    run, model, optimizer, reference, truth = pair(Towers, workers, tables, OPTIMIZERS["momentum and decay"])
    for parts in ([range(60), range(60)], [[0, 51], [52]], [[59], [3, 59]]):
        optimizer.zero_grad()
        model(parts[rank]).backward()
        optimizer.step()
        train_step(reference, truth, parts, lambda m, batch: m(batch))
    return close(run, model, reference)


def test_of_many_tables_each_rank_knows_which_are_learned_from(crew):
    assert crew(2).run(train_towers) == [{}, {}]


def accumulate(rank, workers, exchange):
    """A first, unexchanged backward learns from the table, the second does not."""
    tables = dict.fromkeys(("shy.weight", "emb.weight"), exchange)
    run, model, optimizer, reference, truth = pair(Shy, workers, tables, OPTIMIZERS["momentum and decay"])
    ids, more = batch_of(rank, 0, "none")[0], batch_of(rank, 1, "none")[0]
    with run.no_sync():
        model((ids, rank == 0)).backward()
    model((more, False)).backward()
    optimizer.step()

    def both(m, worker):
        return m((batch_of(worker, 0, "none")[0], worker == 0)) + m((batch_of(worker, 1, "none")[0], False))

    train_step(reference, truth, range(workers), both)
    far = differences(run, model, reference)
    run._engine.finish()
    return far


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_was_learned_without_an_exchange_counts(crew, exchange):
    for far in crew(2).run(accumulate, exchange):
        assert max(far.values()) <= 1e-12
