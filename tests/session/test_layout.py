"""Parameters that do not lie in memory row by row train as in one process, by fused optimizers too."""

import pytest
import torch
from torch import nn

from armillary.reference.serial import train_step
from armillary.stages.optimizer_step import options_of, step_with
from beside import close, pair

V, D = 11, 4
OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "fused": lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True),
    "foreach": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, foreach=True),
}


class Odd(nn.Module):
    """A transposed matrix, a channels-last kernel, a number, an empty tensor, a transposed table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(D, V).t())
        self.matrix = nn.Parameter(torch.randn(2, D).t())
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.number, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0))

    def forward(self, ids):
        image = ids.to(self.matrix.dtype).view(1, 2, 4, 4)
        hidden = self.table[ids] @ self.matrix * self.number
        return hidden.square().sum() + self.empty.sum() + self.conv(image).square().mean()


def batch_of(worker, step):
    return torch.randint(0, V, (32,), generator=torch.Generator().manual_seed(100 * step + worker))


def train(rank, workers, optimizer_name, exchange):
    tables = {"table": exchange} if exchange else {}
    run, model, optimizer, reference, truth = pair(Odd, workers, tables, OPTIMIZERS[optimizer_name])
    for step in range(3):
        optimizer.zero_grad()
        model(batch_of(rank, step)).backward()
        optimizer.step()
        batches = [batch_of(worker, step) for worker in range(workers)]
        train_step(reference, truth, batches, lambda m, batch: m(batch))
    return close(run, model, reference)


@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows", ""])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_layout_trains_as_in_one_process(crew, optimizer, exchange):
    assert crew(2).run(train, optimizer, exchange) == [{}, {}]


def test_a_delayed_step_takes_a_gradient_of_any_layout():
    torch.manual_seed(0)
    mine, true = (nn.Parameter(torch.arange(6.0).view(2, 3).t()) for _ in range(2))
    steps = [torch.optim.Adam([one], lr=0.1, fused=True) for one in (mine, true)]
    for _ in range(2):
        gradient = torch.randn(3, 2)
        step_with(steps[0], {mine: gradient}, options_of(steps[0]))
        true.grad = torch.empty_like(true).copy_(gradient)
        steps[1].step()
    assert torch.equal(mine, true)
