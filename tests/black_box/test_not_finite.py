"""check_finite: a gradient that is not finite on one rank ends the step on all ranks, before any weight is touched."""

import warnings

import pytest
import torch
from plain_loop import differ, state_of, train
from small_models import OPTIMIZERS, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss
from test_errors import said_by

import armillary
import face

BAD, STEPS = 3, 6  # at which step, on rank 1
TABLE = "words.weight"
PLANTED = {"the table": TABLE, "a dense weight": "layers.3.weight"}
WAYS = {"spread": {"*": "row_sharded"}, "whole": {"*": "all_reduce"}}


def planted_loss(model, batch, planted):
    """As ever, but that one parameter's gradient is not a number."""
    loss = word_loss(model, batch)
    if planted == TABLE:
        return loss + (model.words(batch[0]) * float("nan")).sum()
    return loss + (dict(model.named_parameters())[planted] * float("nan")).sum() if planted else loss


def trained(rank, world, constraints, planted, check):
    """The one line, so that the provisional plan is tried too; who hears of it leaves the step out."""
    model, told = made(Reader), []
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    run = armillary.parallelize(model, optimizer, constraints=constraints, check_finite=check)
    for step in range(STEPS):
        optimizer.zero_grad()
        bad = planted if rank == 1 and step in (1, BAD) else ""  # while it is watched, and after
        try:
            planted_loss(model, word_batch(rank, step), bad).backward()
        except FloatingPointError as error:
            told.append(str(error))
            optimizer.zero_grad()
            continue
        optimizer.step()
    layouts = {name: group.layout for group in run.plan.groups for name in group.parameters}
    run.close()
    return told, layouts, state_of(model)


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_not_finite_is_named_on_every_rank_and_no_rank_steps(crew, way, planted):
    truth = made(Reader)
    good = [[word_batch(worker, step) for worker in range(2)] for step in range(STEPS) if step not in (1, BAD)]
    train(truth, OPTIMIZERS["momentum"](truth.parameters()), word_loss, good)
    for told, layouts, state in crew(2).run(trained, WAYS[way], PLANTED[planted], True):
        assert layouts[TABLE] == ("row_sharded" if way == "spread" else "replicated")
        assert [said.split("step ")[1].split()[0] for said in told] == ["2", "3"]  # steps that were taken count
        for said in told:
            assert f"rank 1: {PLANTED[planted]})" in said and "rank 0" not in said, said
        assert differ(state, state_of(truth)) == {}


def test_without_the_check_nobody_hears_of_it_and_every_rank_has_lost_its_weights(crew):
    for told, _, state in crew(2).run(trained, WAYS["spread"], TABLE, False):
        assert told == [] and not all(bool(value.isfinite().all()) for value in state.values())


def refused(rank, world, plan):
    def asked(model, loss, example, check, **more):
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return said_by(lambda: armillary.parallelize(model, optimizer, example, loss, check_finite=check, **more))

    batches = [word_batch(worker, 0) for worker in range(world)]
    pairs = [pair_batch(0, number) for number in range(world)]
    return [
        asked(made(Reader), word_loss, batches, True, scaler=torch.amp.GradScaler("cpu")),
        asked(chain(), pair_loss, pairs, True, schedule=face.schedule_named("pipeline")),
        asked(made(Reader), word_loss, batches, rank == 0),
    ]


def test_beside_a_scaler_under_a_schedule_or_on_some_ranks_only_it_is_refused(crew):
    for scaled, owned, unlike in crew(2).run(refused, None):
        assert "GradScaler" in scaled and "give one of the two" in scaled
        assert "schedule pipeline" in owned and "run.step" in owned
        assert "ranks give different options" in unlike and "'check_finite': False" in unlike
