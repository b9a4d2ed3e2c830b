"""Initialising a table in row blocks draws the random stream of one process, bit for bit, on every owner."""

import pytest
import torch
from torch import nn

from armillary.exchanges import Ownership
from armillary.tables import meta_init as blank_table
from armillary.tables.meta_init import BlankTable


def xavier(weight):
    return nn.init.xavier_uniform_(weight) if weight.dim() > 1 else weight.data.uniform_(-1, 1)


def kaiming(weight):
    return nn.init.kaiming_normal_(weight) if weight.dim() > 1 else nn.init.normal_(weight, std=2.0)


def padded(weight):
    nn.init.normal_(weight, std=0.3)
    weight[3].fill_(0)
    weight[-1] = 7


def parts(weight):
    weight.normal_()
    weight[2:9].uniform_()
    weight[5:].normal_(1.0, 0.1)
    weight[-2].normal_()


def scaled(weight):
    weight.data.uniform_(-1, 1).mul_(0.3).div_(3).clamp_(-0.05, 0.05)


def copied(weight):
    weight.copy_(torch.randn(weight.shape, dtype=weight.dtype))
    weight[:4] = torch.arange(4.0).view(4, *[1] * (weight.dim() - 1)).expand(4, *weight.shape[1:]).to(weight.dtype)


def constant(weight):
    nn.init.constant_(weight, 2.0)
    nn.init.ones_(weight[4:6])


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blank_table, "BLOCK_BYTES", 256)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("initialise", [xavier, kaiming, padded, parts, scaled, copied, constant])
def test_blocks_of_rows_hold_what_one_process_would_have_drawn(initialise, dtype):
    for shape in [(37, 5), (16, 1), (11, 1), (101,), (33, 2, 3), (20, 40), (7, 2), (65, 1)]:
        for order in ("modulo", "hashed"):
            draws_as_one_process(initialise, shape, dtype, order)


def draws_as_one_process(initialise, shape, dtype, order):
    whole = torch.full(shape, float("nan"), dtype=dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        initialise(whole)
    after = torch.get_rng_state()
    ownership = Ownership(shape[0], (0, 2, 3), 4, order)
    for rank in range(4):
        blank = BlankTable.of("t", torch.empty(shape, dtype=dtype, device="meta"), ownership, rank)
        torch.manual_seed(1)
        with torch.no_grad():
            initialise(blank)
        assert torch.equal(torch.get_rng_state(), after)
        mine = whole[ownership.ids(rank)] if rank in ownership.owners else whole[:0]
        assert torch.equal(blank.shard, mine)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "initialise",
    [nn.init.trunc_normal_, nn.init.orthogonal_, lambda t: t + 1, lambda t: t.T.normal_(), lambda t: t[:, 0].zero_()],
)
def test_what_cannot_be_done_in_row_blocks_is_refused_by_name(initialise):
    blank = BlankTable.of("words.weight", torch.empty(37, 5, device="meta"), Ownership(37, (0, 1), 2), 0)
    with torch.no_grad(), pytest.raises(ValueError, match=r"words\.weight"):
        initialise(blank)


def test_rows_nobody_filled_are_not_numbers():
    blank = BlankTable.of("t", torch.empty(6, 2, device="meta"), Ownership(6, (0, 1), 2), 1)
    with torch.no_grad():
        blank[:4].zero_()
    assert blank.shard.isnan().any(1).tolist() == [False, False, True]
