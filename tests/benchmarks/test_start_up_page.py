"""The page on starts: plans that differ, memory that was not worth its price, times DDP's, forecasts off, by hand."""

import json

import pytest
from benchmarks.start_up.page import bars, page

import armillary
from armillary import Choice
from armillary.planning.pricing import SGD
from planning_cases import dense, machines, model, table

PROFILE = model(table("t.weight", 0, rows=1000), dense("d.weight", 500_000, 1), per_node=1, seconds=0.03)
TOPOLOGY = machines(1, 2, megabits=100.0)


def start(way, seconds, later=None, step=0.02, exchange="owned_rows", measured=5):
    made = armillary.plan(PROFILE, TOPOLOGY, constraints={"t.weight": Choice(exchange)}, assumptions=SGD)
    plan = {**json.loads(made.to_json()), "step_seconds": step}
    facts = {"topology": json.loads(TOPOLOGY.to_json()), "profile": json.loads(PROFILE.to_json())}
    found = {"first_step_seconds": seconds, "said": ["a step is forecast; it was 9 ms"], "measured": measured}
    return {
        **found,
        "plan": None if way == "DDP" else plan,
        "later_seconds": later,
        **(facts if way == "empty" else {}),
    }


def starts(**changed):
    """By name; four seconds of DDP, six of the one line, five of a restart."""
    usual = {"DDP/0": {"seconds": 4.0}, "DDP/1": {"seconds": 4.0}, "kept/0": {"seconds": 5.0, "measured": 0}}
    usual |= {f"empty/{number}": {"seconds": 6.0, "later": 0.019} for number in range(3)}
    return {
        f"a/{name}": start(name.partition("/")[0], **{**how, **changed.get(name, {})}) for name, how in usual.items()
    }


def missed(found):
    return [bar.says.removeprefix("a: ") for bar in bars(found) if bar.verdict != "pass"]


def test_starts_that_agree_and_come_true_miss_nothing():
    assert missed(starts()) == []
    text = page({**starts(), "machine": "two cores"})
    assert text.startswith("two cores") and "| a | empty | 6.0 (6.0-6.0) |" in text and "| +5% |" in text


@pytest.mark.parametrize(("name", "changed", "said"), [
    ("kept/0", {"measured": 1}, "of these, measured anything"),
    ("kept/0", {"seconds": 5.3}, "process start to the end of step 1, kept folder, times DDP's"),
    ("empty/2", {"step": 0.025}, "corrected forecast off the median of 100 later steps, worst of 3 starts, per cent"),
])  # fmt: skip
def test_what_is_off_in_one_start_is_missed(name, changed, said):
    assert missed(starts(**{name: changed})) == [said]


def test_more_than_one_plan_of_another_kind_is_missed():
    one = starts(**{"empty/1": {"exchange": "gather_rows"}})
    assert "of 3 plans made in empty folders, differ" not in missed(one)
    two = starts(**{"empty/1": {"exchange": "gather_rows"}, "empty/2": {"exchange": "all_reduce"}})
    assert "of 3 plans made in empty folders, differ" in missed(two)
