"""What a report tells of groups that are not pushed in every step: over whole periods, as the plan foresees it."""

import pytest

from armillary.exchanges import build_dense
from armillary.planning.pricing import Case
from armillary.planning.simulator import simulate
from armillary.plans import Choice, Record, Trace
from armillary.session.measured import measured_in, run_forecast
from armillary.session.traffic_meter import TrafficMeter, usual_seconds
from contracts.journey import planned, profile_of
from planning_cases import machines

PLAN = planned(2, Choice("local_steps", {"steps": 4}))
CASE = Case(profile_of(2), machines(2, megabits=0.1))


def test_the_usual_step_has_its_part_of_a_meeting():
    steps = [1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 5.0]
    assert usual_seconds(steps, 4) == pytest.approx(2.0)  # the last four; no whole period is before them
    assert usual_seconds([1.0, 1.0, 1.0, 5.0, 50.0, 1.0, 1.0, 5.0, *steps[3:]], 4) == pytest.approx(2.0)  # of 3 periods
    assert usual_seconds(steps) == 1.0 and usual_seconds([]) == 0.0 and usual_seconds([3.0, 5.0], 4) == 4.0
    assert TrafficMeter(PLAN).period == 4 and TrafficMeter(planned(2)).period == 1


def trace_of(records):
    return Trace(tuple(tuple(records) for _ in range(2)))


def test_seconds_of_a_group_are_means_from_one_meeting_to_the_next():
    name = PLAN.groups[0].name
    records = [Record(step, name, "AllReduce", float(step), 0.8, 1.0) for step in (4, 8, 12)]
    assert measured_in(trace_of(records), PLAN).seconds(name).median == pytest.approx(0.2)
    assert measured_in(trace_of(records[:1]), PLAN).seconds(name).median == pytest.approx(0.2)


def test_bytes_are_those_of_the_steps_that_were_taken():
    name = PLAN.groups[0].name
    whole = build_dense("local_steps", steps=1)
    found = run_forecast(PLAN, CASE, range(2, 12)).groups[name].sent_bytes  # meets after steps 4, 8 and 12
    every = run_forecast(planned(2, Choice("local_steps", {"steps": 1})), CASE, range(2, 12)).groups[name].sent_bytes
    assert found == pytest.approx(0.3 * every) and whole.share_due == 1.0


def test_a_meeting_is_played_behind_the_step_and_nothing_hides_it():
    flights = {flight.action for flight in simulate(PLAN, CASE).flights}
    alone = simulate(PLAN, CASE)
    last = max(alone.flights, key=lambda flight: flight.land_seconds)
    assert flights == {"meet"} and last.land_seconds == pytest.approx(alone.step_seconds)
    summed = simulate(planned(2, Choice("local_steps", {"steps": 1})), CASE)
    assert sum(one.sent_bytes for one in alone.flights) == pytest.approx(
        sum(one.sent_bytes for one in summed.flights) / 4
    )
