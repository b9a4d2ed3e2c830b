"""Weights that only their owner keeps: who lends them to whom, what crosses, and what is held meanwhile."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.schedules.costs import held_copies, mean_copies
from armillary.schedules.cyclic import cyclic
from armillary.schedules.instructions import TOKENS
from armillary.schedules.lower_zero_ring import hop_ticks, unshards
from armillary.schedules.routes import closing, owner_of
from schedule_messages import gradient_messages, lent_messages, ring_messages

cost = st.fractions(Fraction(1, 4), 4, max_denominator=4)
rings = st.builds(
    lambda n, pairs, slack: cyclic(n, slack=slack, costs=pairs),
    st.integers(1, 5),
    st.lists(st.tuples(cost, cost), min_size=1, max_size=5),
    st.integers(0, 6),
)


@settings(max_examples=40, deadline=None)
@given(rings)
def test_every_worker_gets_before_every_use_the_version_it_is_to_read(made):
    """From the owner, who has made it, or from one that has used the same one."""
    for stage in range(made.stages):
        owner, made_at = owner_of(made, stage), closing(made, stage).tick
        for kind in TOKENS:
            mine = [one for one in unshards(made, stage) if one.kind == kind]
            assert {one.receiver for one in mine} == {*range(made.workers)} - {owner}
            for one in mine:
                version = made.version((3, one.receiver, stage))
                assert one.leaves <= one.used == made.action(kind, one.receiver, stage).start
                if one.sender == owner:
                    assert one.crosses == 0
                    assert one.leaves + 3 * made.period >= made_at + version * made.period
                else:
                    assert one.crosses in (0, 1)
                    assert made.version((3 - one.crosses, one.sender, stage)) == version
                    began = made.action(kind, one.sender, stage).start - one.crosses * made.period
                    assert one.leaves >= began


@settings(max_examples=40, deadline=None)
@given(rings)
def test_gradients_travel_as_in_a_ring_that_keeps_its_weights(made):
    mine = [m for m in lent_messages(made) if m.content not in TOKENS.values()]
    assert mine == sorted(gradient_messages(made)) == [m for m in ring_messages(made) if m.content != "weights"]


@settings(max_examples=40, deadline=None)
@given(rings)
def test_a_token_leaves_a_hops_time_before_its_use_or_when_it_is_there(made):
    assert hop_ticks(made) <= max(1, made.period // made.workers)
    for message in lent_messages(made):
        assert message.lag >= 0
        if message.content in TOKENS.values():
            assert message.lag <= hop_ticks(made)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_sends_three_parameter_sizes_a_step_and_the_hop_of_finished_sums(n, times):
    """(N - 1) / N of both kinds of tokens and of sums each; N - 2 of N finished sums go on to an owner."""
    for slack in (0, 1, n):
        assert len(lent_messages(cyclic(n, n * times, slack))) == times * (n * 3 * (n - 1) + (n - 2))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_at_slack_0_tokens_go_to_the_next_rank_only(n):
    for message in lent_messages(cyclic(n, 2 * n)):
        if message.content in TOKENS.values():
            assert message.receiver == (message.sender + 1) % n


@pytest.mark.parametrize(("n", "k"), [(2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (4, 16)])
def test_at_slack_0_a_worker_holds_the_stages_it_owns_and_up_to_five_times_as_many_besides(n, k):
    """Two tokens of a stage in N workers, each twice for a hop's time."""
    for worker in range(n):
        held = [sum(copies.values()) for copies in held_copies(cyclic(n, k), worker)]
        owned = sum(owner_of(cyclic(n, k), stage) == worker for stage in range(k))
        assert owned == k // n <= min(held)
        assert max(held) <= owned + 5 * k // n


def test_more_stages_hold_less():
    peaks = [max(sum(copies.values()) for copies in held_copies(cyclic(4, k), 1)) / k for k in (4, 8, 16)]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 1


@settings(max_examples=20, deadline=None)
@given(rings)
def test_an_owner_always_holds_its_weights(made):
    for worker in range(made.workers):
        for copies in held_copies(made, worker):
            assert all(copies[stage] for stage in range(made.stages) if owner_of(made, stage) == worker)


def test_one_worker_borrows_nothing():
    assert held_copies(cyclic(1, 2), 0) == [Counter({0: 1, 1: 1})] * 4
    assert mean_copies(cyclic(1, 2, slack=1), 0) == 0 and not lent_messages(cyclic(1, 2))


def test_a_held_copy_is_a_token_between_its_room_and_its_release():
    """By hand: 2 workers, 2 stages, slack 0. F0 F1 B1 B0; worker 1 owns stage 0, worker 0 stage 1."""
    made = cyclic(2)
    assert [(m.tick, m.lag, m.sender, m.receiver, m.content, m.stage) for m in lent_messages(made)] == [
        (1, 2, 0, 1, "forward weights", 1),
        (1, 2, 1, 0, "backward weights", 0),
        (2, 2, 0, 1, "backward weights", 1),
        (2, 2, 1, 0, "forward weights", 0),
        (3, 2, 0, 1, "partial gradient", 0),
        (4, 1, 1, 0, "gradient", 1),
    ]
    assert held_copies(made, 0) == [
        Counter({1: 1, 0: 1}),  # its own 1; the forward token of 0
        Counter({1: 2, 0: 1}),  # a copy of 1 leaves for a forward; room for the backward token of 0
        Counter({1: 3, 0: 1}),  # one more leaves for a backward
        Counter({1: 3, 0: 2}),  # the backward token of 0, and room for the next step's forward
    ]
