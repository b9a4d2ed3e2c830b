"""What departs from exact is taken where it is demanded and nowhere else; a plan that hides it is not carried out."""

import re
from dataclasses import replace

import pytest

from armillary.planning.planner import plan
from armillary.plans import Choice
from armillary.session.attach import attach
from contracts.journey import adam, net, planned, profile_of
from contracts.test_meet_every import shelf as meeting
from contracts.test_top_k import shelf
from planning_cases import machines

SLOW = machines(2, megabits=0.1)


@pytest.mark.parametrize("layout", ["replicated", None])
def test_no_price_and_no_layout_brings_it_in(layout):
    with shelf():
        made = plan(profile_of(2), SLOW, constraints={"*": layout} if layout else {})
    assert made.departures == () and {str(group.exchange) for group in made.groups} == {"all_reduce"}


def test_its_name_alone_is_a_permission_and_the_cheapest_way_it_offers_is_taken():
    with shelf():
        made = plan(profile_of(2), SLOW, constraints={"first.*": "largest_k"})
    kinds = {name: group.departures for group in made.groups for name in group.parameters}
    assert kinds["first.weight"] == kinds["first.bias"] == ("lossy",) and kinds["second.weight"] == ()


def test_nothing_is_said_on_one_worker_or_where_links_are_not_the_matter():
    with shelf(), meeting():
        for made in (plan(profile_of(1), machines(1)), plan(profile_of(2), machines(2, megabits=1e9, latency=0.0))):
            assert not [note for note in made.notes if "NOT exact" in note]


def test_states_and_copies_of_weights_are_in_the_forecast():
    with shelf(), meeting():
        exact = planned(2)
        lossy, local = planned(2, Choice("largest_k")), planned(2, Choice("meet_every"))
    nbytes = sum(fact.bytes for fact in profile_of(2).parameters)
    for made in (lossy, local):
        more = made.forecast.memory_bytes - exact.forecast.memory_bytes
        assert nbytes <= more <= nbytes + 8 * 2 * 4 * 6  # and some flags
    assert local.forecast.sent_bytes < exact.forecast.sent_bytes / 3


EDITS = {
    "departures": (lambda made: edited(made, departures=()), r"by largest_k says departures \(\) .* the exchange says"),
    "cadence": (lambda made: edited(made, cadence="meeting"), "and cadence 'meeting', the exchange says"),
    "consensus": (lambda made: replace(made, consensus="mean"), "the plan's consensus is 'mean'.* it is 'same'"),
}


def edited(made, **fields):
    return replace(made, groups=tuple(replace(group, **fields) for group in made.groups))


def refusal(rank, workers, edit):
    with shelf():
        model = net()
        with pytest.raises(ValueError, match="attach") as refused:
            attach(EDITS[edit][0](planned(workers, Choice("largest_k"))), model, adam(model))
        return str(refused.value)


@pytest.mark.parametrize("edit", EDITS)
def test_a_plan_that_says_otherwise_than_its_exchange_is_refused(crew, edit):
    for said in crew(2).run(refusal, edit):
        assert re.search(EDITS[edit][1], said), said
