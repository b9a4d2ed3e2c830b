"""Owners priced anew: a table moves where others are clearly cheaper; the new plan is what `plan` would have said."""

from dataclasses import replace

import pytest

from armillary.facts.plan import Choice
from armillary.planning.owners import reprice, still_allowed, with_owners
from armillary.planning.planner import plan
from armillary.planning.prefetch import prefetching
from armillary.planning.pricing import SGD, Case
from planning_cases import dense, machines, model, row_facts, table

OWNED, HASHED, ONE = (Choice("owned_rows", options) for options in ({}, {"order": "hashed"}, {"owners": 1}))
TOPOLOGY = machines(megabits=100.0)
ALL_ON_ONE = {"load_modulo": (1.0, 0.0, 0.0, 0.0)}


def facts(skewed=(), of="one two"):
    tables = [table(name, facts=replace(row_facts(), **(ALL_ON_ONE if name in skewed else {}))) for name in of.split()]
    return model(*tables, dense("head", arrival=1))


def planned(choice=OWNED, seen=None, topology=TOPOLOGY):
    seen = seen or facts()
    wanted = {fact.name: choice for fact in seen.parameters if fact.rows is not None}
    return plan(seen, topology, constraints=wanted, assumptions=SGD)


def found(before, seen, constraints=None, margin=0.1, topology=TOPOLOGY):
    case = Case(seen, topology, SGD)
    return {one.table: one for one in reprice(before, case, constraints or {}, ["one", "two"], margin)}


def after(*args, **fields):
    return {name: one.after.choice for name, one in found(*args, **fields).items()}


def test_rows_that_all_fall_to_one_owner_are_dealt_anew_and_balanced_ones_stay():
    assert after(planned(), facts(skewed=["one"])) == {"one": HASHED, "two": OWNED}
    assert after(planned(HASHED), facts(skewed=["one"])) == {"one": HASHED, "two": HASHED}


def test_an_only_owner_gives_way_to_all():
    assert after(planned(ONE), facts()) == {"one": OWNED, "two": OWNED}


def test_only_tables_that_were_looked_at_are_asked_for():
    case = Case(facts(skewed=["one", "two"]), TOPOLOGY, SGD)
    assert [one.table for one in reprice(planned(), case, {}, ["two"])] == ["two"]


def test_a_gain_within_the_margin_moves_nothing():
    one = found(planned(), facts(skewed=["one"]))["one"]
    gain = 1 - one.after.forecast.seconds / one.before.forecast.seconds
    assert 0.1 < gain < 0.9
    assert after(planned(), facts(skewed=["one"]), margin=gain - 1e-6)["one"] == HASHED
    assert after(planned(), facts(skewed=["one"]), margin=gain + 1e-6)["one"] == OWNED


@pytest.mark.parametrize(
    ("constraint", "moves"),
    [("row_sharded", True), ("owned_rows", True), (OWNED, False), ("replicated", False), ("gather_rows", False)],
)
def test_a_constraint_is_honoured(constraint, moves):
    """One that the plan itself does not meet moves nothing either: tables keep their exchange."""
    assert after(planned(), facts(skewed=["one"]), {"one": constraint})["one"] == (HASHED if moves else OWNED)


def needed_with(moved, before):
    """In the fullest moment of a step, with that table moved."""
    more = moved.after.forecast.memory_bytes - moved.before.forecast.memory_bytes
    return before.forecast.memory_bytes + before.forecast.peak_bytes + more


def test_owners_who_would_hold_more_than_there_is_are_not_considered():
    """Three of four owners, whom the user demands, hold a third of the table each where four held a quarter."""
    wanted, seen = {"one": Choice("owned_rows", {"owners": 3})}, facts(skewed=["one"], of="one")
    before = planned(seen=seen)
    (more,) = reprice(before, Case(seen, TOPOLOGY, SGD), wanted, ["one"])
    needed = needed_with(more, before)
    for room, moves in ((needed + 1, True), (needed - 1, False)):
        tight = replace(TOPOLOGY, memory_bytes=int(room))
        assert (after(before, seen, wanted, topology=tight)["one"] == wanted["one"]) == moves


def test_frozen_parameters_and_activations_count_as_held():
    seen = model(table("one", facts=replace(row_facts(), **ALL_ON_ONE)), dense("f", requires_grad=False), activations=5)
    wanted, before = {"one": Choice("owned_rows", {"owners": 3})}, planned(seen=seen)
    (more,) = reprice(before, Case(seen, TOPOLOGY, SGD), wanted, ["one"])
    needed = needed_with(more, before) + 4000
    assert before.forecast.peak_bytes > 5  # of activations
    tight = replace(TOPOLOGY, memory_bytes=int(needed - 1))
    assert after(before, seen, wanted, topology=tight)["one"] == OWNED
    roomy = replace(TOPOLOGY, memory_bytes=int(needed + 1))
    assert after(before, seen, wanted, topology=roomy)["one"] == wanted["one"]


@pytest.mark.parametrize("is_early", [False, True])
def test_the_plan_with_new_owners_is_the_one_the_planner_makes_of_what_was_measured(is_early):
    seen = facts(skewed=["one"])

    def ahead(made, of):
        return prefetching(made, of, TOPOLOGY) if is_early else made

    moved = with_owners(ahead(planned(), facts()), Case(seen, TOPOLOGY, SGD), {"one": HASHED}, ["because"])
    wanted = {"one": HASHED, "two": OWNED}
    fresh = ahead(plan(seen, TOPOLOGY, constraints=wanted, assumptions=SGD), seen)
    assert [replace(group, reason="") for group in moved.groups] == [
        replace(group, reason="") for group in fresh.groups
    ]
    assert moved.forecast == fresh.forecast
    assert moved.notes[-1] == "because"


def test_owners_are_restored_where_the_plan_and_the_user_let_them():
    case, before = Case(facts(), TOPOLOGY, SGD), planned()
    left = {"one": HASHED, "two": OWNED, "head": HASHED, "gone": HASHED}
    assert still_allowed(before, case, {}, left) == {"one": HASHED}
    assert still_allowed(before, case, {"one": OWNED}, left) == {}
    assert still_allowed(before, case, {}, {"one": Choice("owned_rows_by_node")}) == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"margin": 1.0}, "0 <= margin < 1, got 1.0"),
        ({"topology": machines(2)}, "the topology is of 2 workers in nodes of 1, the plan of 4 in nodes of 1"),
        ({"seen": model(table("one"), table("two"), workers=2)}, "the profile is of 2 workers"),
        ({"constraints": {"three": "row_sharded"}}, "'three' names no parameter"),
    ],
)
def test_what_is_of_another_job_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        found(planned(), **{"seen": facts(), **fields})
