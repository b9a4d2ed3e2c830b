"""One request carries what the user wants of a plan: every door takes the same keywords, and refuses others."""

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest

import armillary
from armillary import Choice
from armillary.planning.request import PlanRequest
from planning_cases import machines, model, table

KEYWORDS = [one.name for one in fields(PlanRequest)]


@pytest.mark.parametrize("door", [armillary.plan, armillary.auto_plan, armillary.parallelize])
def test_whoever_plans_takes_every_keyword_of_a_request(door):
    assert set(KEYWORDS) <= set(inspect.signature(door).parameters)


def test_a_keyword_that_there_is_not_is_refused_with_the_one_that_was_meant():
    with pytest.raises(TypeError, match="plan: there is no argument 'constraint'; did you mean 'constraints'"):
        armillary.plan(model(table("t")), machines(2), constraint={"t": "replicated"})


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"constraints": ["t"]}, "constraints is .*; want a mapping"),
        ({"lazy": "t"}, r"lazy is the text 't'.*write \['t'\]"),
        ({"allow": "lossy"}, "allow is 'lossy'; want some of"),
        ({"rule": "prize"}, "no rule 'prize'.*did you mean 'price'"),
        ({"rule": "parallax", "micro_batches": 2}, "no price decides, so micro_batches cannot be honoured"),
        ({"edge": Choice("quantize")}, "Name a pipeline as the schedule"),
        ({"edge": 3}, "want a codec as text or as a Choice"),
    ],
)
def test_a_request_checks_itself(asked, complaint):
    with pytest.raises(ValueError, match=complaint):
        PlanRequest(**asked)


@pytest.mark.parametrize(
    ("schedule", "complaint"), [(3, "schedule is 3; want text, as in 'ring.slack=1.'"), ("ring(", "is no NAME")]
)
def test_a_schedule_is_a_choice_or_its_text(schedule, complaint):
    with pytest.raises(ValueError, match=complaint):
        armillary.plan(model(table("t")), machines(2), schedule=schedule)


def test_a_request_is_frozen_and_read_as_often_as_wanted():
    request = PlanRequest(lazy=(name for name in ["t"]))
    assert (request.lazy, request.lazy) == (("t",), ("t",))
    with pytest.raises(FrozenInstanceError):
        request.mean = "weights"
