"""The truth, held against arithmetic by hand: it must not need trust in anything of ours."""

import torch
from torch import nn

from armillary.reference.serial import keep_untouched_rows, train_step


class Line(nn.Module):
    """loss = weight * x (+ extra where the batch says so)"""

    def __init__(self):
        super().__init__()
        self.weight, self.extra, self.never = (nn.Parameter(torch.tensor(value)) for value in (1.0, 2.0, 3.0))

    def forward(self, batch):
        x, uses_extra = batch
        return self.weight * x + (self.extra * x if uses_extra else 0)


def call(model, batch):
    return model(batch)


def stepped(batches, **options):
    model = Line()
    losses = train_step(model, torch.optim.SGD(model.parameters(), lr=0.5), batches, call, **options)
    return model, losses


def test_gradients_are_averaged_over_workers():
    model, losses = stepped([(2.0, False), (4.0, False), (6.0, False)])
    assert losses == [2.0, 4.0, 6.0]
    assert model.weight.grad.item() == 4.0 and model.weight.item() == 1 - 0.5 * 4


def test_unused_somewhere_counts_as_zero_and_unused_everywhere_is_none():
    model, _ = stepped([(2.0, True), (4.0, False)])
    assert model.extra.grad.item() == (2 + 0) / 2 and model.never.grad is None and model.never.item() == 3


def test_weights_make_a_weighted_mean_and_a_weight_of_zero_takes_no_part():
    model, _ = stepped([(2.0, True), (4.0, False), (9.0, True)], weights=[1, 3, 0])
    assert model.weight.grad.item() == (1 * 2 + 3 * 4) / 4
    assert model.extra.grad.item() == 2 / 4


def test_clipping_comes_after_the_mean():
    model, _ = stepped([(2.0, False), (4.0, False)], before_step=lambda m: nn.utils.clip_grad_value_(m.parameters(), 1))
    assert model.weight.item() == 0.5


def test_gradients_of_before_do_not_count():
    model = Line()
    model.weight.grad = torch.tensor(100.0)
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.5), [(2.0, False)], call)
    assert model.weight.item() == 0


def test_sparse_gradients_are_averaged_as_dense_ones():
    tables = [nn.Embedding(4, 2, sparse=sparse) for sparse in (True, False)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        batches = [torch.tensor([0, 0, 1]), torch.tensor([1])]
        train_step(table, torch.optim.Adam(table.parameters()), batches, lambda m, ids: m(ids).sum())
    assert torch.equal(tables[0].weight, tables[1].weight)
    assert tables[0].weight.grad[:, 0].tolist() == [1, 1, 0, 0]


def test_lazy_rows_keep_weight_and_state_where_there_is_no_gradient():
    table = nn.Embedding(3, 2)
    optimizer = torch.optim.Adam(table.parameters(), lr=0.1)
    seen = []
    for ids in ([0, 1], [1]):
        before = table.weight.detach().clone()

        def step(ids=ids):
            train_step(table, optimizer, [torch.tensor(ids)], lambda m, batch: m(batch).sum())

        keep_untouched_rows(table, optimizer, ["weight"], step)
        seen.append(((table.weight - before).abs().sum(1) > 0).tolist())
        moments = optimizer.state[table.weight]["exp_avg"][:, 0]
    assert seen == [[True, True, False], [False, True, False]]
    torch.testing.assert_close(moments, torch.tensor([0.1, 0.19, 0.0]))
