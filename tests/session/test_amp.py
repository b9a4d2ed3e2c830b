"""Mixed precision: autocast trains as in one process; a gradient that overflows on one rank makes every rank skip."""

import pytest
import torch
from torch import nn

from armillary.reference.serial import train_step
from beside import close, pair, sgd

V, D, STEPS = 11, 4, 5
INF = float("inf")


class Scored(nn.Module):
    """`blow` names the parameter whose gradient the batch makes infinite."""

    def __init__(self):
        super().__init__()
        self.emb, self.lin = nn.Embedding(V, D), nn.Linear(D, 3)

    def forward(self, batch):
        ids, blow = batch
        loss = nn.functional.cross_entropy(torch.tanh(self.lin(self.emb(ids))), ids % 3)
        if blow == "emb":
            loss = loss + (self.emb(ids[:1]) * INF).sum()
        if blow == "lin":
            loss = loss + (self.lin.weight * INF).sum()
        return loss


def batch_of(worker, step, blow=""):
    generator = torch.Generator().manual_seed(100 * step + worker)
    return torch.randint(0, V, (6,), generator=generator), blow


def train_under_autocast(rank, workers, exchange):
    run, model, optimizer, reference, truth = pair(Scored, workers, {"emb.weight": exchange}, dtype=torch.float32)
    start = {name: p.detach().clone() for name, p in reference.named_parameters()}

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch)

    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, batch_of(rank, step)).backward()
        optimizer.step()
        train_step(reference, truth, [batch_of(worker, step) for worker in range(workers)], loss)
    run._engine.finish()
    far = {}
    for name, want in reference.named_parameters():
        got, mine, began = model.get_parameter(name), want, start[name]
        if name in run._engine.tables:
            ids = run._engine.tables[name].ownership.ids(rank) if run._engine.tables[name].is_pulled else slice(None)
            got, mine, began = run._engine.tables[name].shard, want[ids], began[ids]
        far[name] = float((got - mine).norm() / (mine - began).norm())
    run.close()
    return far


@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows"])
def test_autocast_trains_like_one_process_to_the_rounding_of_bfloat16(crew, exchange):
    """Sums in another order differ in the last bit of float32, which may turn one rounding of an activation or gradient
    to bfloat16: an error of eps in it, so of at most about eps in what was learned, the distance from the start."""
    eps = torch.finfo(torch.bfloat16).eps
    for far in crew(2).run(train_under_autocast, exchange):
        assert all(value < eps for value in far.values()), far


class Scaled:
    """An optimizer as a scaled loop steps it."""

    def __init__(self, optimizer, scaler, model, clips):
        self.optimizer, self.scaler, self.model, self.clips = optimizer, scaler, model, clips
        self.zero_grad = optimizer.zero_grad

    def step(self):
        if self.clips:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.scaler.step(self.optimizer)
        self.scaler.update()


OPTIMIZERS = {
    "sgd": sgd,
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adam_fused": lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True),
}


def scaler_of():
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def train_scaled(rank, workers, exchange, optimizer_name, blow, clips):
    scaler, true_scaler = scaler_of(), scaler_of()
    run, model, optimizer, reference, truth = pair(
        Scored, workers, {"emb.weight": exchange}, OPTIMIZERS[optimizer_name], scaler=scaler
    )
    mine, its = Scaled(optimizer, scaler, model, clips), Scaled(truth, true_scaler, reference, clips)
    scales = []
    for step in range(STEPS):
        batches = [batch_of(worker, step, blow if step == 2 and worker == 1 else "") for worker in range(workers)]
        mine.zero_grad()
        scaler.scale(model(batches[rank])).backward()
        mine.step()
        train_step(reference, its, batches, lambda m, batch: true_scaler.scale(m(batch)))
        scales.append((scaler.get_scale(), true_scaler.get_scale()))
    return close(run, model, reference), scales


@pytest.mark.parametrize("blow", ["emb", "lin"])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("exchange", "optimizer"),
    [("owned_rows", "sgd"), ("owned_rows", "adam"), ("owned_rows", "adam_fused"), ("gather_rows", "adam")],
)
def test_an_overflow_on_one_rank_makes_every_rank_skip(crew, exchange, optimizer, blow, clips):
    for far, scales in crew(2).run(train_scaled, exchange, optimizer, blow, clips):
        assert far == {}
        assert all(mine == true for mine, true in scales)
        values = [mine for mine, _ in scales]
        assert values[2] < values[1], "the overflow must be met, or this test shows nothing"


def train_without_telling(rank, workers):
    """Row 0 belongs to rank 0: only there the overflow is seen."""
    run, model, optimizer, _, _ = pair(Scored, workers, {"emb.weight": "owned_rows"})
    scaler = scaler_of()
    try:
        for step in range(3):
            optimizer.zero_grad()
            batch = torch.zeros(4, dtype=torch.int64), "emb" if step == 1 else ""
            scaler.scale(model(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    except RuntimeError as error:
        run.__exit__(type(error), error, None)
        return step, str(error)
    return None


def test_a_scaler_that_attach_was_not_given_is_found_out(crew):
    for step, error in crew(2).run(train_without_telling):
        assert step == 2
        assert "different numbers of optimizer steps [1, 2]" in error
        assert "pass it to parallelize or attach (scaler=scaler)" in error
