"""Runs without a common clock equal the replay of their logs, every bit; faults planted in an owner are seen."""

from contextlib import contextmanager
from itertools import product

import pytest
import torch
from unclocked import plan_of, replayed_run

from armillary.owners.owner import Owner
from armillary.plans.update_log import Event, Kind, too_far_ahead
from armillary.session import owners_engine

WORKERS, BOUNDS, SEEDS = 3, (0, 2, 4, None), 5
KINDS = ("momentum", "adagrad", "adam")


def many(rank, world):
    return [
        replayed_run(rank, world, bound, KINDS[seed % len(KINDS)], seed)
        for bound, seed in product(BOUNDS, range(SEEDS))
    ]


def test_twenty_runs_with_pauses_by_lot_are_replayed_bitwise(crew):
    """Three optimizers, four bounds, a learning rate that falls by each worker's own clock."""
    runs, *_ = crew(WORKERS).run(many)
    assert len(runs) == 20
    for (bound, seed), found in zip(product(BOUNDS, range(SEEDS)), runs, strict=True):
        assert not found["differing"] and not found["error"] and not found["faults"], (bound, seed, found)
    waited = {
        bound: sum(runs[place * SEEDS + seed]["waited"] for seed in range(SEEDS)) for place, bound in enumerate(BOUNDS)
    }
    assert waited[0] > 0 and waited[None] == 0, waited
    assert sum(count for found in runs for log in found["stale"] for by, count in log.items() if by) > 0


class LogsBefore(Owner):
    """Logs what has come, not what it did."""

    def _pull(self, letter):
        self.log.append(Event(Kind.PULL, letter.sender, *letter.numbers[1:4]))
        super()._pull(letter)

    def _give(self, letter):
        before = len(self.log)
        super()._give(letter)
        del self.log._numbers[before * len(Event._fields) :]


class OwnClock(Owner):
    """Holds a worker to its own count of updates instead of the slowest's."""

    def _is_early(self, letter):
        own = {letter.sender: self._updates[letter.sender]}
        return too_far_ahead(letter.numbers[1], own, self.bound)


class OwnRate(Owner):
    """Steps with the options that it was first sent, whoever pushes, and when."""

    def __init__(self, *given):
        super().__init__(*given)
        first, step = [], self.part.step

        def stepped(options, *rest):
            first[:] = first or [options]
            step(first[0], *rest)

        self.part.step = stepped


class StepsTwice(Owner):
    """After a reconnect what was sent last is sent again, and stepped with again."""

    def _push(self, letter, step):
        super()._push(letter, step)
        if (letter.sender, step) == (1, 3):
            self._updates[letter.sender] -= 1
            super()._push(letter, step)


@contextmanager
def planted(owner):
    before, owners_engine.Owner = owners_engine.Owner, owner
    try:
        yield
    finally:
        owners_engine.Owner = before


def faulty(rank, world, owner, bound):
    with planted(owner):
        return replayed_run(rank, world, bound, "momentum", 7, steps=8)


FAULTS = {LogsBefore: (0, "log"), OwnClock: (0, "log"), OwnRate: (2, "replay"), StepsTwice: (None, "log")}


@pytest.mark.parametrize("owner", FAULTS, ids=lambda one: one.__name__)
def test_a_planted_fault_is_seen(crew, owner):
    """By the checker of the log, or by the replay that then has other bits."""
    bound, seen_by = FAULTS[owner]
    found, *_ = crew(WORKERS).run(faulty, owner, bound)
    seen = found["faults"] if seen_by == "log" else found["differing"]
    assert seen, found


class SentAgain(Owner):
    """What was sent last comes again, as after a reconnect."""

    def _push(self, letter, step):
        super()._push(letter, step)
        super()._push(letter, step)


def test_a_push_that_comes_again_is_left_alone(crew):
    found, *_ = crew(WORKERS).run(faulty, SentAgain, None)
    assert not found["differing"] and not found["faults"] and not found["error"], found


def test_the_plan_names_its_owners():
    made = plan_of(WORKERS, 2)
    assert {group.layout for group in made.groups} == {"row_sharded", "replicated"} and made.consensus == "owners"
    assert made.departures == ("lazy", "async") or made.departures == ("async",)
    assert torch.equal(torch.tensor(made.mesh.workers), torch.tensor(WORKERS))
