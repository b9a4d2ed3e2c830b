"""Pairs that take turns answer as one all-to-all and one all-reduce would, whatever is large, small or under way."""

import threading
import time

import pytest
import torch

from armillary.plans import TURN_BYTES, AllReduce, AllToAll
from armillary.reference import lockstep
from armillary.transport import pairwise, transport
from armillary.transport.transport import Transport

LARGE = TURN_BYTES // 8 + 5  # rows of one float64 that make a piece wait for its turn


def rows_between(sender, receiver, kind):
    few = (sender + 2 * receiver) % 3
    some = LARGE + sender if (sender + receiver) % 2 else few
    return {"small": few, "large": LARGE + 3 * sender + receiver, "mixed": some, "one": LARGE * (sender == 1)}[kind]


def request_of(rank, world, kind, seed=0):
    send = tuple(rows_between(rank, other, kind) for other in range(world))
    receive = tuple(rows_between(other, rank, kind) for other in range(world))
    values = torch.rand(sum(send), generator=torch.Generator().manual_seed(97 * rank + seed), dtype=torch.float64)
    return AllToAll(values, send, receive)


KINDS = ["small", "large", "mixed", "one"]
SIZES = [1, 3, 4, 1000, 8 * LARGE, pairwise.LONG_BYTES // 8 - 1, pairwise.LONG_BYTES // 8]


def program(request):
    return (yield request)


def addend(rank, size):
    return torch.rand(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def carry(rank, world, late):
    """All requests at once, all of them waited for in another order, on ranks that come at different times."""
    before = progress_threads()
    one = Transport()
    time.sleep(0.2 * (rank == late))
    waits = [one.start(request_of(rank, world, kind, number), kind) for number, kind in enumerate(KINDS)]
    sums = [one.start(AllReduce(addend(rank, size)), "sum") for size in SIZES]
    found = [wait().clone() for wait in reversed(sums)][::-1], [wait().clone() for wait in reversed(waits)][::-1]
    one.close()
    return found, progress_threads() - before


def progress_threads():
    return sum(thread.name == "armillary-pairwise" for thread in threading.enumerate())


@pytest.mark.parametrize(("workers", "late"), [(2, 0), (3, 1), (4, 3)])
def test_answers_are_those_of_the_truth_whoever_is_late(crew, workers, late):
    carried = crew(workers).run(carry, late)
    for number, kind in enumerate(KINDS):
        truth, _ = lockstep.run([program(request_of(rank, workers, kind, number)) for rank in range(workers)])
        for rank, ((_, answers), _) in enumerate(carried):
            assert torch.equal(answers[number], truth[rank]), (kind, rank)
    for number, size in enumerate(SIZES):
        total = sum(addend(rank, size) for rank in range(workers))  # in rank order
        for (sums, _), _ in carried:
            assert torch.equal(sums[number], carried[0][0][0][number])  # the same on all ranks
            if workers > 2 and 8 * size < pairwise.LONG_BYTES:
                assert torch.equal(sums[number], total), size
            else:
                assert torch.allclose(sums[number], total, rtol=1e-14)
    assert [left for _, left in carried] == [0] * workers


def faulty(rank, world, fault, kind):
    """The answer when a turn is taken wrongly. No two faults see the same numbers: they may lie about in memory."""
    carry_right, send_right = pairwise._Turns.carry, pairwise._Turns._send

    kept = []

    def not_waited_for(self, is_lone):
        kept.append(self.begin())

    def half_a_piece(self, peers):
        for peer in peers:
            self.outgoing.pieces[peer][: len(self.outgoing.pieces[peer]) // 2].zero_()
        return send_right(self, peers)

    if fault == "not waited for":
        pairwise._Turns.carry = not_waited_for
    if fault == "half a piece" and rank == 1:
        pairwise._Turns._send = half_a_piece
    one = Transport()
    try:
        time.sleep(0.3 * (rank == 1))
        answer = one.start(request_of(rank, world, kind, len(fault)), "x")().clone()
        one.barrier()
    finally:
        pairwise._Turns.carry, pairwise._Turns._send = carry_right, send_right
    one.close()
    return answer


@pytest.mark.parametrize("fault", ["none", "not waited for", "half a piece"])
def test_a_turn_taken_wrongly_shows(crew, fault):
    truth, _ = lockstep.run([program(request_of(rank, 3, "large", len(fault))) for rank in range(3)])
    found = crew(3).run(faulty, fault, "large")
    assert all(torch.equal(one, other) for one, other in zip(found, truth, strict=True)) == (fault == "none")


def let_go(rank, world):
    """An answer nobody asks for is still carried to those who do, and nothing behind it is held up."""
    one = Transport()
    wait = one.start(request_of(rank, world, "mixed"), "mixed")
    if rank == 0:
        one.let_go(wait)
        del wait
    else:
        time.sleep(0.1)
        mine = wait()
    after = one.start(request_of(rank, world, "large"), "large")()
    one.close()
    return (mine if rank else None), after


def test_an_answer_may_be_let_go(crew):
    mixed, large = (
        lockstep.run([program(request_of(rank, 3, kind)) for rank in range(3)])[0] for kind in ("mixed", "large")
    )
    for rank, (mine, after) in enumerate(crew(3).run(let_go)):
        assert rank == 0 or torch.equal(mine, mixed[rank])
        assert torch.equal(after, large[rank])


def told_how_long(rank, world, turn_bytes):
    """How many threads a long request keeps waiting for its turns, and its answer."""
    before = progress_threads()
    one = Transport(turn_bytes=turn_bytes)
    answer = one.start(request_of(rank, world, "large"), "large")()
    seen = progress_threads() - before
    one.close()
    return seen, answer


@pytest.mark.parametrize(("turn_bytes", "seen"), [(8 * LARGE - 64, 1), (16 * LARGE, 0), (0, 1)])
def test_what_the_link_makes_short_takes_no_turns(crew, turn_bytes, seen):
    truth, _ = lockstep.run([program(request_of(rank, 3, "large")) for rank in range(3)])
    for rank, (threads, answer) in enumerate(crew(3).run(told_how_long, turn_bytes)):
        assert threads == seen
        assert torch.equal(answer, truth[rank])


class Unanswered:
    """A group whose messages come when they are let through."""

    def __init__(self):
        self.sent, self.through = [], threading.Event()

    def send(self, tensors, peer, tag):
        self.sent.append((tag, peer))
        return self

    def recv(self, *_):
        return self

    def wait(self):
        assert self.through.wait(30.0)


def soon(happens):
    until = time.monotonic() + 30.0
    while not happens() and time.monotonic() < until:
        time.sleep(0.001)
    return happens()


def test_turns_are_kept_by_a_lone_request_and_by_none_beside_another():
    one, group, request = pairwise.Pairwise(), Unanswered(), request_of(0, 6, "large")
    asked = request.tensor, request.send, request.receive, group, transport.RankInfo(0, 6)
    first, _ = one.all_to_all(*asked)
    assert soon(lambda: len(group.sent) == 3)
    time.sleep(0.05)
    assert group.sent == [(1, 1), (1, 2), (1, 3)]  # half of the ranks' turns, while nothing answers
    second, _ = one.all_to_all(*asked)
    assert group.sent[3:] == [(2, peer) for peer in (1, 2, 3, 4, 5)]
    group.through.set()
    first()
    second()
    assert soon(lambda: len(group.sent) == 10)
    group.through.clear()
    third, _ = one.all_to_all(*asked)
    assert soon(lambda: len(group.sent) == 13)
    time.sleep(0.05)
    assert group.sent[10:] == [(3, 1), (3, 2), (3, 3)], "the others are over"
    group.through.set()
    third()
    one.close()


def test_turns_are_kept_beside_another_where_order_is_asked_for():
    one, group, request = pairwise.Pairwise(), Unanswered(), request_of(0, 6, "large")
    one.keeps_order = True
    asked = request.tensor, request.send, request.receive, group, transport.RankInfo(0, 6)
    waits = [one.all_to_all(*asked)[0] for _ in range(2)]
    assert soon(lambda: len(group.sent) == 3)
    time.sleep(0.05)
    assert group.sent == [(1, 1), (1, 2), (1, 3)], "the second does not take the link from the first"
    group.through.set()
    for wait in waits:
        wait()
    assert group.sent == [(tag, peer) for tag in (1, 2) for peer in (1, 2, 3, 4, 5)]
    one.close()


class Broken:
    """A group whose messages fail when they are waited for."""

    def send(self, *_):
        return self

    recv = send

    def wait(self):
        raise RuntimeError("connection closed by peer")


@pytest.mark.parametrize("kind", ["small", "large"])
def test_an_error_is_raised_where_the_answer_is_waited_for(kind):
    one, request = pairwise.Pairwise(), request_of(0, 3, kind)
    wait, _ = one.all_to_all(request.tensor, request.send, request.receive, Broken(), transport.RankInfo(0, 3))
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait()
    one.close()
