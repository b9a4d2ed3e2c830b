"""Which plans of the planner's grid are timed by turns, and how often: what was far off at first gets one more."""

from contextlib import contextmanager

import pytest
from benchmarks.measuring.measure import Built
from benchmarks.planner import turns
from benchmarks.planner.turns import ALONE, FAR, FEWEST_ROUNDS, by_turns

STEPS = turns.WARM_STEPS + turns.TIMED_STEPS


@pytest.fixture
def clock(monkeypatch):
    """A clock that steps alone move; every rank of the one that there is answers as rank 0."""
    now = [0.0]
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(turns.dist, "barrier", lambda: None)
    monkeypatch.setattr(turns.dist, "broadcast_object_list", lambda answer, src: None)
    return now


def lending(clock, seconds, lent):
    """seconds: of a step, by plan."""

    @contextmanager
    def lend(name):
        def step():
            clock[0] += seconds[name]
            return 0.0

        lent.append(name)
        yield Built(step, 0)

    return lend


def test_what_was_far_off_once_is_timed_again_and_kept_if_it_is_near_then(clock):
    real = {"best": 1.0, "stalled": 1.2, "slow": 3.0, ALONE: 0.5}
    first = real | {"stalled": 2 * FAR}
    lent = []
    found = by_turns(lending(clock, real, lent), first, {ALONE}, budget_seconds=0.0)
    assert {name: len(taken) for name, taken in found.items()} == dict.fromkeys(
        ("best", "stalled", ALONE), FEWEST_ROUNDS
    )
    assert found["stalled"] == pytest.approx([1.2] * FEWEST_ROUNDS)
    assert (
        lent.count("slow") == 1 and lent.count("stalled") == 1 + FEWEST_ROUNDS and lent.count("best") == FEWEST_ROUNDS
    )


def test_what_must_be_timed_is_however_slow(clock):
    found = by_turns(lending(clock, {"best": 1.0, "chosen": 9.0}, []), {"best": 1.0, "chosen": 9.0}, {"chosen"}, 0.0)
    assert found["chosen"] == pytest.approx([9.0] * FEWEST_ROUNDS)


def test_the_limit_is_of_the_best_that_trains(clock):
    """What only computes is no plan: 1.5 is near 1.0, though thrice what compute alone takes."""
    real = {"best": 1.0, "other": 1.5, ALONE: 0.5}
    assert set(by_turns(lending(clock, real, []), real, {ALONE}, 0.0)) == set(real)


def test_short_steps_have_more_rounds_within_the_budget(clock):
    real = {"best": 1.0, "other": 1.0}
    found = by_turns(lending(clock, real, []), real, set(), budget_seconds=2 * STEPS * 7.5)
    assert len(found["best"]) == 7
