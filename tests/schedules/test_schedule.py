"""The contract of a schedule: pictures, refusals, versions, held activations."""

import re

import pytest

from armillary.plans import Choice
from armillary.schedules import SCHEDULES, Action, Schedule, read
from armillary.schedules.accumulation import accumulation
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.gpipe import gpipe
from armillary.schedules.one_f_one_b import one_f_one_b
from schedule_pictures import parse

EXAMPLES = [(name, options) for name, method in SCHEDULES.all().items() for options in method.examples]


def table_of(name, options):
    """The table of a registered schedule, from its name and an example of its options, workers among them."""
    given = dict(options)
    workers = given.pop("workers")
    return read(Choice(name, given), workers).schedule()


CYCLIC = """
cyclic: 3 workers, 3 stages, 3 micro-batches, a step every 6 ticks
worker 0, micro-batch 0: F0 F1 F2 B2 B1 B0 .  .  .  .   staleness 1 1 0
worker 1, micro-batch 1: .  .  F0 F1 F2 B2 B1 B0 .  .   staleness 1 0 0
worker 2, micro-batch 2: .  .  .  .  F0 F1 F2 B2 B1 B0  staleness 0 0 0
"""
BACKWARD_TWICE_THE_FORWARD = """
cyclic: 3 workers, 3 stages, 3 micro-batches, a step every 9 ticks
worker 0, micro-batch 0: F0 F1 F2 B2 -  B1 -  B0 -  .  .  .  .  .  .   staleness 1 1 0
worker 1, micro-batch 1: .  .  .  F0 F1 F2 B2 -  B1 -  B0 -  .  .  .   staleness 1 0 0
worker 2, micro-batch 2: .  .  .  .  .  .  F0 F1 F2 B2 -  B1 -  B0 -   staleness 0 0 0
"""
CYCLIC_PIPELINE = """
cyclic_pipeline: 3 workers, 3 stages, 3 micro-batches, a step every 6 ticks
worker 0, stage 0: F0 .  F1 .  F2 B0 .  B1 .  B2  staleness 1 1 0
worker 1, stage 1: .  F0 .  F1 B0 F2 B1 .  B2 .   staleness 1 0 0
worker 2, stage 2: .  .  F0 B0 F1 B1 F2 B2 .  .   staleness 0 0 0
"""
ONE_F_ONE_B = """
one_f_one_b: 3 workers, 3 stages, 4 micro-batches, a step every 12 ticks
worker 0, stage 0: F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3  staleness 0 0 0 0
worker 1, stage 1: .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .   staleness 0 0 0 0
worker 2, stage 2: .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .   staleness 0 0 0 0
"""
GPIPE = """
gpipe: 2 workers, 2 stages, 3 micro-batches, a step every 8 ticks
worker 0, stage 0: F0 F1 F2 .  .  B0 B1 B2  staleness 0 0 0
worker 1, stage 1: .  F0 F1 F2 B0 B1 B2 .   staleness 0 0 0
"""
ACCUMULATION = """
accumulation: 1 worker, 2 stages, 2 micro-batches, a step every 8 ticks
worker 0: F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1  staleness 0 0 | 0 0
"""
WORKER_0 = "F0 F1 F2 B2 B1 B0 .  .  .  ."  # as in CYCLIC
PICTURES = [
    (CYCLIC, cyclic(3), "ring", {"workers": 3}),
    (BACKWARD_TWICE_THE_FORWARD, cyclic(3, costs=[[1, 2]] * 3), "ring", {"workers": 3, "costs": [[1, 2]] * 3}),
    (CYCLIC_PIPELINE, cyclic_pipeline(3, 3), "pipeline", {"workers": 3, "micro_batches": 3}),
    (ONE_F_ONE_B, one_f_one_b(3, 4), "one_f_one_b", {"workers": 3, "micro_batches": 4}),
    (GPIPE, gpipe(2, 3), "gpipe", {"workers": 2, "micro_batches": 3}),
    (ACCUMULATION, accumulation(2, 2), "accumulation", {"workers": 1, "micro_batches": 2, "stages": 2}),
]


def altered(picture: str, old: str, new: str) -> str:
    assert old in picture
    return picture.replace(old, new)


@pytest.mark.parametrize(("picture", "table", "name", "options"), PICTURES)
def test_a_schedule_looks_like_its_picture(picture, table, name, options):
    assert str(table) == picture.strip()
    assert table_of(name, options) == table


