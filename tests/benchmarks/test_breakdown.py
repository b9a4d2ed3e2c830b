"""The breakdown's table sets every mode beside training alone of the same round; stand-ins have the right shapes."""

import pytest
import torch
from benchmarks.breakdown.run import SAID, table
from benchmarks.breakdown.stand_in import SHORT, carry_only

from armillary.exchanges import RankInfo
from armillary.plans import AllGather, AllReduce, AllToAll
from armillary.transport.transport import Transport


def turns(walls):
    rest = {"processor": 10.0, "softirq": 0.0, "idle": 0.0}
    return [{"mode": mode, "wall": wall * (1 + place)} | rest for wall in walls for place, mode in enumerate(SAID)]


def test_ratios_are_of_the_same_round():
    rows = table(turns([100.0, 200.0, 900.0]))
    assert len(rows) == 2 + len(SAID)
    assert [row.split("|")[3].strip() for row in rows[2:]] == [
        "",
        *(f"{n:.2f} ({n:.2f}-{n:.2f})" for n in (2, 3, 4, 5)),
    ]


@pytest.fixture
def carried(monkeypatch):
    """Requests that reach the transport, which answers none of them."""
    seen = []

    def start(_, request, label, parts=()):
        seen.append(request)
        return lambda: None

    monkeypatch.setattr(Transport, "start", start)
    return seen


def transport_that_carries(what):
    transport = object.__new__(Transport)
    transport.place = RankInfo(0, 2)
    carry_only(transport, what)
    return transport


ROUND = AllToAll(torch.ones(2, 3), (1, 1), (1, 1))
ROWS = AllToAll(torch.ones(3, 4), (1, 2), (5, 0))
REDUCE = AllReduce(torch.ones(1000))
GATHER = AllGather(torch.ones(700, 4))


@pytest.mark.parametrize(("what", "expected"), [("nothing", []), ("rounds", [ROUND])])
def test_what_is_left_out_never_reaches_the_transport(carried, what, expected):
    transport = transport_that_carries(what)
    answers = [transport.start(request, "any")() for request in (ROUND, ROWS, REDUCE, GATHER)]
    assert carried == expected
    assert [tuple(answer.shape) for answer in answers] == [(2, 3), (5, 4), (1000,), (2, 700, 4)]
    assert torch.equal(answers[0], ROUND.tensor) and not answers[1].any()


def test_messages_are_as_many_and_short(carried):
    transport = transport_that_carries("messages")
    for request in (ROUND, ROWS, REDUCE, GATHER):
        transport.start(request, "any")()
    assert carried[0] is ROUND
    assert carried[1].send == carried[1].receive == (SHORT, SHORT)
    assert isinstance(carried[2], AllReduce) and carried[2].tensor.nbytes < REDUCE.tensor.nbytes
    assert isinstance(carried[3], AllGather) and carried[3].tensor.nbytes < GATHER.tensor.nbytes
