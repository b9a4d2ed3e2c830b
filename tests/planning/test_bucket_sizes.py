"""A plan takes the smallest buckets that a clock finds about the fastest, and says so; any size holds the same."""

from dataclasses import replace

import pytest

from armillary.planning.grouping import CLOSE, by_clock, counted, sizes
from armillary.planning.planner import bucketings, plan, plan_by_rule
from armillary.planning.pricing import SGD, Case, dense_forecast
from armillary.planning.request import PlanRequest
from armillary.planning.simulator import simulate
from armillary.plans import Choice
from planning_cases import dense, machines, model, table

LARGE = 1_000_000  # elements: more than a small bucket holds
HALF = replace(dense("half", LARGE, 2), dtype="float16")
ROWS = {"rows": Choice("owned_rows")}
PROFILE = model(
    dense("first", LARGE, 4), HALF, table("rows", 3), dense("last", LARGE, 0), dense("tail", 10, 5),
    replace(dense("unseen", 10, 9), arrival=None),
)  # fmt: skip
DEEP = model(*[dense(f"layer {place}", LARGE, place) for place in range(10)])  # 40 MB in layers of 4


def bucketed(profile, topology, **fields):
    """From the smallest buckets to one."""
    return sorted(bucketings(Case(profile, topology, SGD), PlanRequest(**fields)), key=lambda one: -len(one.groups))


@pytest.mark.parametrize("mean", ["workers", "weights"])
def test_what_is_alike_and_learns_is_one_group_where_the_last_of_it_stood(mean):
    several, one = bucketed(PROFILE, machines(4), constraints=ROWS, mean=mean)
    names = [group.parameters for group in one.groups]
    assert ("last", "first", "tail") in names and ("half",) in names and ("unseen",) in names and ("rows",) in names
    assert len(names) == 4
    order = [parameter for group in several.groups for parameter in group.parameters]
    assert sorted(order) == sorted(parameter for group in names for parameter in group)
    assert names.index(("rows",)) < names.index(("last", "first", "tail"))
    whole = next(group for group in one.groups if "first" in group.parameters)
    facts = [PROFILE.parameter(name) for name in whole.parameters]
    assert whole.forecast == dense_forecast(facts, Choice("all_reduce"), Case(PROFILE, machines(4), SGD))


def test_sizes_that_make_no_difference_are_one_plan_without_a_note():
    small = model(dense("a", 10, 0), dense("b", 10, 1))
    (only,) = bucketed(small, machines(4))
    assert len(only.groups) == 1 and not any("travel in" in note for note in only.notes)


def test_every_size_is_there_once():
    assert [len(one.groups) for one in bucketed(DEEP, machines(4))] == [10, 2, 1]
    assert [len(one.groups) for one in bucketed(DEEP, machines(4, backend="nccl"))] == [3, 2, 1]


@pytest.mark.parametrize(("latency", "megabits", "taken"), [(1e-2, 1e5, 1), (0.0, 1e4, 10)])
def test_large_where_messages_cost_and_small_where_bytes_do(latency, megabits, taken):
    topology = machines(4, latency=latency, megabits=megabits)
    made = plan(DEEP, topology, assumptions=SGD)
    assert len(made.groups) == taken
    seconds = [simulate(one, Case(DEEP, topology, SGD)).step_seconds for one in bucketed(DEEP, topology)]
    mine = simulate(made, Case(DEEP, topology, SGD)).step_seconds
    assert mine <= (1 + CLOSE) * min(seconds) and max(seconds) > (1 + CLOSE) * min(seconds)
    (note,) = (note for note in made.notes if "travel in" in note)
    assert counted(made) in note and "10 buckets" in note and "1 bucket " in note


def test_of_those_that_take_about_as_long_the_smallest_buckets_are_taken():
    topology = machines(4, latency=0.0, megabits=1e7)  # nothing costs anything
    case = Case(DEEP, topology, SGD)
    small, large, one = bucketed(DEEP, topology)
    assert by_clock([small, large, one], case)[0].groups == small.groups
    assert [other.groups for other in by_clock([large, one, small], case)] == [large.groups, one.groups, small.groups]


def test_the_rule_keeps_small_buckets():
    slow_start = machines(4, latency=1e-2, megabits=1e5)
    assert len(plan_by_rule(Case(DEEP, slow_start, SGD), PlanRequest()).groups) == 10


def test_sizes_grow():
    for backend in ("gloo", "nccl"):
        found = sizes(backend)
        assert list(found) == sorted(found) and len(set(found)) == len(found)
