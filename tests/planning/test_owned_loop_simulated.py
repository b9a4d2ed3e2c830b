"""Lists of instructions against a clock: fill and bubble as the books say, messages when due, bytes as forecast."""

from collections import Counter
from dataclasses import replace

import pytest

from armillary.planning.planner import plan
from armillary.planning.pricing import Case
from armillary.planning.simulator import simulate
from armillary.plans import Choice, Link, Processor, RowRate, Topology, UpdateRate
from armillary.schedules import Clip
from armillary.schedules.cyclic import cyclic
from planning.test_staged_plan import chain_of
from planning_cases import LINKS_ONLY, machines
from schedule_messages import lent_messages, ring_messages

F, B = 1e-3, 2e-3  # of one module of `chain_of`


def played(name, workers, modules=None, latency=0.0, seconds_a_message=0.0, **options):
    link = Link(latency, 80 / seconds_a_message if seconds_a_message else 1e300)
    topology = Topology(workers, 1, link, link, 1 << 40)
    found = chain_of((100,) * (modules or workers))
    made = plan(found, topology, assumptions=LINKS_ONLY, schedule=Choice(name, options))
    return made, simulate(made, Case(found, topology, LINKS_ONLY))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("count", [3, 8])
def test_flush_pipelines_have_their_bubble_and_the_cyclic_one_has_none(workers, count):
    for name, ticks in (("gpipe", count + workers - 1), ("one_f_one_b", count + workers - 1), ("pipeline", count)):
        assert played(name, workers, micro_batches=count)[1].step_seconds == pytest.approx(ticks * (F + B))
    alone = played("accumulation", 1, modules=4, micro_batches=count)[1]
    assert alone.step_seconds == pytest.approx(count * 4 * (F + B)) and not alone.exposed_seconds


def test_a_message_delays_what_waits_for_it_and_nothing_else():
    """Of two stages and one micro-batch both messages are exposed; of more the first and the last."""
    for count in (1, 5):
        slow, fast = (played("gpipe", 2, latency=late, micro_batches=count)[1].step_seconds for late in (4e-4, 0.0))
        assert slow == pytest.approx(fast + 2 * 4e-4)
    _, found = played("one_f_one_b", 2, seconds_a_message=5e-4, micro_batches=4)
    assert sum(found.exposed_seconds.values()) == pytest.approx(found.step_seconds - found.processor_seconds, abs=1e-9)
    times = [played("pipeline", 3, latency=late, micro_batches=4)[1].step_seconds for late in (0.0, 1e-4, 1e-3, 1e-2)]
    assert times == sorted(times) and times[-1] > 2 * times[0]


def test_a_link_carries_one_message_after_another():
    """Its link is the slowest part, so a step lasts as long as the messages that the middle stage sends both ways."""
    step = played("pipeline", 3, seconds_a_message=1e-2, micro_batches=6)[1].step_seconds
    assert step >= 6 * 2 * 1e-2


def on_a_processor(name, processor=None, hidden=1.0, **options):
    """Two stages of a tensor of 400 bytes, messages of 80 bytes and of a millisecond."""
    link = Link(0.0, 8e4)
    topology = Topology(2, 1, link, link, 1 << 40, processor=processor, hidden_share=hidden)
    found = chain_of((100, 100))
    made = plan(found, topology, assumptions=LINKS_ONLY, schedule=Choice(name, options))
    return simulate(made, Case(found, topology, LINKS_ONLY))


def test_calls_on_every_tensor_take_the_processor():
    none = RowRate(0.0, 0.0, 0.0)
    quick = Processor(none, none, none, 1e300)
    slow = replace(quick, updates=(UpdateRate(3e-3, 1e-6),), landing_seconds=5e-4)
    count = 4
    before, after = (on_a_processor("pipeline", one, micro_batches=count).processor_seconds for one in (quick, slow))
    assert after - before == pytest.approx(3e-3 + 400e-6 + count * 5e-4)
    ringed = on_a_processor("ring", slow).processor_seconds - on_a_processor("ring", quick).processor_seconds
    assert ringed > 3e-3 + 400e-6 + 2 * 5e-4  # laid into messages, and added, too


def test_what_compute_cannot_hide_of_a_message_takes_both_processors():
    """Of the first message, which is waited for, the receiver has nothing to do meanwhile."""
    free, dear = (on_a_processor("gpipe", hidden=share, micro_batches=2) for share in (1.0, 0.5))
    assert free.processor_seconds < dear.processor_seconds <= free.processor_seconds + 2 * 2 * 1e-3 * 0.25 + 1e-12
    assert dear.step_seconds > free.step_seconds


def forecast(made):
    return {group.name: group.forecast.sent_bytes for group in made.groups if group.forecast.sent_bytes}


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "clip_by": "previous"}])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "pipeline"])
def test_a_played_step_sends_the_forecasts_bytes(name, options):
    made, found = played(name, 3, latency=1e-4, micro_batches=4, **options)
    assert found.sent_bytes == pytest.approx(forecast(made))
    made, found = played("one_device", 2, modules=3, latency=1e-4, micro_batches=2)
    assert found.sent_bytes == pytest.approx(forecast(made))
    assert found.step_seconds == pytest.approx(2 * 3 * (F + B)), "means are wanted by the second micro-batch only"
    made, found = played("accumulation", 2, modules=3, latency=1e-4, micro_batches=2, points=["b", "c"])
    assert found.sent_bytes == pytest.approx(forecast(made))
    last = made.groups[0].forecast.seconds  # of the first stage; those of the others hide behind its backward
    assert found.step_seconds == pytest.approx(2 * 3 * (F + B) + last) and last > 0


