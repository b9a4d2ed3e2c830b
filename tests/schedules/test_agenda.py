"""The agenda hands out every action once, in time, backwards first."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from armillary.schedules.agenda import Agenda
from armillary.schedules.cyclic import cyclic
from armillary.schedules.cyclic_pipeline import cyclic_pipeline


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_every_action_of_every_step_is_due_once_and_in_order(n, k, steps):
    made = cyclic(n, k)
    agenda = Agenda(made, range(n))
    due = [action for _ in range(steps) for action in agenda.next_step()] + list(agenda.rest())
    assert due == sorted(due)
    assert len(due) == len(set(due)) == steps * n * 2 * k
    for before, after in pairwise(due):
        assert not (before.tick == after.tick and before.kind == "F" and after.kind == "B")


def test_a_step_is_only_worked_off_as_far_as_needs_no_later_step():
    made = cyclic_pipeline(3, 3)
    for worker in range(3):
        agenda = Agenda(made, [worker])
        assert [d.kind + str(d.micro_batch) for d in agenda.next_step() if d.kind == "F"] == [
            "F0",
            "F1",
            "F2",
        ]
        assert [d.micro_batch for d in agenda.rest()] == [[1, 2], [2], []][worker]


def test_nothing_is_due_twice_after_a_pause():
    agenda = Agenda(cyclic(2), range(2))
    first = [*agenda.next_step(), *agenda.rest()]
    assert list(agenda.rest()) == []
    second = list(agenda.next_step())
    assert {due.step for due in first} == {0} and {due.step for due in second} == {1}
