"""The action_queue hands out every action once, in time, backwards first."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.rank_list import ActionQueue


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_every_action_of_every_step_is_due_once_and_in_order(n, k, steps):
    made = cyclic(n, k)
    action_queue = ActionQueue(made, range(n))
    due = [action for _ in range(steps) for action in action_queue.next_step()] + list(action_queue.rest())
    assert due == sorted(due)
    assert len(due) == len(set(due)) == steps * n * 2 * k
    for before, after in pairwise(due):
        assert not (before.tick == after.tick and before.kind == "F" and after.kind == "B")


def test_a_step_is_only_worked_off_as_far_as_needs_no_later_step():
    made = cyclic_pipeline(3, 3)
    for worker in range(3):
        action_queue = ActionQueue(made, [worker])
        assert [d.kind + str(d.micro_batch) for d in action_queue.next_step() if d.kind == "F"] == [
            "F0",
            "F1",
            "F2",
        ]
        assert [d.micro_batch for d in action_queue.rest()] == [[1, 2], [2], []][worker]


def test_nothing_is_due_twice_after_a_pause():
    action_queue = ActionQueue(cyclic(2), range(2))
    first = [*action_queue.next_step(), *action_queue.rest()]
    assert list(action_queue.rest()) == []
    second = list(action_queue.next_step())
    assert {due.step for due in first} == {0} and {due.step for due in second} == {1}
