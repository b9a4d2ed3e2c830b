"""Parallax's rule, and a plan made by it."""

import pytest

from armillary.planning.constraints import parallax
from armillary.planning.planner import plan_by_rule
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.plans import Choice
from planning_cases import dense, machines, model, table

PARAMETERS = {
    "read by row only": (table(), "owned_rows"),
    "nearly dense, still by row": (table(alpha=1.0, union=1.0), "owned_rows"),
    "by row, but refused": (table(refusals=("max_norm",)), "all_reduce"),
    "read whole": (dense(), "all_reduce"),
    "tied: by row and whole": (dense(reads="both"), "all_reduce"),
    "never read": (dense(reads="never", arrival=None), "all_reduce"),
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_how_a_parameter_is_read_decides_how_it_travels(case):
    fact, exchange = PARAMETERS[case]
    assert parallax(fact) == Choice(exchange)


def test_a_plan_by_rule_obeys_the_rule_for_every_parameter():
    facts = [table("t", 1), dense("d", arrival=0), table("r", 2, refusals=("max_norm",))]
    made = plan_by_rule(Case(model(*facts), machines()), PlanRequest())
    assert {fact.name: made.group_of(fact.name).exchange for fact in facts} == {f.name: parallax(f) for f in facts}


def test_a_constraint_outweighs_the_rule():
    made = plan_by_rule(Case(model(table("t")), machines()), PlanRequest(constraints={"t": "replicated"}))
    assert made.group_of("t").exchange == Choice("all_reduce")
    assert made.group_of("t").reason == "by constraint replicated"


def test_one_rule_for_any_price():
    """On fast links the priced plan sends a dense table dense; the rule does not look at prices."""
    profile = model(table("t", alpha=1.0, union=1.0))
    assert plan_by_rule(Case(profile, machines(megabits=1e6)), PlanRequest()).group_of("t").exchange == Choice(
        "owned_rows"
    )
