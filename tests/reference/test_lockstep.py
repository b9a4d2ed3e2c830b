"""Lockstep means what the requests say, and refuses what would hang or mix up a real job."""

import pytest
import torch

from armillary.plans import AllGather, AllReduce, AllToAll
from armillary.reference.lockstep import OutOfStep, run


def asking(*requests):
    answers = []
    for request in requests:
        answers.append((yield request))
    return answers


def rank_tensor(rank):
    return torch.tensor([rank, 10.0 * rank])


def test_every_request_means_what_it_says():
    programs = [
        asking(
            AllReduce(rank_tensor(rank)),
            AllGather(rank_tensor(rank)),
            AllToAll(torch.tensor([rank, 10 * rank, 100 * rank]), ((1, 2), (2, 1))[rank], ((1, 2), (2, 1))[rank]),
        )
        for rank in range(2)
    ]
    (first, second), sent = run(programs)
    assert first[0].tolist() == second[0].tolist() == [1, 10]
    assert first[1].tolist() == second[1].tolist() == [[0, 0], [1, 10]]
    assert first[2].tolist() == [0, 1, 10] and second[2].tolist() == [0, 0, 100]
    assert sent == [8 + 8 + 2 * 8, 8 + 8 + 2 * 8]


@pytest.mark.parametrize(("scope", "want"), [("world", [6, 6, 6, 6]), ("node", [1, 1, 5, 5]), ("rail", [2, 4, 2, 4])])
def test_a_scope_joins_its_ranks_only(scope, want):
    results, sent = run([asking(AllReduce(torch.tensor([float(rank)]), scope)) for rank in range(4)], 2)
    assert [float(answer) for (answer,) in results] == want
    assert sent == [2 * 3 / 4 * 4] * 4 if scope == "world" else [4.0] * 4


def test_an_answer_is_the_rank_s_own_to_change():
    def program(rank):
        total = yield AllReduce(torch.ones(1))
        total += rank
        return float(total)

    assert run([program(rank) for rank in range(3)])[0] == [3, 4, 5]


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (([AllReduce(ONE)], [AllGather(ONE)]), "0: AllReduce in world, 1: AllGather in world"),
        (([AllReduce(ONE)], [AllReduce(ONE, "node")]), "1: AllReduce in node"),
        (([AllReduce(ONE)], []), "1: nothing"),
        (([AllReduce(ONE)], [AllReduce(torch.ones(2))]), r"shapes \[\(1,\), \(2,\)\]"),
        (([AllReduce(ONE)], [AllReduce(ONE.double())]), r"of \['torch.float32', 'torch.float64'\]; want one"),
        (([AllGather(ONE)], [AllGather(torch.ones(2))]), "AllGather shapes"),
        (
            ([AllToAll(ONE, (0, 1), (0, 0))], [AllToAll(ONE, (1, 0), (0, 0))]),
            "rank 0 expects 0 rows from rank 1, which sends 1",
        ),
        (
            ([AllToAll(ONE, (0, 1), (0, 1))], [AllToAll(ONE.double(), (1, 0), (1, 0))]),
            "AllToAll rows of shapes",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(asked, complaint):
    with pytest.raises(OutOfStep, match=complaint):
        run([asking(*requests) for requests in asked])
