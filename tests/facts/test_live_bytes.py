"""Tensors alive are counted to the byte; a whole step's against the allocator, which torch's profiler watches."""

import time

import pytest
import torch
from torch import nn

from armillary.models.preserved_state import LiveBytes
from armillary.profiler.probe import step_bytes

MIB = 1 << 20


def test_what_is_made_counts_until_its_last_view_goes():
    with LiveBytes() as live:
        one = torch.zeros(1000)
        view = one.view(10, 100)
        assert live.now_bytes == 4000
        del one
        assert live.now_bytes == 4000
    del view  # outside it is followed still
    assert (live.now_bytes, live.most_bytes) == (0, 4000)


def test_what_was_there_before_does_not_count_whoever_writes_to_it():
    before = torch.zeros(1000)
    with LiveBytes() as live:
        before.add_(1)
        torch.add(before, 1, out=before)
        assert live.most_bytes == 4000 - 4000
    with LiveBytes() as live:
        before + before
    assert (live.now_bytes, live.most_bytes) == (0, 4000)


def test_what_a_mark_finds_is_no_part_of_what_is_added():
    live = LiveBytes()
    with live:
        kept = torch.zeros(1000)
        live.mark()
        torch.zeros(500)
    assert (live.now_bytes, live.added_bytes) == (kept.nbytes, 2000)


class Reader(nn.Module):
    """A table read by row, and layers whose kernels need nothing for themselves (a convolution's do)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5000, 64)
        self.layers = nn.Sequential(nn.Linear(64, 384), nn.Tanh(), nn.Linear(384, 64))

    def forward(self, ids):
        return self.layers(self.table(ids)).softmax(-1).square().mean()


def loss(model, ids):
    return model(ids)


def allocated(step):
    """The most that the allocator gave out at once in the second of two steps, beyond what the first left."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watch:
        step()
        between = time.time_ns()
        step()
    events = watch.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    base = sum(nbytes for when, nbytes in changes if when < between)
    now, most = base, base
    for when, nbytes in changes:
        if when >= between:
            now += nbytes
            most = max(most, now)
    return most - base


def test_a_step_holds_as_much_as_the_allocator_gave_out():
    torch.manual_seed(0)
    model, ids = Reader(), torch.randint(5000, (32, 20))

    def step():
        model(ids).backward()
        model.zero_grad()

    live = LiveBytes()
    step()
    with live:
        step()
        live.mark()
        step()
    given = allocated(step)
    assert given > 2 * MIB
    assert live.added_bytes == pytest.approx(given, rel=0.01)


def test_a_profile_finds_it_without_the_gradients_that_have_a_place_of_their_own():
    torch.manual_seed(0)
    model, ids = Reader(), torch.randint(5000, (32, 20))
    whole = model.table.weight.nbytes  # the gradient of all rows, which an exchange by row never makes
    by_row, by_whole = (step_bytes(model, ids, loss, tables) for tables in (["table.weight"], []))
    kept = 32 * 20 * 4 * (64 + 384 + 64)  # of every layer what comes out
    assert kept < by_row < 3 * kept
    assert by_whole >= whole  # torch makes it beside what is still there
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
