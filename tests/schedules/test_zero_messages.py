"""Routes of a ring that keeps no weights: every use finds its version, nothing is held longer than is said."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.schedules.cyclic import cyclic
from armillary.schedules.messages import closing, gradient_messages, home, ring_messages
from armillary.schedules.zero_messages import (
    TOKENS,
    crossing,
    departures,
    early,
    held_copies,
    hop_ticks,
    kept_until,
    zero_messages,
)

cost = st.fractions(Fraction(1, 4), 4, max_denominator=4)
rings = st.builds(
    lambda n, pairs, slack: cyclic(n, slack=slack, costs=pairs),
    st.integers(1, 5),
    st.lists(st.tuples(cost, cost), min_size=1, max_size=5),
    st.integers(0, 6),
)
STEPS = 4


def play(made, drains=()):
    """Carries the message list out tick by tick; tokens are version numbers. Asserts that every use finds its own.

    A drain is played by beginning anew, with the newest versions, as the first step does.
    """
    tokens = [m for m in zero_messages(made) if m.content in TOKENS]
    path_into = {(m.content, m.stage, m.receiver): m for m in tokens}
    leaves = {(m.content, m.stage, m.receiver): at for j in range(made.stages) for at, m in departures(made, j)}
    sent: dict[tuple[str, int, int, int], tuple[int, int]] = {}  # (content, stage, receiver, its step) -> tick, version
    for step in range(-2, STEPS):
        for key, at in leaves.items():
            m = path_into[key]
            place = step + crossing(made, m), m.receiver, m.stage
            tick = m.tick + step * made.period
            version = step - at.steps
            made_at = closing(made, m.stage).tick + version * made.period
            assert tick >= made_at or version <= 0
            sent[(*key, place[0])] = tick, max(0, version)
        for key, m in path_into.items():
            if key not in leaves:
                came = sent.get((m.content, m.stage, m.sender, step))
                version = came[1] if came else 0
                sent[(*key, step + crossing(made, m))] = m.tick + step * made.period, version
    return path_into, sent


@settings(max_examples=40, deadline=None)
@given(rings)
def test_every_worker_gets_before_every_use_the_version_it_is_to_read(made):
    path_into, sent = play(made)
    for (content, stage, worker), _ in path_into.items():
        for step in range(2, STEPS):
            used = made.action(TOKENS[content], worker, stage).start + step * made.period
            tick, version = sent[content, stage, worker, step]
            assert tick <= used
            assert version == made.version((step, worker, stage))
    for stage in range(made.stages):
        for content in TOKENS:
            others = {worker for c, j, worker in path_into if (c, j) == (content, stage)}
            assert others == set(range(made.workers)) - {home(made, stage)}


@settings(max_examples=40, deadline=None)
@given(rings)
def test_gradients_travel_as_in_a_ring_that_keeps_its_weights(made):
    mine = [m for m in zero_messages(made) if m.content not in TOKENS]
    assert mine == sorted(gradient_messages(made)) == [m for m in ring_messages(made) if m.content != "weights"]


@settings(max_examples=40, deadline=None)
@given(rings)
def test_no_message_is_needed_before_it_is_sent_and_a_token_crosses_one_step_at_most(made):
    for message in zero_messages(made):
        assert message.lag >= 0
        if message.content in TOKENS:
            assert crossing(made, message) in (0, 1)
            sent_in_own_step = not crossing(made, message)
            own = made.ticks[message.receiver].index(
                made.action(TOKENS[message.content], message.receiver, message.stage)
            )
            assert not sent_in_own_step or early(made, message) <= own


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_sends_three_parameter_sizes_a_step_and_the_hop_of_finished_sums(n, times):
    """(N - 1) / N of forward tokens, of backward tokens and of sums each; N - 2 of N finished sums go on to a home."""
    for slack in (0, 1, n):
        assert len(zero_messages(cyclic(n, n * times, slack))) == times * (n * 3 * (n - 1) + (n - 2))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_at_slack_0_tokens_go_to_the_next_rank_only(n):
    for message in zero_messages(cyclic(n, 2 * n)):
        if message.content in TOKENS:
            assert message.receiver == (message.sender + 1) % n


@pytest.mark.parametrize(("n", "k"), [(2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (4, 16), (8, 8), (8, 16)])
def test_at_slack_0_a_worker_holds_its_home_stages_and_up_to_five_times_as_many_besides_and_the_last_one_more(n, k):
    """Two tokens of a stage in N workers, each twice for a hop's time. The last keeps what worker 0 uses next."""
    for worker in range(n):
        held = [sum(copies.values()) for copies in held_copies(cyclic(n, k), worker)]
        homes = sum(home(cyclic(n, k), stage) == worker for stage in range(k))
        assert homes == k // n
        assert homes <= min(held)
        assert max(held) <= (homes + 5 * k // n if worker < n - 1 else 2 * k + homes)


def test_more_stages_hold_less():
    peaks = [max(sum(copies.values()) for copies in held_copies(cyclic(4, k), 1)) / k for k in (4, 8, 16)]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 1


@settings(max_examples=40, deadline=None)
@given(rings)
def test_a_home_always_holds_its_master_weights_and_keeps_an_old_version_for_two_steps_at_most(made):
    for worker in range(made.workers):
        for copies in held_copies(made, worker):
            assert all(copies[stage] for stage in range(made.stages) if home(made, stage) == worker)
    for stage in range(made.stages):
        assert 0 <= kept_until(made, stage).steps <= 1
    assert hop_ticks(made) <= max(1, made.period // made.workers)


def test_a_held_copy_is_a_token_between_its_posting_and_its_release():
    """By hand: 2 workers, 2 stages, slack 0. F0 F1 B1 B0; worker 1 is home to stage 0, worker 0 to stage 1."""
    made = cyclic(2)
    assert [(m.tick, m.lag, m.sender, m.receiver, m.content, m.stage) for m in zero_messages(made)] == [
        (1, 2, 0, 1, "forward weights", 1),
        (2, 2, 0, 1, "backward weights", 1),
        (2, 2, 1, 0, "forward weights", 0),
        (3, 2, 0, 1, "partial gradient", 0),
        (4, 1, 1, 0, "gradient", 1),
        (5, 2, 1, 0, "backward weights", 0),
    ]
    assert held_copies(made, 0) == [
        Counter({1: 2, 0: 1}),  # master weights of 1, its backward token of the step before; the forward token of 0
        Counter({1: 2, 0: 1}),  # the forward token of 1 leaves; the backward token of 0 may come
        Counter({1: 3, 0: 2}),
        Counter({1: 3, 0: 2}),
    ]
