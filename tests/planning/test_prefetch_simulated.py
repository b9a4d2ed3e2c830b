"""A step with prefetch against a clock: small cases by hand, and what holds for every plan on any machines."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.planning.activities import activities
from armillary.planning.link_costs import staying_share
from armillary.planning.planner import plan
from armillary.planning.prefetch import TIE, prefetching, with_announcements
from armillary.planning.pricing import ADAGRAD, ADAM, SGD, Case
from armillary.planning.simulator import simulate
from armillary.plans import Choice, Link, Profile, StageFact
from planning_cases import LINKS_ONLY, dense, machines, row_facts, table

OWNED = (Choice("owned_rows"), Choice("owned_rows", {"owners": 1}), Choice("owned_rows", {"order": "hashed"}))
MOVES_ALL = replace(LINKS_ONLY, moves_quiet_rows=True)


def scene(first_seconds, assumptions=LINKS_ONLY, hidden_share=1.0, reading_seconds=2.0):
    """100 rows of 4 B, 60 of which no worker read in the step before, on 2 workers at 1 B/s: half of the rows live
    elsewhere. The first layer reads no table; its backward is the last."""
    rows = row_facts(rows=1000, width=1, alpha=0.1, workers=2)
    read = replace(table("t.weight", 0, facts=replace(rows, repeated=0.4)), stage="t")
    first = replace(dense("first.weight", 1, arrival=1), stage="first")
    stages = (StageFact("first", 0, 0, 0, first_seconds, 500.0), StageFact("t", 0, 0, 0, reading_seconds, 4.0))
    profile = Profile((first, read), stages, batches=2, workers=2)
    topology = replace(machines(2, megabits=8e-6, latency=0.0), hidden_share=hidden_share)
    wishes = {"t.weight": Choice("owned_rows"), "first.weight": Choice("all_reduce")}
    made = plan(profile, topology, constraints=wishes, assumptions=assumptions)
    case = Case(profile, topology, assumptions)
    return made, prefetching(made, profile, topology), case


def sending_rows(made, case, kind="rows"):
    """Rows go early (and gradients wait) whether that pays or not."""
    groups = [replace(group, prefetch=kind) if group.name == "t.weight" else group for group in made.groups]
    return replace(made, groups=with_announcements(groups, case))


def on_the_link(simulation):
    found = [span for span in simulation.spans if span.lane == "between"]
    return [(span.what, span.action, span.start_seconds, span.end_seconds) for span in found]


def test_rows_that_stay_put_travel_while_the_step_before_computes():
    """Rounds 40 B, announcements 64 B each; ids 200 B, masks 50 B, rows 80 B late and 120 B early; gradients 200 B.
    Without prefetch the processor waits for a header, 40 B, and for ids and rows, 400 B."""
    made, _, case = scene(first_seconds=500.0)
    assert simulate(made, case).step_seconds == pytest.approx(1494.0)
    found = simulate(sending_rows(made, case), case)
    assert on_the_link(found) == [
        ("look-ups", "pull", 0.0, 104.0),
        ("t.weight", "pull", 104.0, pytest.approx(184.0)),
        ("t.weight", "prefetch", pytest.approx(184.0), pytest.approx(384.0)),
        ("t.weight", "prefetch", pytest.approx(384.0), pytest.approx(504.0)),
        ("look-ups", "pull", 610.0, 714.0),
        ("t.weight", "prefetch", 714.0, 764.0),
        ("t.weight", "push", 764.0, 964.0),
        ("bucket 0", "push", 1264.0, 1272.0),
    ]
    assert found.step_seconds == pytest.approx(1272.0)


def test_gradients_of_rows_at_rest_travel_while_the_next_step_computes():
    """As above, but of 200 B of gradients the 60 % that nobody reads next leave with the turn, before rows that go
    early: those that no worker read in two steps. Masks say so of as many rows again."""
    made, _, case = scene(first_seconds=600.0)
    found = simulate(sending_rows(made, case, "gradients"), case)
    rows = case.profile.parameter("t.weight").rows
    staying = staying_share(rows, case.profile, 2, steps=2)
    late, turn = 104.0 + (1 - staying) * 200.0, 104.0 + (1 - staying) * 200.0 + 200.0
    assert on_the_link(found) == [
        ("look-ups", "pull", 0.0, 104.0),
        ("t.weight", "pull", 104.0, pytest.approx(late)),
        ("t.weight", "prefetch", pytest.approx(late), pytest.approx(turn)),
        ("t.weight", "prefetch", pytest.approx(turn), pytest.approx(turn + 120.0)),
        ("t.weight", "prefetch", pytest.approx(turn + 120.0), pytest.approx(turn + 120.0 + staying * 200.0)),
        ("look-ups", "pull", 710.0, 814.0),
        ("t.weight", "prefetch", 814.0, 914.0),
        ("t.weight", "push", 914.0, pytest.approx(994.0)),
        ("bucket 0", "push", 1414.0, 1422.0),
    ]
    assert 0 < staying < 0.6
    assert found.step_seconds == pytest.approx(1422.0)


def test_what_has_not_arrived_is_waited_for_where_it_is_read_and_early_rows_hold_up_the_round():
    """The first layer takes 20 s: late rows are there at 384, with the ids, the early ones of the next batch at 504.
    Then come the round and the masks, 154 s, after the backward of what reads the table."""
    made, _, case = scene(first_seconds=20.0)
    found = simulate(sending_rows(made, case), case)
    waits = {"t.weight": 384.0 - 124.0, "look-ups": 104.0 + 658.0 - 390.0, "bucket 0": 8.0}
    assert found.exposed_seconds == pytest.approx(waits)
    assert found.step_seconds == pytest.approx(658.0 + 500.0 + 8.0)


@pytest.mark.parametrize(("reading_seconds", "kind"), [(2.0, "ids"), (500.0, "rows")])
def test_rows_go_early_only_where_a_step_is_shorter_for_it(reading_seconds, kind):
    """A forward after the look-up hides early rows; where there is none, they hold up the round, and masks are more."""
    made, ahead, case = scene(20.0, reading_seconds=reading_seconds)
    early = simulate(sending_rows(made, case), case).step_seconds
    late = simulate(scene(20.0, MOVES_ALL, reading_seconds=reading_seconds)[1], case).step_seconds
    assert ahead.group_of("t.weight").prefetch == kind
    assert simulate(ahead, case).step_seconds == min(early, late) < max(early, late)


def test_where_rows_move_only_ids_go_early_and_nobody_says_which_stay():
    _, ahead, case = scene(first_seconds=500.0, assumptions=MOVES_ALL)
    assert ahead.group_of("t.weight").prefetch == "ids"
    by_table = [line[1:] for line in on_the_link(simulate(ahead, case)) if line[0] == "t.weight"]
    assert by_table == [("pull", 104.0, 304.0), ("prefetch", 304.0, 504.0), ("push", 714.0, 914.0)]


def test_what_compute_cannot_hide_takes_the_processor():
    """A quarter of it: 20, 50 and 30 s of late rows, ids and early rows; 50 s of the gradients."""
    made, _, case = scene(first_seconds=500.0, hidden_share=0.75)
    assert simulate(sending_rows(made, case), case).step_seconds == pytest.approx(1272.0 + 20 + 50 + 30 + 50)


def test_foreseeing_takes_the_processor():
    """A third of a second a row that is asked for or served: 100 each."""
    made, ahead, case = scene(first_seconds=500.0, assumptions=replace(LINKS_ONLY, row_seconds=1.0))
    taken = [span.seconds for span in simulate(ahead, case).spans if span.action == "predict"]
    assert taken == [pytest.approx(200 / 3)]
    assert not [span for span in simulate(made, case).spans if span.action == "predict"]


# Any plan on any machines ------------------------------------------------------------------------------------------


@st.composite
def cases(draw):
    """A model of a few tables between dense layers on a few machines; its plan without prefetch and with it."""
    nodes, per_node = draw(st.sampled_from([(2, 1), (4, 1), (1, 4), (2, 2), (16, 8)]))
    inside = Link(draw(st.floats(0, 1e-3)), draw(st.floats(1e6, 1e10)))
    topology = machines(nodes, per_node, draw(st.floats(1, 1e4)), draw(st.floats(0, 1e-3)), inside=inside)
    topology = replace(topology, hidden_share=draw(st.floats(0, 1)))
    count = draw(st.integers(1, 3))
    facts, stages, wishes = [], [], {}
    for number in range(count):
        rows = row_facts(workers=4, alpha=draw(st.floats(1e-4, 0.2)), lookups=draw(st.sampled_from([1.0, 2.0])))
        rows = replace(rows, repeated=draw(st.none() | st.floats(0, 1)))
        arrival = 2 * (count - number)
        facts.append(replace(table(f"{number}.t", arrival, facts=rows), stage=str(number)))
        facts.append(replace(dense(f"{number}.d", draw(st.integers(1, 300_000)), arrival + 1), stage=str(number)))
        stages.append(StageFact(str(number), 0, 0, 0, draw(st.floats(0, 0.1)), draw(st.floats(0, 0.1))))
        wishes[f"{number}.t"] = draw(st.sampled_from((*OWNED, Choice("gather_rows"))))
    profile = Profile(tuple(facts), tuple(stages), batches=4, workers=4)
    assumptions = draw(st.sampled_from([LINKS_ONLY, SGD, ADAGRAD, ADAM]))
    made = plan(profile, topology, constraints=wishes, assumptions=assumptions)
    return made, prefetching(made, profile, topology), Case(profile, topology, assumptions)


@settings(max_examples=50)
@given(cases())
def test_prefetch_never_costs_a_step_more_than_what_it_adds(scene):
    """What it adds: a round, announcements, masks, a message of early rows, index work; less the headers it saves.
    Of kinds that the clock hardly tells apart, gradients that wait are taken."""
    made, ahead, case = scene
    added = ahead.forecast.seconds - made.forecast.seconds
    before, after = (simulate(one, case).step_seconds for one in (made, ahead))
    assert after <= TIE * (before + added) + 1e-9 * before


@settings(max_examples=50)
@given(cases())
def test_seconds_and_bytes_with_prefetch_are_those_the_plan_forecasts(scene):
    _, ahead, case = scene
    for overlap in (True, False):
        found = simulate(ahead, case, overlap)
        assert sum(found.sent_bytes.values()) == pytest.approx(ahead.forecast.sent_bytes)
        assert sum(span.sent_bytes for span in found.spans) == pytest.approx(ahead.forecast.sent_bytes)
    assert found.step_seconds == pytest.approx(ahead.forecast.seconds)


def of_kinds(ahead, others, case):
    """The same plan, whose tables prefetch in other ways instead."""
    kinds = [others.get(group.prefetch, group.prefetch) for group in ahead.groups]
    groups = [replace(group, prefetch=kind) for group, kind in zip(ahead.groups, kinds, strict=True)]
    return replace(ahead, groups=with_announcements(groups, case))


@settings(max_examples=50)
@given(cases())
def test_the_fewer_rows_a_batch_repeats_the_shorter_the_step(scene):
    """On one kind of link (a request on two is over when the slower one is) and compute that hides all (what it cannot
    of late rows may fall into the wait for the announcement), but for the masks. No gradients wait: those of rows at
    rest may, with early rows, keep a link so busy that the idle round comes late."""
    made, _, case = scene
    case = replace(case, topology=replace(case.topology, inside=case.topology.between, hidden_share=1.0))
    seconds, masks = [], 0.0
    for repeated in (1.0, 0.5, 0.0):
        facts = [
            replace(fact, rows=replace(fact.rows, repeated=repeated)) if fact.rows else fact
            for fact in case.profile.parameters
        ]
        profile = replace(case.profile, parameters=tuple(facts))
        ahead = prefetching(made, profile, case.topology)
        other = replace(case, profile=profile)
        sending = of_kinds(ahead, {"gradients": "rows"}, other)
        predicting = of_kinds(ahead, {"gradients": "ids", "rows": "ids"}, other)
        seconds.append(min(simulate(one, other).step_seconds for one in (sending, predicting)))
        asked = [activities(group, other).ahead[1:2] for group in sending.groups]
        masks = max(masks, sum(mask.seconds for masks in asked for mask in masks))
    assert all(fewer <= more * (1 + 1e-9) + masks for more, fewer in pairwise(seconds))
