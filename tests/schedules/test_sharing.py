"""Shared devices: the mapping is possible and the only one, and everything arrives before it is used."""

from collections import Counter
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.schedules import Action, Clip
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.shared_stages import SharedPlacement, devices_for, workers_on
from schedule_messages import shared_messages

PICTURE = """\
shared: 6 workers (devices), 3 stages, 3 micro-batches, a step every 6 ticks; 2 steps, micro-batches counted on
worker 0, stage 0: F0 .  .  .  .  B0 F3 .  .  .  .  B3 .  .  .  .   staleness 1 1
worker 1, stage 0: .  .  F1 .  .  .  .  B1 F4 .  .  .  .  B4 .  .   staleness 1 1
worker 2, stage 0: .  .  .  .  F2 .  .  .  .  B2 F5 .  .  .  .  B5  staleness 0 0
worker 3, stage 1: .  F0 .  .  B0 F2 .  .  B2 F4 .  .  B4 .  .  .   staleness 1 0 0
worker 4, stage 1: .  .  .  F1 .  .  B1 F3 .  .  B3 F5 .  .  B5 .   staleness 0 1 0
worker 5, stage 2: .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .   staleness 0 0 0 0 0 0"""

every = pytest.mark.parametrize("workers", range(1, 9))
sharings = st.builds(lambda n, slack: SharedPlacement(cyclic(n, slack=slack)), st.integers(1, 8), st.integers(0, 9))


def row(sharing, rank, steps):
    """(tick, kind, micro-batch counted through) of everything a device does in some steps, in order of time."""
    found = []
    for step in range(steps):
        for action in sharing.actions(rank, step):
            assert action.stage == sharing.stage_of(rank) and action.ticks == 1
            found.append((action.start, action.kind, step * sharing.schedule.workers + action.micro_batch))
    return sorted(found)


def test_the_picture():
    assert str(SharedPlacement(cyclic(3))) == PICTURE


@every
def test_no_two_micro_batches_are_on_one_device_in_one_tick_nor_between_forward_and_backward(workers):
    """Over as many steps as it takes every device to come round; a device ends one micro-batch before the next."""
    sharing = SharedPlacement(cyclic(workers))
    for rank in range(sharing.devices):
        done = row(sharing, rank, 2 * workers + 2)
        ticks = [tick for tick, _, _ in done]
        assert len(ticks) == len(set(ticks))
        for (_, before, first), (_, after, second) in zip(done[::2], done[1::2]):
            assert (before, after) == ("F", "B") and first == second


@every
def test_every_action_of_the_schedule_is_done_on_one_device_of_its_stage(workers):
    sharing = SharedPlacement(cyclic(workers))
    assert [len(sharing.ranks(j)) for j in range(workers)] == [workers - j for j in range(workers)]
    assert list(chain(*map(sharing.ranks, range(workers)))) == list(range(devices_for(workers)))
    for step in range(3):
        done = Counter(chain(*(sharing.actions(rank, step) for rank in range(sharing.devices))))
        moved = [a._replace(start=a.start + step * 2 * workers) for a in chain(*sharing.schedule.ticks)]
        assert done == Counter(moved)


@every
def test_only_the_device_named_is_free_when_a_micro_batch_comes(workers):
    """So the formula is the only mapping that keeps one micro-batch a device (but for names)."""
    schedule = cyclic(workers)
    for stage in range(workers):
        spans = [
            (
                schedule.action("F", n % workers, stage).start + n // workers * schedule.period,
                schedule.action("B", n % workers, stage).start + n // workers * schedule.period,
            )
            for n in range(5 * workers)
        ]
        count = workers - stage
        for number in range(count, 5 * workers):
            busy = [n for n in range(number) if spans[n][0] <= spans[number][0] <= spans[n][1]]
            assert busy == list(range(number - count + 1, number))
            assert spans[number - count][1] + 1 == spans[number][0]  # no tick to spare


@every
def test_in_the_steady_state_2_of_n_plus_1_devices_compute(workers):
    sharing = SharedPlacement(cyclic(workers))
    rows = [{tick for tick, _, _ in row(sharing, rank, 4)} for rank in range(sharing.devices)]
    for tick in range(4 * workers, 6 * workers):
        assert sum(tick in own for own in rows) == workers
    assert sharing.utilisation == pytest.approx(workers / sharing.devices)


