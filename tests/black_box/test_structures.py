"""Models cut into stages that take and return any structure train as in one process, or are refused by name."""

import pytest
import torch
from odd_models import LOSSES, AllOut, Twice, batch_of, model_of
from plain_loop import differ, state_of, train

import armillary

STEPS, COUNT = 2, 4


def steps_of(count=COUNT):
    return [[batch_of(step, number) for number in range(count)] for step in range(STEPS)]


def by_pipeline(rank, world, kinds, schedule):
    """By kind: (losses, weights) of a pipeline, or what it is refused with."""
    found = []
    for kind in kinds:
        model = model_of(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        asked = armillary.Choice(schedule, {"micro_batches": COUNT})
        try:
            with armillary.parallelize(model, optimizer, steps_of()[0], LOSSES[kind], schedule=asked) as run:
                told = [float(loss) for batches in steps_of() for one in run.step(batches) for loss in one.losses]
            found.append((told, state_of(model)))
        except ValueError as refused:
            found.append(str(refused))
    return found


def in_one_process(kind):
    model = model_of(kind)
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), LOSSES[kind], steps_of())
    return [loss for step in losses for loss in step], state_of(model)


def apart(kind, answer):
    """What differs from one process, if anything."""
    if isinstance(answer, str):
        return answer
    (told, weights), (want, right) = answer, in_one_process(kind)
    far = [] if told == pytest.approx(want, rel=1e-12) else [("losses", told, want)]
    return [*far, *differ(weights, right, 1e-12)]


def test_whatever_a_model_takes_and_returns_a_pipeline_trains_it_as_one_process_does(crew):
    kinds = [kind for kind in LOSSES if kind is not Twice]
    first, second = crew(2).run(by_pipeline, kinds, "gpipe")
    for answers in (first, second):
        assert {kind.__name__: apart(kind, answer) for kind, answer in zip(kinds, answers, strict=True)} == {
            kind.__name__: [] for kind in kinds
        }


def test_values_of_every_stage_reach_the_loss_over_three_stages_too(crew):
    assert [apart(AllOut, answer) for (answer,) in crew(3).run(by_pipeline, [AllOut], "one_f_one_b")] == [[]] * 3


def test_a_module_that_two_stages_call_is_refused_by_name(crew):
    for (said,) in crew(2).run(by_pipeline, [Twice], "gpipe"):
        assert "a.weight of stage 0 and a.weight of stage 1 are one parameter" in said
