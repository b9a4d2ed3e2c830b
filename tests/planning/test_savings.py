"""What a plan says of ways that are not exact, and when it takes one: never unasked, and then the mildest."""

from dataclasses import replace

import pytest

import face
from armillary.codecs import CODECS
from armillary.exchanges import dense_exchanges
from armillary.planning.notes import NOT_TIMED, WORTH_SAYING
from armillary.planning.planner import bucketings, plan
from armillary.planning.pricing import SGD, Case
from armillary.planning.quicker_ways import OTHER
from armillary.planning.request import PlanRequest
from armillary.planning.simulator import simulate
from armillary.plans import Choice, seconds_text
from armillary.session.autotune import EXACT, alternatives
from planning_cases import dense, machines, model, table

PROFILE = model(*(dense(f"layer{n}.weight", 600_000, n) for n in range(3)), seconds=0.01)
SLOW, FAST = machines(4, megabits=100), machines(4, megabits=1e7, latency=1e-7)


def said(made):
    """The one note about another way."""
    (note,) = [note for note in made.notes if note.startswith(OTHER)]
    return note


def seconds(made, topology=SLOW, profile=PROFILE):
    return simulate(made, Case(profile, topology)).step_seconds


def test_on_slow_links_one_note_says_what_would_be_saved_and_how_to_ask():
    made = plan(PROFILE, SLOW)
    assert made.departures == () and {group.exchange.name for group in made.groups} == {"all_reduce"}
    note = said(made)
    name, _, steps = note.removeprefix(OTHER).partition(", NOT exact, ")
    taken = plan(PROFILE, SLOW, constraints={"*": Choice.parse(name)})
    assert seconds(made) > 3 * seconds(taken)
    wanted = f"simulated step {seconds_text(seconds(taken))}, not {seconds_text(seconds(made))}: allow=('lossy',)"
    assert steps == f"{wanted} (--allow lossy){NOT_TIMED}. armillary advise compares all methods"


def test_where_links_are_not_the_matter_no_lossy_way_is_named():
    assert "NOT exact" not in str(plan(PROFILE, FAST))
    assert plan(PROFILE, FAST, allow=("lossy",)).departures == ()


def test_a_lossy_way_that_was_named_and_is_slower_than_the_exact_one_is_told_so():
    named = {"*": Choice.parse("quantize(bits=8)")}
    slower, exact, quicker = (
        plan(PROFILE, FAST, constraints=named),
        plan(PROFILE, FAST),
        plan(PROFILE, SLOW, constraints=named),
    )
    (note,) = (note for note in slower.notes if "exact: all_reduce" in note)
    steps = f"{seconds_text(seconds(exact, FAST))} instead of {seconds_text(seconds(slower, FAST))}"
    assert seconds(exact, FAST) < seconds(slower, FAST) and steps in note
    assert "drop quantize(bits=8) from constraints (--exchange)" in note
    assert not any(note.startswith("quicker at these links") for note in (*exact.notes, *quicker.notes))


def test_no_note_has_two_figures_that_print_alike():
    """A small model's step is as long by the best lossy way; one that is coded as long in one bucket as in three."""
    assert not any("simulated step" in note for note in plan(model(dense("w", 1000), seconds=0.1), FAST).notes)
    coded = plan(PROFILE, FAST, constraints={"*": Choice.parse("quantize(bits=8)")})
    assert len(coded.groups) == 3 and not any("in 1 bucket" in note for note in coded.notes)


def test_on_one_worker_nothing_crosses_and_nothing_is_said():
    alone = model(dense("w", 1000), workers=1)
    assert not any("lossy" in note for note in plan(alone, machines(1), allow=("lossy",)).notes)


