"""One call plans for the job and attaches; what the user wishes is in the plan."""

import copy

import torch
from torch import nn

from armillary.reference.serial import train_step
from armillary.session.parallelize import parallelize
from beside import differences

V, D = 300, 4


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lin = nn.Embedding(V, D), nn.Linear(D, 2)

    def forward(self, ids):
        return self.lin(torch.tanh(self.emb(ids))).square().mean()


def ids_of(worker, step):
    return torch.randint(0, V, (3 + worker,), generator=torch.Generator().manual_seed(100 * step + worker))


def loss(model, ids):
    return model(ids)


def train(rank, workers):
    torch.manual_seed(3)
    reference = Small().double()
    model = copy.deepcopy(reference)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, reference)]
    few = [ids_of(worker, 0) for worker in range(workers)]
    wishes = {"constraints": {"emb.weight": "owned_rows"}, "lazy": ["lin.*"], "mean": "weights"}
    run = parallelize(model, optimizers[0], few, loss, **wishes)
    for step in range(3):
        optimizers[0].zero_grad()
        run.weigh(3 + rank)
        loss(model, ids_of(rank, step)).backward()
        optimizers[0].step()
        batches = [ids_of(worker, step) for worker in range(workers)]
        train_step(reference, optimizers[1], batches, loss, weights=[3 + worker for worker in range(workers)])
    far = max(differences(run, model, reference).values())
    said = run.plan.mean, run.plan.group_of("emb.weight").exchange.name, run.plan.notes[0]
    run.finish()
    run.transport.close()
    return far, said


def test_wishes_are_in_the_plan_and_training_is_that_of_one_process(crew):
    for far, (mean, exchange, note) in crew(2).run(train):
        assert far < 1e-10
        assert (mean, exchange) == ("weights", "owned_rows")
        assert note == "lazy was allowed but is not used, since they travel whole: lin.bias, lin.weight"
