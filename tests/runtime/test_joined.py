"""Requests that travel as one are answered, and counted, as they would be alone."""

import time
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.plans import AllGather, AllReduce, AllToAll, Labelled
from armillary.reference import lockstep
from armillary.transport.requests import can_coalesce, coalesced, parted, shared_wait
from armillary.transport.transport import Transport

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


@st.composite
def several(draw):
    """By rank: a few requests of all kinds of rows."""
    world, count = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    kinds = [(draw(st.sampled_from(DTYPES)), draw(st.sampled_from([(), (3,), (2, 2), (0,)]))) for _ in range(count)]
    sizes = [[[draw(st.integers(0, 4)) for _ in range(world)] for _ in range(world)] for _ in range(count)]
    return [
        [
            AllToAll(
                torch.randint(0, 2, (sum(cut[rank]), *shape)).to(dtype),
                tuple(cut[rank]),
                tuple(one[rank] for one in cut),
            )
            for (dtype, shape), cut in zip(kinds, sizes, strict=True)
        ]
        for rank in range(world)
    ]


def alone(requests):
    answers = []
    for request in requests:
        answers.append((yield request))
    return answers


def together(requests):
    return parted(requests, (yield coalesced(requests)))


@settings(max_examples=60)
@given(several())
def test_joined_requests_are_answered_as_each_alone(requests):
    want, bytes_alone = lockstep.run([alone(mine) for mine in requests])
    found, bytes_together = lockstep.run([together(mine) for mine in requests])
    for mine, theirs in zip(found, want, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    assert bytes_together == bytes_alone


def test_only_all_to_alls_among_the_same_ranks_are_joined():
    one, other = AllToAll(torch.ones(2), (1, 1), (1, 1)), AllToAll(torch.ones(2, 3), (2, 0), (1, 1))
    assert can_coalesce([one, other])
    assert not can_coalesce([one]) and not can_coalesce([])
    assert not can_coalesce([one, AllToAll(torch.ones(2), (1, 1), (1, 1), "rail")])
    assert not can_coalesce([one, AllReduce(torch.ones(2))])
    assert not can_coalesce([AllGather(torch.ones(2)), AllGather(torch.ones(2))])


def carry(rank, world, check_order):
    ones = (1,) * world
    asked = [
        Labelled(AllToAll(torch.full((world, 5), float(rank)), ones, ones), "first"),
        Labelled(AllToAll(torch.arange(world), ones, ones), "second"),
        Labelled(AllToAll(torch.zeros(0, 2), (0,) * world, (0,) * world), "first"),
    ]
    one = Transport(1, check_order)
    one.recording = True
    before = one.counts["world"]
    waits = one.start_together(asked)
    made = one.counts["world"] - before
    answers = [wait() for wait in reversed(waits)][::-1]
    mixed = [wait() for wait in one.start_together([*asked[:1], Labelled(AllReduce(torch.ones(2)), "sum")])]
    records = one.take_records()
    one.close()
    return answers, mixed, made, [(record.group, record.sent_bytes, record.seconds) for record in records]


@pytest.mark.parametrize("check_order", [False, True])
def test_one_request_is_made_and_each_part_recorded(crew, check_order):
    world = 3
    for rank, (answers, mixed, made, records) in enumerate(crew(world).run(carry, check_order)):
        assert made == 1
        assert torch.equal(answers[0], torch.arange(world).float().unsqueeze(1).expand(world, 5))
        assert answers[1].tolist() == [rank] * world
        assert answers[2].shape == (0, 2)
        assert torch.equal(mixed[0], answers[0]) and mixed[1].tolist() == [world] * 2
        assert [record[:2] for record in records[:3]] == [("first", 2 * 20.0), ("second", 2 * 8.0), ("first", 0.0)]
        assert records[0][2] == pytest.approx(records[1][2] * 20 / 8)
        assert [record[0] for record in records[3:]] == ["first", "sum"]


def wait_twice(rank, world):
    """One part is let go, so another thread waits for it; the rank itself waits for the other, before it has come."""
    ones = (1,) * world
    asked = [Labelled(AllToAll(torch.full((world, 2), float(rank)), ones, ones), name) for name in ("first", "second")]
    one = Transport()
    if rank:
        time.sleep(0.5)
    first, second = one.start_together(asked)
    one.let_go(first)
    time.sleep(0.1)  # the other thread waits now
    answer = second()
    one.close()
    return answer[:, 0].tolist()


def test_a_part_may_be_let_go_while_another_is_waited_for(crew):
    """A second wait for one of gloo's receives would never end: of a loop that is left, one look-up is let go, another
    waited for."""
    assert crew(2).run(wait_twice) == [[0.0, 1.0]] * 2


def test_an_error_of_a_shared_wait_reaches_everyone_who_waits():
    entered = []

    def broken():
        entered.append(0)
        raise RuntimeError("a peer is gone")

    wait = shared_wait(broken, nullcontext)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a peer is gone"):
            wait()
    assert entered == [0]
