"""The error that ends a program is told before it is printed, by whoever asked for it and nobody else."""

import os
import sys

import pytest

from armillary.transport.groups import CrashReport


@pytest.fixture
def printed(monkeypatch):
    """Errors that reached the hook that was there before."""
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    return seen


def fail():
    error = KeyError("no such word")
    sys.excepthook(KeyError, error, None)
    return error


def test_the_error_is_told_and_then_printed_as_ever(printed):
    told = []
    words = CrashReport(lambda error: told.append((error, list(printed))))
    error = fail()
    words.remove()
    assert told == [("KeyError: 'no such word'", [])] and printed == [error]


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_either_may_be_removed_first(printed, first):
    before, told = sys.excepthook, []
    both = [CrashReport(lambda _, number=number: told.append(number)) for number in range(2)]
    both.pop(first).remove()
    fail()
    assert told == [1 - first] and len(printed) == 1
    both.pop().remove()
    assert sys.excepthook is before


def test_somebody_elses_hook_put_before_it_stays_and_it_says_nothing_more(printed):
    told = []
    words, mine = CrashReport(told.append), []
    ours = sys.excepthook
    sys.excepthook = theirs = lambda *error: (mine.append(error), ours(*error))
    words.remove()
    fail()
    assert sys.excepthook is theirs and len(mine) == len(printed) == 1 and not told


def test_a_process_forked_from_it_does_not_speak_for_it(printed):
    told = []
    words = CrashReport(told.append)
    child = os.fork()
    if not child:
        fail()
        os._exit(len(told))
    words.remove()
    assert os.waitpid(child, 0)[1] == 0
