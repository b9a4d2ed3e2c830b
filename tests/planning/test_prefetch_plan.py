"""A plan that prefetches says of which table what goes early, and forecasts what that sends."""

from dataclasses import replace

import pytest

from armillary.exchanges.look_up import HEADER_BYTES
from armillary.planning.planner import plan
from armillary.planning.prefetch import NO_TABLE, NOTE, OFF, prefetching, with_announcements
from armillary.planning.pricing import ADAM, SGD, Case
from armillary.planning.quicker_ways import OTHER
from armillary.planning.simulator import simulate
from armillary.plans import Choice, Plan, seconds_text
from planning_cases import LINKS_ONLY, dense, machines, model, table

PROFILE = model(table("one", lookups=2.0, arrival=0), table("two", arrival=2), dense("head", arrival=1))
AHEAD = f"{OTHER}prefetch, exact,"
OWNED = {"one": Choice("owned_rows"), "two": Choice("owned_rows", {"order": "hashed"})}


def made(constraints=OWNED, assumptions=SGD, lazy=(), links=None):
    return plan(PROFILE, links or machines(), constraints=constraints, assumptions=assumptions, lazy=lazy)


def kinds(of):
    return {group.name: group.prefetch for group in of.groups if group.name in ("one", "two")}


def test_rows_go_before_a_step_only_where_they_stay_put():
    assert kinds(prefetching(made(), PROFILE, machines())) == {"one": "rows", "two": "rows"}
    assert kinds(prefetching(made(assumptions=ADAM), PROFILE, machines())) == {"one": "ids", "two": "ids"}
    lazy = made(assumptions=ADAM, lazy=["two"])
    assert kinds(prefetching(lazy, PROFILE, machines())) == {"one": "ids", "two": "gradients"}


def test_the_plan_says_which():
    ahead = prefetching(made(assumptions=ADAM, lazy=["two"]), PROFILE, machines())
    text = str(ahead).replace("\n  ", " ").splitlines()
    assert any(line.startswith("note: prefetch ids (") and line.endswith("): one") for line in text)
    assert any(line.startswith("note: prefetch gradients (") and line.endswith("): two") for line in text)
    assert f"note: {NOTE}" in text
    assert Plan.from_json(ahead.to_json()) == ahead
    assert ahead.looks_ahead and not made().looks_ahead


def test_a_plan_with_prefetch_and_one_without_both_say_what_it_brings():
    """And what of the rows was taken to stay put."""
    plain, case = made(), Case(PROFILE, machines(), SGD)
    ahead = prefetching(plain, PROFILE, machines())
    before, after = (seconds_text(simulate(one, case).step_seconds) for one in (plain, ahead))
    gain = f"simulated step {after} with prefetch, {before} without; rows that may go before the step: "
    assert f"{AHEAD} simulated step {after}, not {before}: parallelize(..., prefetch=True)" in plain.notes[-1]
    assert ahead.notes[-1].startswith(gain) and "of one, " in ahead.notes[-1] and ahead.notes[-1].endswith("of two")
    moving = made(assumptions=ADAM, links=machines(latency=1e-3))  # of whose rows none may go before the step
    assert any(note.startswith(AHEAD) for note in moving.notes), moving.notes


def test_prefetch_that_brings_nothing_is_no_note():
    slow = made(links=machines(latency=0.0, megabits=1e6))
    assert "owned_rows" in str(slow) and not any(note.startswith(AHEAD) for note in slow.notes)


def test_prefetch_that_was_asked_for_or_offered_and_is_not_taken_says_why():
    whole = plan(PROFILE, machines(), constraints={"*": "all_reduce"}, prefetch=True)
    assert NO_TABLE in whole.notes and not whole.looks_ahead
    offered = plan(PROFILE, machines(latency=0.0, megabits=1e6), constraints=OWNED, assumptions=SGD, prefetch=None)
    (note,) = (note for note in offered.notes if note.startswith(OFF))
    assert f"{OFF}: simulated step " in note and not offered.looks_ahead
    assert not any(
        note == NO_TABLE or note.startswith((OFF, AHEAD)) for note in plan(PROFILE, machines(1), prefetch=None).notes
    )


def test_a_plan_without_tables_to_foresee_promises_nothing():
    for wishes in ({"one": "gather_rows", "two": "replicated"}, {"*": "replicated"}):
        assert not any(note.startswith(AHEAD) for note in made(wishes).notes)


def test_a_plan_that_looks_ahead_is_left_as_it_is():
    ahead = prefetching(made(), PROFILE, machines())
    assert prefetching(ahead, PROFILE, machines()) is ahead


def test_another_model_is_refused():
    other = model(table("one", arrival=0), table("three", arrival=1))
    with pytest.raises(ValueError, match="the plan was made for model"):
        prefetching(made(), other, machines())


def test_other_exchanges_have_nothing_to_foresee():
    gathered = made({"one": "gather_rows", "two": "replicated"})
    assert prefetching(gathered, PROFILE, machines()) == gathered


def test_a_foreseen_look_up_needs_no_header_and_a_step_one_round_more_each_with_an_outlook():
    before, after = made(assumptions=ADAM), prefetching(made(assumptions=ADAM), PROFILE, machines())
    announcement = 8 * (4 + 2 * 4)
    more = 3 * (HEADER_BYTES + 2 * announcement - 3 * HEADER_BYTES)
    assert after.forecast.sent_bytes == pytest.approx(before.forecast.sent_bytes + more)
    assert after.forecast.memory_bytes == before.forecast.memory_bytes


def test_only_tables_owned_by_row_can_prefetch():
    group = next(group for group in made().groups if group.layout == "replicated")
    with pytest.raises(ValueError, match="is replicated: prefetch 'ids'; want none"):
        replace(group, prefetch="ids")
    with pytest.raises(ValueError, match="prefetch 'all'; want none, or for a row_sharded group one of"):
        replace(made().group_of("one"), prefetch="all")


def test_tables_that_prefetch_share_messages():
    """Two rounds; of each table the late rows and the push; if rows go early, those of both; if gradients wait, those
    of both. Ids and masks travel with these. Without, three look-ups of a header, ids and rows each, two pushes and a
    round."""
    slow = machines(megabits=1e12, latency=1.0)
    plain = plan(PROFILE, slow, constraints=OWNED, assumptions=LINKS_ONLY)
    case = Case(PROFILE, slow, LINKS_ONLY)
    early, waiting = (
        [replace(group, prefetch=kind) if group.name in OWNED else group for group in plain.groups]
        for kind in ("rows", "gradients")
    )
    forced = [replace(plain, groups=with_announcements(groups, case)) for groups in (early, waiting)]
    made = plain, prefetching(plain, PROFILE, slow), *forced
    seconds = [sum(group.forecast.seconds for group in of.groups if group.name in OWNED) for of in made]
    assert seconds == pytest.approx([3 * 3 + 2 + 1, 2 + 2 + 2, 2 + 1 + 2 + 2, 2 + 1 + 1 + 2 + 2], rel=1e-6)
