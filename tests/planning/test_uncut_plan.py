"""Laws of a plan that leaves the model whole and is a step late: what is sent and held, which rival it calls better."""

import dataclasses
from collections import Counter

import pytest

from armillary.planning.planner import plan
from armillary.planning.stage_plan import BUCKET_BYTES
from armillary.plans import Choice, Plan, StageFact, bytes_text
from armillary.schedules import options_of
from armillary.schedules.cyclic import cyclic
from planning_cases import LINKS_ONLY, dense, machines, model
from schedule_messages import ring_messages
from schedule_pictures import parse

LATE = Choice("delayed_all_reduce")


def planned(workers=2, seconds=3.0, elements=1000, layers=4, megabits=1000.0, choice=LATE, **wishes):
    """A model of equal layers; forward a third of `seconds`, backward the rest."""
    facts = [dense(f"{place}.weight", elements, arrival=layers - place) for place in range(layers)]
    profile = model(*facts, workers=workers, seconds=seconds)
    return plan(
        profile,
        machines(workers, megabits=megabits, latency=0.0),
        assumptions=dataclasses.replace(LINKS_ONLY, optimizer_slots=2),
        schedule=choice,
        **wishes,
    )


def test_a_plan_goes_to_json_and_back_with_its_picture_and_says_that_it_is_not_exact():
    made = planned(3, choice=Choice("delayed_all_reduce", {"clip_norm": 0.5}))
    assert Plan.from_json(made.to_json()) == made
    picture = options_of(Plan.from_json(made.to_json())).picture()
    assert parse(picture).staleness == ((1,),) and picture.startswith("delayed_all_reduce: 1 worker")  # of each
    assert all(group.departures == ("stale",) for group in made.groups) and "NOT exact: every gradient" in str(made)
    assert "schedule delayed_all_reduce(clip_norm=0.5)" in str(made)


def test_buckets_of_five_mebibytes_in_order_of_arrival_unless_said_otherwise():
    layer = BUCKET_BYTES // 8  # half a bucket each, in float32
    assert [group.parameters for group in planned(elements=layer).groups] == [
        ("3.weight", "2.weight"), ("1.weight", "0.weight"),
    ]  # fmt: skip
    small = Choice("delayed_all_reduce", {"bucket_bytes": 1})
    assert [len(group.parameters) for group in planned(choice=small).groups] == [1] * 4


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_gradients_and_a_flag_each_are_sent_as_an_all_reduce_and_held_twice(workers):
    total = 4 * (4 * 1000 + 4)
    made = planned(workers)
    assert sum(group.forecast.sent_bytes for group in made.groups) == pytest.approx(2 * (workers - 1) / workers * total)
    assert sum(group.forecast.memory_bytes for group in made.groups) == 5 * total  # weight, two gradients, two moments


def test_plain_data_parallelism_is_called_better_where_its_backward_has_room_for_what_is_sent():
    """At 1 GB/s and two workers 16 MB take 16 ms."""
    for seconds, better, late, plain in ((0.030, True, "0 us", "0 us"), (0.020, False, "0 us", "2.7 ms")):
        text = " ".join(planned(seconds=seconds, elements=1_000_000, megabits=8000.0).notes)
        assert ("has room enough, then, and is the better plan" in text) == better
        assert f": {late} at least remain; plain" in text and f": {plain} at least remain" in text
    assert "schedule simultaneous is exact, and as fast" in " ".join(planned(1).notes)


@pytest.mark.parametrize("workers", [2, 3, 9, 10])
def test_it_is_held_against_the_ring_with_the_numbers(workers):
    text, weights = " ".join(planned(workers).notes), 4 * (4 * 1000 + 4)
    sent = Counter(message.sender for message in ring_messages(cyclic(workers)))
    assert f"{bytes_text(2 * weights * (workers - 1) / workers)} here" in text
    assert f"{bytes_text(weights / workers * max(sent.values()))} by its busiest worker" in text
    assert f"{cyclic(workers).stale_share:.0%} of the pairs" in text
    assert ("this is the better plan where bandwidth is what costs" in text) == (3 <= workers <= 9)
    assert ("the ring is the better plan" in text) != (3 <= workers <= 9)


def test_what_a_delayed_all_reduce_cannot_grant_is_refused():
    for wish in ({"lazy": ["0.weight"]}, {"constraints": {"0.weight": "replicated"}}, {"mean": "weights"}):
        with pytest.raises(ValueError, match=f"{next(iter(wish))} have no effect"):
            planned(**wish)
    with pytest.raises(ValueError, match="delayed_all_reduce has no mode, slack; it may have bucket_bytes, clip_norm"):
        planned(choice=Choice("delayed_all_reduce", {"mode": "ring", "slack": 1}))


def test_backward_is_that_of_the_profile():
    """Guards the fixture: a stage's forward and backward are told apart."""
    assert model(dense(), seconds=3.0).stages == (StageFact("", 0, 0, 0, 1.0, 2.0),)
