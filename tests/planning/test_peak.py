"""What a step adds in its fullest moment: a plain step, what crosses, or the optimizer's temporaries."""

from dataclasses import replace

import pytest

from armillary.facts.plan import Choice
from armillary.facts.topology import Topology
from armillary.planning.fitting import NothingFits
from armillary.planning.planner import plan
from armillary.planning.pricing import SGD
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


def test_what_a_step_adds_must_fit_beside_what_is_held():
    profile = case(500 * KIB, 500 * KIB)
    small = replace(machines(2), memory_bytes=450 * KIB)
    with pytest.raises(NothingFits, match=r"activations 500\.0 KiB"):
        plan(profile, small, assumptions=SGD)
