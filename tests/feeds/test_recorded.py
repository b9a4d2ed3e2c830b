"""Training from an ordered stream is training from the list of recorded snapshots."""

import numpy as np
import pytest
import torch
from recorded import (
    batches_of_all,
    batches_of_reservoir,
    listed,
    loss_of,
    model_of,
    optimizer_of,
    trained,
    trained_together,
)
from solver import snapshot

import armillary
from armillary import feeds

STEPS = 30


def assert_bitwise(found, truth):
    assert len(found) == len(truth) > 0
    for one, other in zip(found, truth, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("window", "fresh", "truth"),
    [
        (feeds.AllOnce(), None, lambda rows: batches_of_all(rows, 8)),
        (feeds.Reservoir(16), 3, lambda rows: batches_of_reservoir(rows, 16, 8, 3, seed=5)),
    ],
)
def test_one_rank_is_bitwise_the_list(store, solve, window, fresh, truth):
    for rank in range(2):
        solve(store, STEPS, rank=rank, ranks=2, keep=4, pause=0.001 * rank)
    with feeds.Stream(store, window=window, batch=8, fresh=fresh, ordered=True, seed=5, patience=20) as stream:
        found = trained(stream)
    assert_bitwise(found, trained(truth(listed(STEPS, range(2)))))


def trains_of_stream(rank, world, store, steps):
    """What `run.batches(stream)` makes of the model on each rank; reader and writer by rank."""
    torch.manual_seed(0)
    model = model_of(torch.float64)
    optimizer = optimizer_of(model)
    with (
        armillary.parallelize(model, optimizer) as run,
        feeds.Stream(store, window=feeds.AllOnce(), batch=4, ordered=True, reader=(rank, world), patience=20) as stream,
    ):
        for batch in run.batches(stream):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return [one.detach().numpy() for one in model.parameters()]


def test_two_ranks_are_the_lists_of_their_writers(crew, store, solve):
    for rank in range(2):
        solve(store, STEPS, rank=rank, ranks=2)
    found = crew(2).run(trains_of_stream, store, STEPS)
    truth = trained_together([batches_of_all(listed(STEPS, [rank]), 4) for rank in range(2)])
    for of_rank in found:
        for one, other in zip(of_rank, truth, strict=True):
            np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=1e-10)


def test_ranks_of_a_solver_that_are_uneven_are_told(files):
    with (
        feeds.Writer(files, rank=0, ranks=3) as first,
        feeds.Stream(files, window=feeds.AllOnce(), batch=2, reader=(0, 2), patience=0.3) as stream,
    ):
        first.put(0, snapshot(0, 0))
        with pytest.warns(UserWarning, match="3 writers are uneven among 2 readers"), pytest.raises(TimeoutError):
            list(stream)
    words = "reader 3 of 4 has none of 3 writers"
    with (
        feeds.Stream(files, window=feeds.AllOnce(), batch=2, reader=(3, 4)) as fourth,
        pytest.raises(ValueError, match=words),
    ):
        list(fourth)
