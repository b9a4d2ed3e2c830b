"""The six cases where DDP with sparse gradients fails: all of them train here, and as one process does."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from armillary.reference.serial import train_step
from beside import adam, close, pair, sgd

V, D, STEPS = 11, 4, 3


class Words(nn.Module):
    """A table read through nn.Embedding, another by F.embedding on a bare parameter; `sparse` as DDP users set it."""

    def __init__(self, sparse, is_tied=False, softmax="sampled"):
        super().__init__()
        self.emb = nn.Embedding(V, D, sparse=sparse)
        self.bare = nn.Parameter(torch.randn(V, D))
        self.lin = nn.Linear(D, D)
        self.out = self.emb.weight if is_tied else nn.Parameter(torch.randn(V, D))
        self.sparse, self.softmax = sparse, softmax

    def forward(self, batch):
        ids, sampled, reads_bare = batch
        hidden = self.emb(ids)
        if reads_bare:
            hidden = hidden + functional.embedding(ids, self.bare, sparse=self.sparse)
        hidden = torch.tanh(self.lin(hidden))
        scores = hidden @ self.out[sampled].T if self.softmax == "sampled" else functional.linear(hidden, self.out)
        return functional.cross_entropy(scores, torch.zeros(len(ids), dtype=torch.int64))


def batch_of(worker, step, reads_bare=True):
    generator = torch.Generator().manual_seed(100 * step + worker)
    ids = torch.randint(0, V, (6,), generator=generator)
    return ids, torch.randint(0, V, (4,), generator=generator).unique(), reads_bare


def decayed(parameters):
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.05)


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


# name: (is_tied, softmax, optimizer, what runs before the step, whether rank 1 never reads `bare`)
CASES = {
    "tied weights, sampled softmax": (True, "sampled", sgd, None, False),
    "tied weights, full softmax": (True, "full", sgd, None, False),
    "functional embedding": (False, "sampled", sgd, None, False),
    "table unused on one rank": (False, "sampled", sgd, None, True),
    "one Adam over everything": (False, "sampled", adam, None, False),
    "SGD with weight decay": (False, "sampled", decayed, None, False),
    "clipping": (False, "sampled", sgd, clip, False),
}


def train_case(rank, workers, case, exchange):
    is_tied, softmax, optimizer_of, before_step, is_unread = CASES[case]
    names = ["bare"] if is_tied else ["bare", "emb.weight"]
    if softmax == "sampled":  # read whole by the full softmax: then only a dense exchange can carry it
        names.append("out")  # where tied, the one name of both
    tables = {} if exchange == "all_reduce" else dict.fromkeys(names, exchange)
    run, model, optimizer, reference, truth = pair(lambda: Words(True, is_tied, softmax), workers, tables, optimizer_of)
    reference.emb.sparse = reference.sparse = False  # in one process too, Adam refuses sparse gradients
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(rank, step, not (is_unread and rank == 1))).backward()
        if before_step:
            before_step(model)
        optimizer.step()
        batches = [batch_of(worker, step, not (is_unread and worker == 1)) for worker in range(workers)]
        train_step(reference, truth, batches, lambda m, batch: m(batch), before_step=before_step)
    return close(run, model, reference)


@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows", "all_reduce"])
@pytest.mark.parametrize("case", CASES)
def test_what_fails_in_ddp_trains_like_one_process(crew, case, exchange):
    assert crew(2).run(train_case, case, exchange) == [{}, {}]


def ddp_complains(rank, workers, case):
    _, _, optimizer_of, before_step, _ = CASES[case]
    torch.manual_seed(11)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.lin = nn.Embedding(V, D, sparse=True), nn.Linear(D, D)

        def forward(self, ids):
            return self.lin(self.emb(ids)).square().sum()

    model = DistributedDataParallel(Plain())
    optimizer = optimizer_of(model.parameters())
    model(batch_of(rank, 0)[0]).backward()
    try:
        if before_step:
            before_step(model)
        optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", ["one Adam over everything", "SGD with weight decay", "clipping"])
def test_ddp_with_sparse_gradients_still_fails(crew, case):
    """Those that raise on every rank after backward; the others may hang and are not tried."""
    for error in crew(2).run(ddp_complains, case):
        assert "sparse" in error.lower()