@pytest.mark.parametrize(("name", "options"), EXAMPLES)
def test_every_registered_schedule_reads_no_weights_from_the_future(name, options):
    made = table_of(name, options)
    for micro_batch, ages in enumerate(made.staleness):
        for stage, age in enumerate(ages):
            for other in range(made.micro_batches):
                used = made.action("F", micro_batch, stage).start
                made_at = made.action("B", other, stage).end - made.period
                assert used >= made_at - age * made.period


@pytest.mark.parametrize(
    ("picture", "old", "new", "worker", "complaint"),
    [
        (CYCLIC, "staleness 1 1 0", "staleness 0 1 0", 0, "weights 0 steps old appear 4 ticks after"),
        (CYCLIC, "staleness 1 0 0", "staleness 0 0 0", 1, "want 1 or more"),
        (CYCLIC, WORKER_0, "F0 F2 F1 B2 B1 B0 .  .  .  .", 0, "F2 starts at tick 1, but F1"),
        (CYCLIC, WORKER_0, "F0 F1 F2 B2 B1 .  .  .  .  . ", 0, "B of micro-batch 0, stage 0 never"),
        (CYCLIC, WORKER_0, "F0 F1 F2 B2 B1 B0 B0 .  .  .", 0, "happens twice"),
        (CYCLIC, WORKER_0, "F0 F1 F2 B2 B1 .  B0 .  .  .", 0, "two actions meet"),
            ],
)  # fmt: skip
def test_an_impossible_table_is_refused_and_the_guilty_line_marked(picture, old, new, worker, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)) as refusal:
        parse(altered(picture, old, new))
    marked = [line for line in str(refusal.value).splitlines() if line.endswith("<- here")]
    assert [line.split(",")[0] for line in marked] == [f"worker {worker}"]


def test_a_backward_away_from_its_activations_is_refused():
    apart = ((Action(0, 1, "F", 0, 0),), (Action(1, 1, "B", 0, 0),))
    with pytest.raises(ValueError, match="its activations are on worker 0"):
        Schedule("apart", 2, apart, ((0,),))


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="names no stage below 1"):
        Schedule("far", 2, ((Action(0, 1, "F", 1, 0), Action(1, 1, "B", 1, 0)),), ((0,),))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("cyclic, 3 workers", "is no header"),
        (altered(CYCLIC, "3 workers", "4 workers"), "4 workers, but 3 lines"),
        (altered(CYCLIC, "worker 1,", "worker 5,"), "no line of worker 1"),
        (altered(CYCLIC, WORKER_0, "F0 F1 X2 B2 B1 B0 .  .  .  ."), "'X2' at tick 2 cannot be read"),
        (altered(CYCLIC, "3 micro-batches", "4 micro-batches"), "has 9 cells"),
        (altered(CYCLIC, WORKER_0, "F0 F1 F2 B3 B2 B1 B0 .  .  ."), "worker 0 has 4 ages to give"),
    ],
)  # fmt: skip
def test_a_picture_that_cannot_be_read_is_quoted(text, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        parse(text)


def test_an_unknown_schedule_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match=r"no schedule 'pipline'; there are accumulation, .*; did you mean 'pipeline'"):
        read(Choice("pipline"), 2)


def test_versions_start_at_zero_and_start_again_at_a_drain():
    made = cyclic(2)  # staleness 1 0 / 0 0
    assert [made.version((step, 0, 0)) for step in range(5)] == [0, 0, 1, 2, 3]
    assert [made.version((step, 0, 0), drains=(3,)) for step in range(5)] == [0, 0, 1, 3, 3]
    assert [made.version((step, 1, 0), drains=(3,)) for step in range(5)] == [0, 1, 2, 3, 4]


def test_held_counts_only_what_has_begun_while_the_schedule_fills():
    made = cyclic(3)
    assert [len(made.held(tick)) for tick in range(6)] == [1, 2, 4, 5, 6, 6]
    assert made.held(0) == {(0, 0, 0)}


def test_one_device_holds_less_after_a_tick_than_side_by_side_workers_during_it():
    made = cyclic(3)
    assert [len(made.held_after(tick)) for tick in range(12, 18)] == [5, 4, 5, 4, 5, 4]


def test_a_flush_pipeline_holds_as_many_micro_batches_as_its_rule_says():
    for stage in range(3):
        for made, want in ((gpipe(3, 4), 4), (one_f_one_b(3, 4), min(4, 3 - stage))):
            held = [sum(place[2] == stage for place in made.held(tick)) for tick in range(24)]
            assert max(held) == want
