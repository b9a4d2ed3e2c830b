"""One more exchange is one more file: what registers itself is offered, priced, demanded and placed; nobody knows its
name."""

import pytest

from armillary.exchanges import DENSE, ROW, Leg, Legs, dense_exchange, row_exchange
from armillary.exchanges.all_reduce import all_reduce
from armillary.exchanges.owned_rows import owned_rows
from armillary.planning.planner import explain, plan
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.plans import Choice
from planning_cases import LINKS_ONLY, dense, machines, model, table

LINKS = machines(4, megabits=100)


def carrier_pigeon(birds=0):
    return owned_rows(birds)._replace(legs=lambda traffic, skew, topology: Legs((Leg("everyone", 1.0, 1),), ()))


def post(office=0):
    return all_reduce()._replace(legs=lambda layout, topology: [Leg("slowest", 1.0, 1)])


@pytest.fixture
def registered(monkeypatch):
    for shelf in (DENSE, ROW):
        monkeypatch.setattr(shelf, "_entries", dict(shelf.all()))
    row_exchange(offers=lambda fact, topology: [{"birds": 2}], owner_option="birds")(carrier_pigeon)
    dense_exchange(offers=lambda fact, topology: [], owner_option="office")(post)


@pytest.mark.usefixtures("registered")
def test_what_it_offers_is_priced_by_its_legs_and_chosen_when_it_is_cheapest():
    made = plan(model(table("t")), LINKS, assumptions=LINKS_ONLY)
    assert made.group_of("t").exchange == Choice("carrier_pigeon", {"birds": 2})
    assert made.group_of("t").layout == "row_sharded"
    assert "carrier_pigeon(birds=2)" in [
        str(v.candidate.choice) for v in explain(Case(model(table("t")), LINKS), PlanRequest())
    ]


@pytest.mark.usefixtures("registered")
def test_what_it_does_not_offer_is_taken_on_demand_only_and_its_owners_are_evenly_loaded():
    profile = model(dense("a", 100, 0), dense("b", 10, 1), dense("c", 10, 2), workers=2)
    assert {group.exchange.name for group in plan(profile, machines(2)).groups} == {"all_reduce"}
    made = plan(profile, machines(2), constraints={"*": "post"})
    assert [str(group.exchange) for group in made.groups] == ["post(office=0)", "post(office=1)", "post(office=1)"]


@pytest.mark.usefixtures("registered")
def test_its_number_of_owners_is_checked():
    with pytest.raises(ValueError, match="9 owners among 4 workers"):
        plan(model(table("t")), LINKS, constraints={"t": Choice("carrier_pigeon", {"birds": 9})})
