"""Whole plans to hold the chosen one against: every way once, the user's demands kept, what does not fit left out."""

from armillary.facts.plan import Choice
from armillary.planning.planner import explain, plan
from armillary.planning.pricing import SGD, Case
from armillary.planning.rivals import CHOSEN, by_simulation, rivals
from armillary.planning.simulator import simulate
from planning_cases import dense, machines, model, table

PROFILE = model(table("a", 0), table("b", 1, rows=1000, alpha=0.5), dense("d", 1000, 2))


def test_the_chosen_plan_comes_first_and_every_other_way_of_a_table_once():
    found = rivals(PROFILE, machines(4), assumptions=SGD)
    assert next(iter(found)) == CHOSEN
    assert found[CHOSEN] == plan(PROFILE, machines(4), assumptions=SGD)
    ways = {str(verdict.candidate.choice) for verdict in explain(PROFILE, machines(4), assumptions=SGD)}
    assert set(found) - {CHOSEN} <= ways and len(ways) - len(found) <= 1
    carried = {
        name: {group.exchange.name for group in one.groups if "d" not in group.parameters}
        for name, one in found.items()
    }
    assert all(carried[name] == {name.split("(")[0]} for name in carried if name not in (CHOSEN, "all_reduce"))


def test_what_the_user_demands_is_the_same_in_all_of_them():
    found = rivals(PROFILE, machines(4), constraints={"a": Choice("gather_rows")}, assumptions=SGD)
    for one in found.values():
        (group,) = (group for group in one.groups if "a" in group.parameters)
        assert group.exchange == Choice("gather_rows")
    assert len(found) > 2


def test_a_plan_that_does_not_fit_is_no_rival():
    whole, tight = (rivals(PROFILE, machines(4, memory=size), assumptions=SGD) for size in (1 << 40, 60_000_000))
    assert set(whole) - set(tight) == {"all_reduce"}  # two tables of 51 MB and a gradient


def test_the_best_is_the_one_whose_simulated_step_is_shortest():
    topology = machines(4, megabits=50.0)
    found, case = rivals(PROFILE, topology, assumptions=SGD), Case(PROFILE, topology, SGD)
    order = by_simulation(found, case)
    seconds = [simulate(found[name], case).step_seconds for name in order]
    assert sorted(order) == sorted(found) and seconds == sorted(seconds)
