"""A plan in one bucket holds the same parameters, sends as much, and waits for the last gradient of all."""

from dataclasses import replace

import pytest

from armillary.facts.plan import Choice
from armillary.planning.one_bucket import in_one_bucket
from armillary.planning.planner import plan
from armillary.planning.pricing import SGD, Case, dense_forecast
from armillary.planning.simulator import simulate
from planning_cases import dense, machines, model, table

LARGE = 1_000_000  # elements: more than a bucket holds
HALF = replace(dense("half", LARGE, 2), dtype="float16")
PROFILE = model(
    dense("first", LARGE, 4), HALF, table("rows", 3), dense("last", LARGE, 0), dense("tail", 10, 5),
    replace(dense("unseen", 10, 9), arrival=None),
)  # fmt: skip


def case_of(**fields):
    return Case(PROFILE, machines(4, **fields), SGD)


def made(case, **fields):
    return plan(PROFILE, case.topology, constraints={"rows": Choice("owned_rows")}, assumptions=SGD, **fields)


@pytest.mark.parametrize("mean", ["workers", "weights"])
def test_what_is_alike_and_learns_is_one_group_where_the_last_of_it_stood(mean):
    case = case_of()
    several = made(case, mean=mean)
    one = in_one_bucket(several, case)
    names = [group.parameters for group in one.groups]
    assert ("last", "first", "tail") in names and ("half",) in names and ("unseen",) in names and ("rows",) in names
    assert len(names) == 4
    order = [parameter for group in several.groups for parameter in group.parameters]
    assert sorted(order) == sorted(parameter for group in names for parameter in group)
    assert names.index(("rows",)) < names.index(("last", "first", "tail"))
    whole = next(group for group in one.groups if "first" in group.parameters)
    extra = 4 * (3 + (mean == "weights"))  # a used flag each, and a weight
    assert whole.forecast == dense_forecast(2 * 4 * LARGE + 40 + extra, Choice("all_reduce"), case)


def test_a_plan_without_two_alike_is_left_as_it_is():
    case = case_of()
    one = in_one_bucket(made(case), case)
    assert in_one_bucket(one, case) is one


def test_it_pays_where_messages_cost_and_not_where_bytes_do():
    slow_start, slow_link = case_of(latency=1e-2, megabits=1e5), case_of(latency=0.0, megabits=10.0)
    steps = [
        [simulate(way, case).step_seconds for way in (made(case), in_one_bucket(made(case), case))]
        for case in (slow_start, slow_link)
    ]
    assert steps[0][1] < steps[0][0]
    assert steps[1][1] >= steps[1][0]
