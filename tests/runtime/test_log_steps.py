"""What is passed on by others arrives as if it had been sent directly, and in fewer messages."""

import time

import pytest
import torch

from armillary.facts.collectives import AllReduce, AllToAll
from armillary.reference import lockstep
from armillary.runtime import log_steps, pairwise
from armillary.runtime.transport import Transport

WIDTHS = [1, 7, pairwise.SHORT_BYTES // 8, pairwise.SHORT_BYTES // 8 + 1]  # the last is sent directly


def request_of(rank, world, width):
    rows = torch.rand(world, width, generator=torch.Generator().manual_seed(31 * rank + width), dtype=torch.float64)
    return AllToAll(rows, (1,) * world, (1,) * world, is_even=True)


def program(request):
    return (yield request)


class Counting:
    """A gloo group that counts what is sent."""

    def __init__(self, group):
        self.group, self.sent = group, 0

    def send(self, *message):
        self.sent += 1
        return self.group.send(*message)

    def recv(self, *message):
        return self.group.recv(*message)


def told(rank, world, late):
    """Answers by width; one rank comes late, and another request is under way."""
    one, found = Transport(), {}
    for width in WIDTHS:
        time.sleep(0.1 * (rank == late))
        beside = one.start(AllReduce(torch.ones(1000)), "beside")
        found[width] = one.start(request_of(rank, world, width), "round")().clone()
        assert torch.equal(beside(), torch.full((1000,), float(world)))
    one.close()
    return found


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_every_rank_hears_what_each_said_to_it(crew, workers):
    found = crew(workers).run(told, workers - 1)
    for width in WIDTHS:
        truth, _ = lockstep.run([program(request_of(rank, workers, width)) for rank in range(workers)])
        for rank, of_rank in enumerate(found):
            assert torch.equal(of_rank[width], truth[rank]), (width, rank)


def counted(rank, world, request):
    one = Transport()
    group, place = one.groups["world", "cpu"]
    counting = Counting(group)
    one.groups["world", "cpu"] = (counting, place)
    one.start(request, "x")()
    one.groups["world", "cpu"] = (group, place)
    one.close()
    return counting.sent


@pytest.mark.parametrize(("workers", "of_all_to_all", "of_all_reduce"), [(4, 2, 4), (5, 3, 8), (8, 3, 6)])
def test_messages_grow_as_the_logarithm_of_the_ranks(crew, workers, of_all_to_all, of_all_reduce):
    """An all-reduce of five, which cannot be halved, goes directly."""
    together = crew(workers)
    assert together.run(counted, request_of(0, workers, 7)) == [of_all_to_all] * workers
    assert together.run(counted, AllReduce(torch.ones(4096))) == [of_all_reduce] * workers


def faulty(rank, world, fault):
    """The answers to both where something is passed on wrongly."""
    moving = log_steps._moving
    if fault == "a block stays":
        log_steps._moving = lambda count: (*moving(count)[:-1], moving(count)[-1][:-1])
    one = Transport()
    try:
        answer = one.start(request_of(rank, world, 7), "round")().clone()
        total = one.start(AllReduce(torch.full((9,), float(rank + 1))), "sum")().clone()
    finally:
        log_steps._moving = moving
    one.close()
    return answer, total


@pytest.mark.parametrize("fault", ["none", "a block stays"])
def test_a_block_left_behind_shows(crew, fault):
    truth, _ = lockstep.run([program(request_of(rank, 4, 7)) for rank in range(4)])
    found = crew(4).run(faulty, fault)
    right = [torch.equal(answer, mine) for (answer, _), mine in zip(found, truth, strict=True)]
    assert all(right) == (fault == "none")
    assert all(torch.equal(total, torch.full((9,), 10.0)) for _, total in found)


def test_uneven_rows_cannot_be_called_even():
    with pytest.raises(ValueError, match="a row for each"):
        AllToAll(torch.zeros(3, 1), (1, 2), (1, 2), is_even=True)