def test_replicas_side_by_side_pay_for_their_mean_at_the_end_of_a_step():
    made, found = played("gpipe", 6, modules=4, latency=1e-4, stages=2, micro_batches=3)
    _, alone = played("gpipe", 2, modules=4, latency=1e-4, micro_batches=3)
    assert str(made.mesh) == "data 3 x stage 2"
    assert found.sent_bytes == pytest.approx(forecast(made))
    reduced = 2 * (3 - 1) * 1e-4  # turns of an all-reduce of three; the first stage's comes last
    assert found.step_seconds == pytest.approx(alone.step_seconds + reduced)


def side_by_side(name, modules, mebibytes, speed=1.0, **options):
    """On two ranks whose link takes as long for a module's gradients as its backward takes, or is so much quicker."""
    found = chain_of((100,) * modules, parameters=mebibytes << 18)
    link = Link(0.0, speed * (mebibytes << 20) / B)
    topology = Topology(2, 1, link, link, 1 << 40)
    made = plan(found, topology, assumptions=LINKS_ONLY, schedule=Choice(name, options))
    return made, simulate(made, Case(found, topology, LINKS_ONLY))


def test_groups_leave_from_inside_the_backward_and_only_the_last_is_waited_for():
    """One stage of four modules, each a bucket; and the same where a bucket holds all of it."""
    made, found = side_by_side("accumulation", 4, 2, micro_batches=2)
    assert [(group.name, group.parameters) for group in made.groups] == [
        (f"stage 0, bucket {place}", (f"{name}.weight",)) for place, name in enumerate("dcba")
    ]
    assert found.sent_bytes == pytest.approx(forecast(made))
    assert found.step_seconds == pytest.approx(2 * 4 * (F + B) + B, rel=1e-3)
    launched = [flight.launch_seconds for flight in found.flights]
    assert launched == pytest.approx([2 * 4 * (F + B) - turns * B for turns in (3, 2, 1, 0)], rel=1e-3)
    flat = replace(made.groups[0], parameters=tuple(f"{name}.weight" for name in "dcba"))
    case = Case(chain_of((100,) * 4, parameters=2 << 18), Topology(2, 1, *[Link(0.0, (2 << 20) / B)] * 2, 1 << 40))
    whole = simulate(replace(made, groups=(flat,)), Case(case.profile, case.topology, LINKS_ONLY))
    assert whole.step_seconds == pytest.approx(2 * 4 * (F + B) + 4 * B, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}])
@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_a_delayed_all_reduce_has_a_whole_step_to_hide_in(speed, options):
    """Of four modules it takes as long as their backward, or twice as long, which is more than the step computes."""
    made, found = side_by_side("delayed_all_reduce", 4, 4, speed, **options)
    assert found.sent_bytes == pytest.approx(forecast(made)) and len(made.groups) == 2
    assert found.step_seconds == pytest.approx(max(4 * (F + B), 4 * B / speed), rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"slack": 2, "clip_norm": 1.0}])
@pytest.mark.parametrize(("name", "messages", "waits"), [("ring", ring_messages, 0), ("zero_ring", lent_messages, 3)])
def test_a_ring_has_no_bubble_and_sends_the_forecasts_bytes(name, messages, waits, options):
    """Every rank is busy all the time where links cost nothing; where they cost most, one link is, but
    for what waits for room where that is short."""
    made, found = played(name, 3, modules=3, **options)
    assert found.step_seconds == pytest.approx(3 * (F + B)) and not found.exposed_seconds
    assert found.sent_bytes == pytest.approx(forecast(made))
    slow = played(name, 3, latency=2e-2, **options)[1].step_seconds
    clip = Clip(1.0) if options else None
    sent = Counter(one.sender for one in messages(cyclic(3, slack=options.get("slack", 0)), clip))
    busiest = max(sent.values()) * 2e-2
    assert busiest * (1 - 1e-9) <= slow <= (busiest + waits * 2e-2) * (1 + 1e-9)


def test_a_stage_that_runs_again_is_paid_for_and_the_slowest_stage_sets_the_pace():
    again = played("gpipe", 2, micro_batches=3, recompute=[0, 1])[1]
    assert again.step_seconds == pytest.approx(4 * (2 * F + B))
    uneven = played("pipeline", 2, modules=3, micro_batches=6, points=["b"])[1]
    assert uneven.step_seconds == pytest.approx(6 * 2 * (F + B))


def test_other_machines_and_tables_by_row_are_refused():
    made, _ = played("gpipe", 2)
    case = Case(chain_of((100,) * 2), machines(3), LINKS_ONLY)
    with pytest.raises(ValueError, match="puts stages on 2 workers, the machines have 3; plan again"):
        simulate(made, case)
    case = Case(chain_of((100,) * 2), machines(2), LINKS_ONLY)
    first = replace(made.groups[0], layout="row_sharded", exchange=Choice("owned_rows"))
    with pytest.raises(ValueError, match=r"schedule gpipe keeps tables whole, so .* cannot go by row: plan again"):
        simulate(replace(made, groups=(first, *made.groups[1:])), case)
