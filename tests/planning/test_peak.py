"""What a step adds in its fullest moment: a plain step, what crosses, or the optimizer's temporaries."""

from dataclasses import replace

import pytest

from armillary.planning.link_costs import Upkeep
from armillary.planning.memory import NothingFits
from armillary.planning.planner import plan
from armillary.planning.pricing import ADAM, SGD
from armillary.plans import Choice, Topology
from planning_cases import dense, machines, model, table

KIB = 1 << 10


def case(step_bytes=0, whole_step_bytes=0):
    found = model(table("t.weight", 0, rows=1000), dense("d.weight", 30_000, 1))
    return replace(found, step_bytes=step_bytes, whole_step_bytes=whole_step_bytes)


def peak(profile, way, topology: Topology | None = None, assumptions=SGD):
    made = plan(profile, topology or machines(2), constraints={"t.weight": Choice(way)}, assumptions=assumptions)
    return made.forecast.peak_bytes


def test_where_tables_travel_whole_a_step_is_that_with_their_whole_gradients():
    assert peak(case(500 * KIB, 700 * KIB), "all_reduce") == 700 * KIB


@pytest.mark.parametrize("way", ["owned_rows", "gather_rows"])
def test_rows_on_their_way_come_to_the_step_by_row(way):
    profile = case(500 * KIB, 700 * KIB)
    rows = profile.parameter("t.weight").rows
    read = 2 * 2 * rows.alpha_worker * rows.rows * rows.row_bytes  # by both workers, held twice
    assert peak(profile, way) - 500 * KIB == pytest.approx(read, rel=0.1)


def test_a_step_is_never_less_than_what_is_kept_for_backward():
    profile = case()
    kept = sum(stage.activation_bytes for stage in profile.stages)
    assert peak(profile, "all_reduce") == kept == profile.peak_bytes


def test_an_optimizer_that_makes_temporaries_may_need_more_than_backward():
    profile = case(20 * KIB, 20 * KIB)
    largest = max(fact.bytes for fact in profile.parameters)
    assert peak(profile, "all_reduce", assumptions=replace(SGD, step_slots=2)) == 2 * largest > 20 * KIB


def test_temporaries_are_those_of_the_optimizer_that_steps_the_parameter():
    profile, own = case(20 * KIB, 20 * KIB), {"t.weight": Upkeep(0, False, step_slots=0.0)}
    assumed = replace(SGD, step_slots=2, own=own)
    small = profile.parameter("d.weight").bytes
    assert small < profile.parameter("t.weight").bytes
    assert peak(profile, "all_reduce", assumptions=assumed) == 2 * small > 20 * KIB


def test_what_a_step_adds_must_fit_beside_what_is_held():
    profile = case(500 * KIB, 500 * KIB)
    small = replace(machines(2), memory_bytes=450 * KIB)
    with pytest.raises(NothingFits, match=r"activations 500\.0 KiB"):
        plan(profile, small, assumptions=SGD)


TABLES = [table("t", 0, rows=20_000, width=64), table("u", 1, rows=20_000, width=64, alpha=0.8, union=1.0)]


@pytest.mark.parametrize("assumptions", [SGD, replace(ADAM, step_slots=2.0), replace(SGD, step_slots=3.0)])
@pytest.mark.parametrize("step", [(0, 0), (500 * KIB, 9_000 * KIB), (500 * KIB, 500 * KIB)])
@pytest.mark.parametrize("tables", [TABLES, [], [table("t", 0, rows=20_000, width=64, refusals=("max_norm",))]])
def test_whatever_the_limit_a_plan_that_is_made_fits_by_its_own_forecast(assumptions, step, tables):
    seen = replace(model(*tables, dense("d", 300_000, 2)), step_bytes=step[0], whole_step_bytes=step[1])
    roomy = plan(seen, machines(4), assumptions=assumptions).forecast
    most = roomy.memory_bytes + roomy.peak_bytes
    fitting = 0
    for limit in (int(most * share / 20) for share in range(1, 22, 2)):
        try:
            made = plan(seen, machines(4, memory=limit), assumptions=assumptions).forecast
        except NothingFits:
            assert limit < most
            continue
        assert made.memory_bytes + made.peak_bytes <= limit
        fitting += 1
    assert fitting


def test_a_table_whose_rows_on_their_way_are_more_than_itself_stays_whole_where_only_that_fits():
    """With Adam its 4.9 MiB are held four times; by row a fourth of that, and 3.4 times on their way."""
    busy, topology = model(table("t", 0, rows=20_000, width=64, alpha=0.85, union=1.0)), machines(4, megabits=100.0)
    assert plan(busy, topology).group_of("t").layout == "row_sharded"
    tight = plan(busy, replace(topology, memory_bytes=20 << 20)).group_of("t")
    assert tight.layout == "replicated" and tight.reason.endswith("does not fit in memory")


def test_memory_that_the_optimizer_needs_for_a_moment_is_told_where_nothing_fits():
    seen = model(dense("d", 1 << 20))
    with pytest.raises(NothingFits, match=r"activations 0 B, 8\.0 MiB more in the fullest moment of a step"):
        plan(seen, machines(2, memory=17 << 20), assumptions=replace(ADAM, step_slots=2.0))
    with pytest.raises(NothingFits) as caught:  # no batch is small enough for that
        plan(replace(seen, step_bytes=1 << 20), machines(2, memory=17 << 20), assumptions=replace(ADAM, step_slots=2.0))
    assert "times smaller" not in str(caught.value)