def test_what_is_allowed_is_the_mildest_of_those_that_are_about_the_quickest():
    exact, made = plan(PROFILE, SLOW), plan(PROFILE, SLOW, allow=("lossy",))
    assert made.departures == ("lossy",)
    (name,) = {str(group.exchange) for group in made.groups}
    others = {
        str(choice): (entry.mildness, seconds(plan(PROFILE, SLOW, constraints={"*": choice})))
        for kind, entry in dense_exchanges().items()
        for choice in (Choice(kind, way) for way in entry.offers(PROFILE.parameters[0], SLOW))
        if entry.departs
    }
    quickest = min(spent for _, spent in others.values())
    close = {name: mild for name, (mild, spent) in others.items() if spent <= 1.05 * quickest}
    assert others[name][0] == min(close.values()) and name in close
    assert any("allowed lossy: simulated step" in note for note in made.notes)
    assert any(note.startswith(f"NOT exact: {name}: ") for note in made.notes)
    assert seconds(made) < seconds(exact) / WORTH_SAYING


def test_what_the_user_demanded_stays_and_tables_keep_their_rows():
    profile = model(table("t", 4), *PROFILE.parameters, seconds=0.01)
    made = plan(profile, SLOW, constraints={"layer0.*": "all_reduce"}, allow=("lossy",), assumptions=SGD)
    kinds = {name: group.departures for group in made.groups for name in group.parameters}
    assert kinds["layer0.weight"] == () and kinds["t"] == () and kinds["layer1.weight"] == ("lossy",)
    assert made.group_of("t").exchange == plan(profile, SLOW, assumptions=SGD).group_of("t").exchange


def test_a_way_that_does_not_fit_in_memory_is_not_taken():
    """A residual is as long as its gradient."""
    exact = plan(PROFILE, SLOW)
    tight = replace(SLOW, memory_bytes=int(exact.forecast.memory_bytes) + 1000)
    made = plan(PROFILE, tight, allow=("lossy",))
    assert made.departures == () and not any(note.startswith(OTHER) for note in made.notes)


def test_the_exact_plan_is_timed_beside_what_was_allowed():
    found = alternatives(Case(PROFILE, SLOW), PlanRequest(allow=("lossy",)))
    assert found["chosen"].departures == ("lossy",) and found[EXACT].departures == ()
    assert EXACT not in alternatives(Case(PROFILE, FAST), PlanRequest(allow=("lossy",)))
    assert found["chosen"] == bucketings(Case(PROFILE, SLOW), PlanRequest(allow=("lossy",)))[0]


BAD = [
    ("lossy", "allow is 'lossy'"),
    (("local",), "want some of .'lossy',"),
    (("lossless",), "taken where it is named"),
]


@pytest.mark.parametrize(("allow", "complaint"), BAD)
def test_other_permissions_are_refused(allow, complaint):
    with pytest.raises(ValueError, match=complaint):
        plan(PROFILE, SLOW, allow=allow)


def test_a_schedule_that_owns_the_loop_carries_nothing_lossy_and_says_so():
    with pytest.raises(ValueError, match="allow have no effect"):
        plan(PROFILE, SLOW, schedule=Choice("delayed_all_reduce"), allow=("lossy",))


def test_every_codec_that_is_an_exchange_is_as_mild_there_as_it_says():
    for name, entry in CODECS.all().items():
        if entry.carries:
            assert dense_exchanges()[name].mildness == entry.mildness > 0


def test_the_command_line_takes_the_permission(tmp_path):
    SLOW.save(tmp_path / "slow.json")
    few = ("--set", "architecture=vit", "--set", "width=16", "--set", "depth=1")
    asked = ("vision", "--small", *few, "--topology", "slow.json")
    exact, allowed = (face.command("plan", *asked, *more, folder=tmp_path) for more in ((), ("--allow", "lossy")))
    assert exact.code == 0 and "allowed lossy" not in exact.out, exact
    assert allowed.code == 0 and "allowed lossy: simulated step" in allowed.out, allowed
    refused = face.command("plan", *asked, "--allow", "local", folder=tmp_path)
    assert refused.code == 2 and "want some of ('lossy',)" in refused.err, refused