@every
def test_the_formula_of_one_step_would_not_do(workers):
    """Were micro-batches counted anew in every step, some device would keep two where N - j does not divide N."""
    sharing, schedule = SharedPlacement(cyclic(workers)), cyclic(workers)
    for stage in range(workers):
        count, crowded = workers - stage, False
        for place in range(count):
            mine = [
                (sharing.start(kind, (step, i, stage)), kind)
                for step in range(3)
                for i in range(place, workers, count)
                for kind in ("F", "B")
            ]
            kinds = [kind for _, kind in sorted(mine)]
            crowded |= any(one == two for one, two in pairwise(kinds))
        assert crowded == (workers % count > 0)
    assert schedule.workers == workers


@every
def test_devices_meet_the_same_micro_batches_after_a_rotation(workers):
    sharing = SharedPlacement(cyclic(workers))
    for stage in range(workers):
        turn = sharing.rotation(stage)
        ways = [[sharing.rank_of((step, i, stage)) for i in range(workers)] for step in range(2 * turn + 1)]
        assert ways[0] == ways[turn] and all(way != ways[0] for way in ways[1:turn])


@given(sharings, st.integers(0, 5))
def test_weights_visit_every_device_of_a_stage_once_and_reach_it_before_it_reads_them(sharing, step):
    sent = shared_messages(sharing, step)
    for stage in range(sharing.schedule.stages):
        path = sharing.weight_path(step + 1, stage)
        assert sorted(path) == list(sharing.ranks(stage)) and path[0] == sharing.owner(stage)
        ways = [(m.sender, m.receiver) for m in sent if (m.content, m.stage) == ("weights", stage)]
        assert sorted(ways) == sorted(pairwise(path))
        for rank, tick in sharing.readers(step + 1, stage).items():
            reading = [
                (a.start, t, a.micro_batch)
                for t in range(step, step + 5)
                for a in sharing.actions(rank, t)
                if a.kind == "F" and sharing.schedule.version((t, a.micro_batch, stage)) >= step + 1
            ]
            assert min(reading)[0] == tick > sharing.complete(step, stage)


@given(sharings, st.integers(0, 5), st.sampled_from([None, Clip(1.0, "previous")]))
def test_no_message_is_needed_before_it_is_sent(sharing, step, clip):
    for message in shared_messages(sharing, step, clip):
        assert message.lag >= 0 and message.sender != message.receiver
        if message.content in ("activation", "activation gradient", "partial gradient", "gradient"):
            assert message.lag >= 1


@given(sharings)
def test_messages_repeat_after_a_rotation(sharing):
    for stage in range(sharing.schedule.stages):
        turn = sharing.rotation(stage)
        first, later = (
            [m for m in shared_messages(sharing, step) if m.stage == stage and m.content in ("gradient", "weights")]
            for step in (0, turn)
        )
        assert later == [m._replace(tick=m.tick + turn * sharing.schedule.period) for m in first]


@given(st.integers(1, 8), st.integers(0, 9))
def test_the_hop_without_slack_is_none_where_the_home_does_not_change(workers, step):
    """At slack 0 the device that finishes the sum is the one that reads the new weights first, in the next tick."""
    sharing = SharedPlacement(cyclic(workers))
    for stage in range(workers):
        first, tick = min(sharing.readers(step + 1, stage).items(), key=lambda pair: pair[1])
        assert first == sharing.last(step, stage) and tick == sharing.complete(step, stage) + 1
        if workers % (workers - stage) == 0:
            assert first == sharing.owner(stage)


def test_counts_of_devices():
    assert [devices_for(n) for n in range(1, 6)] == [1, 3, 6, 10, 15]
    assert [workers_on(devices_for(n)) for n in range(1, 9)] == list(range(1, 9))
    for devices, near in ((2, "1 or 3"), (4, "3 or 6"), (7, "6 or 10"), (0, "1 or 3")):
        with pytest.raises(ValueError, match=f"got {devices}; take {near}"):
            workers_on(devices)


@pytest.mark.parametrize("other", [cyclic(2, 4), cyclic(2, costs=[(1, 2), (2, 5)]), cyclic_pipeline(3, 4)])
def test_only_as_many_equal_stages_as_micro_batches_are_shared(other):
    with pytest.raises(ValueError, match="as many equal stages as micro-batches"):
        SharedPlacement(other)


def test_actions_are_those_of_the_schedule_moved():
    assert SharedPlacement(cyclic(2)).actions(2, 1)[0] == Action(5, 1, "F", 1, 0)
