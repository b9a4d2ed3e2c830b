"""Routes: homes are spread evenly, nothing is sent after it is needed, traffic is even."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.routes import closing, owner_of, sum_path, weight_path, workers_of_stages
from schedule_messages import pipeline_messages, ring_messages

cost = st.fractions(Fraction(1, 8), 8, max_denominator=8)
rings = st.builds(
    lambda n, pairs, slack: cyclic(n, slack=slack, costs=pairs),
    st.integers(1, 6),
    st.lists(st.tuples(cost, cost), min_size=1, max_size=6),
    st.integers(0, 7),
)


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 8))
def test_the_home_of_a_stage_does_not_depend_on_the_slack(n, k, slack):
    made = cyclic(n, k, slack)
    assert [owner_of(made, j) for j in range(k)] == [ceil(n - Fraction(j * n, k)) - 1 for j in range(k)]


@given(st.integers(1, 8), st.integers(1, 3))
def test_every_worker_is_home_to_as_many_stages_when_n_divides_k(n, times):
    made = cyclic(n, n * times)
    assert Counter(owner_of(made, j) for j in range(n * times)) == dict.fromkeys(range(n), times)


@given(rings)
def test_weights_visit_every_worker_once_and_reach_it_before_it_reads_them(made):
    for stage in range(made.stages):
        path = weight_path(made, stage)
        assert sorted(path) == list(range(made.workers)) and path[0] == owner_of(made, stage)
        assert [m.receiver for m in way(made, stage, "weights")] == list(path[1:])


def way(made, stage, content):
    """The messages of a stage in the order in which they are sent on."""
    found = {m.sender: m for m in ring_messages(made) if (m.stage, m.content) == (stage, content)}
    start = owner_of(made, stage) if content == "weights" else 0
    hops = []
    while start in found:
        hops.append(found[start])
        start = found[start].receiver
    return hops


@given(rings)
def test_no_message_is_needed_before_it_is_sent(made):
    assert all(message.lag >= 0 for message in ring_messages(made))


@given(rings)
def test_weights_arrive_when_the_receiver_reads_them_and_gradients_when_it_adds_its_own(made):
    for stage in range(made.stages):
        made_at = arrival = closing(made, stage).tick
        for message in way(made, stage, "weights"):
            assert (message.tick - arrival) % made.period == 0 or message.tick == made_at
            arrival += message.lag
            age = made.staleness[message.receiver][stage]
            assert arrival == made.action("F", message.receiver, stage).start + age * made.period
        for message in way(made, stage, "partial gradient"):
            assert message.tick + message.lag == made.action("B", message.receiver, stage).start


@given(rings)
def test_a_home_steps_only_after_the_last_worker_has_added_its_gradient(made):
    for stage in range(made.stages):
        complete = made.action("B", made.workers - 1, stage).end - made.period
        assert closing(made, stage).tick >= complete


@given(rings)
def test_gradients_are_added_in_worker_order_and_go_home(made):
    for stage in range(made.stages):
        hops = [m for m in ring_messages(made) if m.stage == stage and m.content != "weights"]
        way = [(m.sender, m.receiver) for m in hops]
        path, last, goal = sum_path(made, stage), made.workers - 1, owner_of(made, stage)
        assert path in (tuple(range(last + 1)), tuple(range(last)))
        assert way == [*pairwise(path), *([(last, goal)] if goal != last else [])]
        assert path[-1] == last or path[-1] == goal  # the last gradient is added where the others are


@given(st.integers(1, 8), st.integers(1, 12))
def test_at_slack_0_no_worker_sends_two_stage_messages_at_once(n, k):
    made = cyclic(n, k)
    load = Counter((m.sender, m.tick % made.period) for m in ring_messages(made))
    assert max(load.values(), default=1) == 1


@given(st.integers(1, 12), st.integers(2, 4))
def test_nor_do_two_workers_with_slack(half, slack):
    made = cyclic(2, slack=slack, costs=[(1, 2)] * (2 * half))
    load = Counter((m.sender, m.tick % made.period) for m in ring_messages(made))
    assert max(load.values()) == 1


@given(rings)
def test_no_worker_sends_two_gradients_at_once(made):
    load = Counter((m.sender, m.tick % made.period) for m in ring_messages(made) if m.content != "weights")
    assert max(load.values(), default=1) == 1


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_ring_moves_two_parameter_sizes_a_worker_and_step_whatever_the_slack(n):
    """N - 1 hops of each gradient, N - 1 of its weights; N - 2 of N finished gradients travel on to another owner."""
    for slack in (0, 1, n):
        assert len(ring_messages(cyclic(n, slack=slack))) == n * 2 * (n - 1) + (n - 2)


@given(st.integers(1, 4), st.integers(0, 3))
def test_two_workers_send_one_parameter_size_each_as_in_an_all_reduce(half, slack):
    sent = Counter(m.sender for m in ring_messages(cyclic(2, 2 * half, slack)))
    assert sent == {0: 2 * half, 1: 2 * half}


def lateness(made, load):
    """The most ticks by which a message of a ring of two comes late where links are busy for `load` of the time.

    A link takes messages in the order in which they are sent. What a backward makes leaves when it is over, and is
    added when the receiver's own is over.
    """
    takes, worst = load * made.period / made.stages, 0.0
    for sender in range(2):
        queue = []
        for m in ring_messages(made):
            is_sum = m.content != "weights"
            left = m.tick + (made.action("B", sender, m.stage).ticks if is_sum else 0)
            wanted = m.tick + m.lag
            if m.content == "partial gradient":
                wanted += made.action("B", m.receiver, m.stage).ticks
            if m.sender == sender:
                queue += [(left + step * made.period, wanted + step * made.period) for step in range(5)]
        free = 0.0
        for left, wanted in sorted(queue):
            free = max(free, left) + takes
            worst = max(worst, free - wanted)
    return worst


def test_with_slack_nothing_comes_late_on_links_busy_for_nine_tenths_of_the_time():
    full = cyclic(2, slack=2, costs=[(1, 2)] * 10)
    assert lateness(full, 0.9) <= 0
    assert lateness(cyclic(2, slack=0, costs=[(1, 2)] * 10), 0.9) > 0


def test_a_home_may_make_weights_in_the_step_after_the_one_in_which_it_could():
    made = cyclic(2, 4, slack=2)
    assert [closing(made, stage) for stage in range(4)] == [(4, 0, 0), (5, 0, 1), (8, 1, 0), (9, 1, 1)]


def test_at_slack_0_weights_only_go_to_the_next_worker():
    for n in range(2, 7):
        for message in ring_messages(cyclic(n)):
            if message.content != "gradient":
                assert message.receiver == (message.sender + 1) % n


def test_a_pipeline_sends_one_activation_forward_and_one_gradient_back():
    made = cyclic_pipeline(3, 4)
    found = Counter((m.sender, m.receiver, m.content) for m in pipeline_messages(made))
    assert found == {
        (0, 1, "activation"): 4,
        (1, 2, "activation"): 4,
        (1, 0, "activation gradient"): 4,
        (2, 1, "activation gradient"): 4,
    }


def test_a_pipeline_makes_no_ring_and_a_ring_no_pipeline():
    with pytest.raises(ValueError, match="makes no ring"):
        owner_of(cyclic_pipeline(2, 2), 0)
    with pytest.raises(ValueError, match="makes no pipeline"):
        workers_of_stages(cyclic(2))
