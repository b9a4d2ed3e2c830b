"""Rows are dealt once each, evenly, and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armillary.exchanges import Ownership, owners_among


@given(rows=st.integers(1, 200), owners=st.integers(1, 9), order=st.sampled_from(["modulo", "hashed"]))
def test_every_row_has_one_owner_and_comes_back(rows, owners, order):
    ownership = Ownership(rows, tuple(range(owners)), owners, order)
    dealt = torch.cat([ownership.ids(rank) for rank in range(owners)])
    assert sorted(dealt.tolist()) == list(range(rows))
    sizes = [ownership.shard_rows(rank) for rank in range(owners)]
    assert sizes == [len(ownership.ids(rank)) for rank in range(owners)]
    assert max(sizes) <= ownership.capacity
    assert order == "hashed" or max(sizes) - min(sizes) <= 1
    keys = ownership.keys(torch.arange(rows)).sort().values
    assert ownership.counts(keys) == sizes
    assert ownership.ids_of(ownership.keys(torch.arange(rows))).tolist() == list(range(rows))
    for rank in range(owners):
        local = ownership.keys(ownership.ids(rank)) - (rank * ownership.capacity if owners > 1 else 0)
        assert local.tolist() == list(range(sizes[rank]))


@pytest.mark.parametrize("order", ["modulo", "hashed"])
def test_a_vocabulary_sorted_by_frequency_is_balanced(order):
    ids = (40_000 ** torch.rand(2_000, generator=torch.Generator().manual_seed(0))).long().unique()
    ownership = Ownership(40_000, tuple(range(8)), 8, order)
    counts = ownership.counts(ownership.keys(ids).sort().values)
    blocks = torch.bincount(ids // 5_000, minlength=8)
    assert max(counts) < 1.2 * len(ids) / 8
    assert blocks.max() > 4 * len(ids) / 8, "contiguous blocks must be the bad case this test is about"


def test_hashing_balances_ids_whose_stride_is_the_number_of_owners():
    ids = torch.arange(0, 4000, 8)
    modulo, hashed = (Ownership(4000, tuple(range(8)), 8, order) for order in ("modulo", "hashed"))
    assert max(modulo.counts(modulo.keys(ids).sort().values)) == 500
    assert max(hashed.counts(hashed.keys(ids).sort().values)) < 100


def test_owners_are_spread_over_nodes_first():
    assert owners_among(2, 8, 4) == (0, 4)
    assert owners_among(3, 8, 4) == (0, 1, 4)
    with pytest.raises(ValueError, match="9 owners among 8 workers"):
        owners_among(9, 8, 4)
