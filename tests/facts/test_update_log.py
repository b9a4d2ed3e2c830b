"""The checker of owners' logs reads nothing else, and passes what kept its bound; staleness is counted from them."""

import pytest

from armillary.plans.update_log import Event, Kind, UpdateLog, faults, refused_bound, staleness

PULL, PUSH, ASIDE = Kind.PULL, Kind.PUSH, Kind.ASIDE


def log_of(*events):
    return UpdateLog([Event(kind, worker, step) for kind, worker, step in events])


def test_what_is_written_is_read():
    event = Event(PUSH, 2, 7, epoch=1, batch=30)
    log = UpdateLog()
    log.append(event)
    assert list(log) == [event] and len(log) == 1


AHEAD = log_of((PULL, 0, 0), (PUSH, 0, 0), (PULL, 0, 1), (PUSH, 0, 1), (PULL, 0, 2))


@pytest.mark.parametrize(("bound", "count"), [(0, 2), (1, 1), (2, 0), (None, 0)])
def test_a_worker_that_begins_too_far_ahead_is_found(bound, count):
    found = faults(AHEAD, 2, bound)
    assert len(found) == count
    assert not found or f"worker 0, step 2 begins 2 steps ahead of the slowest; bound {bound}" in found[-1]


def test_nobody_waits_for_a_worker_that_stepped_aside_until_it_is_back():
    aside = log_of((ASIDE, 1, 0), (PULL, 0, 0), (PUSH, 0, 0), (PULL, 0, 1), (PUSH, 0, 1))
    assert not faults(aside, 2, 0)
    back = log_of((ASIDE, 1, 0), (PULL, 0, 0), (PUSH, 0, 0), (PULL, 1, 0), (PULL, 0, 1))
    assert "begins 1 steps ahead" in faults(back, 2, 0)[0]


def test_an_update_made_twice_or_of_what_was_not_pulled_is_found():
    twice = log_of((PULL, 0, 0), (PUSH, 0, 0), (PUSH, 0, 0))
    assert "out of order, or twice" in faults(twice, 1, None)[0]
    assert "not pulled" in faults(log_of((PUSH, 0, 0)), 1, None)[0]


def test_staleness_counts_the_updates_of_others_between_pull_and_push():
    log = log_of((PULL, 0, 0), (PULL, 1, 0), (PUSH, 1, 0), (PULL, 1, 1), (PUSH, 1, 1), (PUSH, 0, 0))
    assert staleness(log) == {0: 2, 2: 1}


@pytest.mark.parametrize("bound", [-1, 1.5, True, "4"])
def test_what_is_no_bound_is_refused(bound):
    assert refused_bound(bound)


def test_bounds():
    assert not refused_bound(0) and not refused_bound(4) and not refused_bound(None)
