"""Ranks that look up different tables, differently often, still all get their rows."""

import pytest
import torch

from armillary.exchanges import RankInfo, build_row
from armillary.exchanges.look_up import LookupRequest, LookupTable, look_up
from armillary.reference import lockstep

NOTHING = torch.empty(0, dtype=torch.int64)


def rank_program(place, wanted, ends, step=0):
    """Looks up tables `wanted` (indices) in order, then serves until everyone is at its `ends` state."""
    exchange = build_row("owned_rows")
    wholes = [torch.arange(20.0).view(10, 2) + 100 * index for index in range(2)]
    owned = exchange.ownership(10, place)
    tables = [LookupTable(f"t{i}", exchange, owned, whole[owned.ids(place.rank)]) for i, whole in enumerate(wholes)]
    seen = []
    for index in wanted:
        ids = torch.tensor([1, 4, 9])
        keys, inverse = torch.unique(owned.keys(ids), return_inverse=True)
        while True:
            outcome = yield from look_up(LookupRequest(index, keys, True, step), tables, place)
            if outcome.mine:
                break
        seen.append(torch.equal(outcome.pulled.rows[inverse], wholes[index][ids]))
    while (yield from look_up(LookupRequest(ends, NOTHING, False, step), tables, place)).table is not None:
        pass
    return seen


@pytest.mark.parametrize("wishes", [[[0, 1], [0, 1]], [[0], [1]], [[], [1, 0, 0]], [[1], [], [0, 1, 1]]])
def test_every_rank_gets_what_it_asked_for(wishes):
    programs = [rank_program(RankInfo(rank, len(wishes)), wish, "idle") for rank, wish in enumerate(wishes)]
    results, _ = lockstep.run(programs)
    assert results == [[True] * len(wish) for wish in wishes]


def test_a_finished_rank_beside_a_training_one_is_an_error():
    programs = [rank_program(RankInfo(0, 2), [], "finished"), rank_program(RankInfo(1, 2), [0], "idle")]
    with pytest.raises(RuntimeError, match=r"ranks \[0\] have finished while the others run a backward"):
        lockstep.run(programs)


def test_ranks_at_different_steps_are_an_error():
    programs = [rank_program(RankInfo(0, 2), [0], "idle", step=3), rank_program(RankInfo(1, 2), [0], "idle", step=4)]
    with pytest.raises(RuntimeError, match=r"different numbers of optimizer steps \[3, 4\]"):
        lockstep.run(programs)
