"""The payload of a request, counted by hand, and by who receives what."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armillary.plans import AllGather, AllReduce, AllToAll, sent_bytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_whole_tensors_cost_what_their_algorithms_send(dtype, ranks):
    tensor = torch.zeros(6, 2, dtype=dtype)
    assert sent_bytes(AllReduce(tensor), ranks, 0) == pytest.approx(2 * (ranks - 1) / ranks * 12 * dtype.itemsize)
    assert sent_bytes(AllGather(tensor), ranks, 0) == (ranks - 1) * 12 * dtype.itemsize


MATRICES = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=n, max_size=n)
)


@given(splits=MATRICES)
def test_what_leaves_in_an_all_to_all_is_what_the_others_receive(splits):
    ranks = range(len(splits))
    requests = [
        AllToAll(torch.zeros(sum(splits[r]), 3), tuple(splits[r]), tuple(splits[q][r] for q in ranks)) for r in ranks
    ]
    sent = sum(sent_bytes(request, len(splits), rank) for rank, request in enumerate(requests))
    received = sum(request.receive[q] for rank, request in enumerate(requests) for q in ranks if q != rank)
    assert sent == received * 3 * 4
