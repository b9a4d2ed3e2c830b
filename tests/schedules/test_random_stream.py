"""Seeding by place: the numbers of torch.manual_seed, without what it costs and keeps."""

import torch

from armillary.schedules.random_streams import seed_streams


def test_a_seeded_stream_is_that_of_manual_seed():
    torch.manual_seed(2**62 + 7)
    wanted = torch.rand(5)
    seed_streams(2**62 + 7, torch.device("cpu"))
    assert torch.equal(torch.rand(5), wanted)


def test_seeding_leaves_nothing_behind_for_accelerators_that_are_not_in_use():
    before = [len(kind._queued_calls) for kind in (torch.cuda, torch.xpu, torch.mtia)]
    for seed in range(3):
        seed_streams(seed, torch.device("cpu"))
    assert [len(kind._queued_calls) for kind in (torch.cuda, torch.xpu, torch.mtia)] == before
