"""Whole plans to hold the chosen one against: every way once, the user's demands kept, what does not fit left out."""

from dataclasses import replace

import pytest

from armillary.planning.planner import explain, plan
from armillary.planning.pricing import SGD, Case
from armillary.planning.quicker_ways import OTHER, with_expected
from armillary.planning.request import PlanRequest
from armillary.planning.simulator import simulate
from armillary.plans import Choice
from armillary.session import autotune as alternatives_file
from armillary.session.autotune import AHEAD, CHOSEN, alternatives, at_once, best, by_simulation, with_prefetch
from planning_cases import dense, machines, model, table

PROFILE = model(table("a", 0), table("b", 1, rows=1000, alpha=0.5), dense("d", 1000, 2))


def test_the_chosen_plan_comes_first_and_every_other_way_of_a_table_once():
    found = alternatives(Case(PROFILE, machines(4), SGD), PlanRequest())
    assert next(iter(found)) == CHOSEN
    case = Case(PROFILE, machines(4), SGD)
    made = plan(PROFILE, machines(4), assumptions=SGD)
    assert with_expected(found[CHOSEN], case) == replace(made, notes=tuple(n for n in made.notes if OTHER not in n))
    ways = {str(verdict.candidate.choice) for verdict in explain(Case(PROFILE, machines(4), SGD), PlanRequest())}
    by_way = [name for name in found if "bucket" not in name]
    assert set(by_way) - {CHOSEN} <= ways and len(ways) - len(by_way) <= 1
    carried = {
        name: {group.exchange.name for group in one.groups if "d" not in group.parameters}
        for name, one in found.items()
    }
    assert all(
        carried[name] == {name.split("(")[0]}
        for name in carried
        if name in by_way and name not in (CHOSEN, "all_reduce")
    )


def test_what_the_user_demands_is_the_same_in_all_of_them():
    found = alternatives(Case(PROFILE, machines(4), SGD), PlanRequest(constraints={"a": Choice("gather_rows")}))
    for one in found.values():
        (group,) = (group for group in one.groups if "a" in group.parameters)
        assert group.exchange == Choice("gather_rows")
    assert len(found) > 2


def test_a_plan_that_does_not_fit_is_no_alternative():
    whole, tight = (
        alternatives(Case(PROFILE, machines(4, memory=size), SGD), PlanRequest()) for size in (1 << 40, 70_000_000)
    )
    # two tables of 51 MB and a gradient
    missing = sorted(set(whole) - set(tight))
    assert missing[0] == "all_reduce" and all(name.startswith("all_reduce + ") for name in missing[1:])


def test_the_chosen_plan_and_what_is_whole_stand_there_in_buckets_of_other_sizes():
    found = alternatives(Case(PROFILE, machines(4), SGD), PlanRequest())
    sizes = {name: len(one.groups) for name, one in found.items()}
    of_whole = {name: count for name, count in sizes.items() if name.startswith("all_reduce")}
    assert sorted(of_whole.values()) == [1, 2]  # a table has 51 MB, more than any bucket but one of all
    assert not any("bucket" in name for name in sizes if not name.startswith(("chosen", "all_reduce")))


def test_the_best_is_the_one_whose_simulated_step_is_shortest():
    topology = machines(4, megabits=50.0)
    found, case = alternatives(Case(PROFILE, topology, SGD), PlanRequest()), Case(PROFILE, topology, SGD)
    order = by_simulation(found, case)
    seconds = [simulate(found[name], case).step_seconds for name in order]
    assert sorted(order) == sorted(found) and seconds == sorted(seconds)


def contenders():
    case = Case(PROFILE, machines(4, megabits=50.0), SGD)
    found = alternatives(Case(PROFILE, case.topology, SGD), PlanRequest(constraints={"a": "owned_rows"}))
    return found, with_prefetch(found, case), case


def test_every_plan_with_tables_to_foresee_stands_beside_the_same_looking_ahead():
    found, both, _ = contenders()
    by_row = [name for name, one in found.items() if any(g.exchange.name == "owned_rows" for g in one.groups)]
    assert set(both) == set(found) | {name + AHEAD for name in by_row}
    assert all(both[name].looks_ahead == name.endswith(AHEAD) for name in both)
    assert all(both[name + AHEAD].looks_ahead for name in by_row)


@pytest.mark.parametrize("ahead_first", [True, False])
def test_the_best_with_prefetch_and_the_best_without_are_always_timed(monkeypatch, ahead_first):
    """However the clock orders them; the others follow by its order."""
    _, both, case = contenders()
    order = sorted(both, key=lambda name: both[name].looks_ahead is not ahead_first)
    monkeypatch.setattr(alternatives_file, "by_simulation", lambda plans, case: order)
    plain, ahead = (next(name for name in order if both[name].looks_ahead is way) for way in (False, True))
    for count in (2, 3, 4, len(both)):
        kept = best(both, case, count)
        rest = [name for name in order if name not in (plain, ahead)]
        assert set(kept) == {plain, ahead, *rest[: count - 2]}
        assert list(kept) == [name for name in order if name in kept]


def test_without_plans_that_prefetch_the_best_are_those_of_the_shortest_step():
    found, _, case = contenders()
    assert list(best(found, case, 2)) == by_simulation(found, case)[:2]


def test_plans_are_timed_beside_one_another_only_as_far_as_memory_goes():
    """Room for the model, a copy under way and two plans is not room for three; the first is kept however little there
    is; who is left out is said."""
    roomy = Case(PROFILE, machines(4), SGD)
    found = alternatives(Case(PROFILE, roomy.topology, SGD), PlanRequest())
    first, second, third, *_ = found
    assert at_once(found, roomy) == found
    model_bytes = sum(fact.bytes for fact in PROFILE.parameters)
    two = 2 * model_bytes + sum(found[name].forecast.memory_bytes for name in (first, second))
    for memory, kept in ((two, [first, second]), (two - 1, [first]), (1, [first])):
        left = at_once(found, Case(PROFILE, machines(4, memory=int(memory)), SGD))
        assert list(left) == kept
        assert all(third in one.notes[-1] and "no further copy" in one.notes[-1] for one in left.values())
