"""A run ends: the model is plain with the newest weights everywhere, or, after an error, everyone is told at once."""

import time

import pytest
from plain_loop import differ, state_of, train
from small_models import OPTIMIZERS, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss
from torch import nn

import face

TABLE = "words.weight"
STEPS = 3
# name -> (ranks, micro-batches of a step); exchanges of the table, and schedules
WORDS = {"all_reduce": (2, 2), "gather_rows": (2, 2), "owned_rows": (2, 2), "owned_rows_by_node": (2, 2)}
CHAIN = {
    "one_device(micro_batches=2, stages=2)": (1, 2),
    "pipeline(slack=1)": (2, 2),
    "ring(stages=2)": (2, 2),
    "zero_ring(stages=2)": (2, 2),
    "shared_stages": (3, 2),
    "delayed_all_reduce": (2, 2),
    "gpipe(micro_batches=2)": (2, 2),
    "one_f_one_b(micro_batches=2)": (2, 2),
    "accumulation(micro_batches=2)": (2, 4),
}
EVERY = {**WORDS, **CHAIN}


def plan_of(name):
    ranks, _ = EVERY[name]
    if name in CHAIN:
        return face.plan_for(chain(), pair_loss, [pair_batch(0, n) for n in range(ranks)], ranks, schedule=name)
    batches = [word_batch(worker, 0) for worker in range(ranks)]
    per_node = 1 if name == "owned_rows_by_node" else 0
    return face.plan_for(made(Reader), word_loss, batches, ranks, exchange={TABLE: name}, per_node=per_node)


def started(name, plan, optimizer="adam", timeout=600.0):
    model = chain() if name in CHAIN else made(Reader)
    loss, example = (pair_loss, pair_batch(0, 0)) if name in CHAIN else (word_loss, word_batch(0, 0))
    return face.start(plan, model, OPTIMIZERS[optimizer](model.parameters()), loss, example, timeout=timeout)


def batches_of(name, step):
    make = (lambda n: pair_batch(step, n)) if name in CHAIN else (lambda n: word_batch(n, step))
    return [make(number) for number in range(EVERY[name][1])]


def take(name, run, steps):
    for step in steps:
        face.step(run, face.own(run, batches_of(name, step)))


def closed(rank, world, name, plan):
    """The model after the end, whether it is plain; and after one plain step more with the same optimizer."""
    run = started(name, plan)
    names = [key for key, _ in run.model.named_parameters()]
    take(name, run, range(STEPS))
    newest = face.weights(run)
    face.close(run)
    is_plain = all(type(one) is nn.Parameter and one.is_leaf for one in run.model.parameters())
    is_plain &= names == [key for key, _ in run.model.named_parameters()]
    held = {id(one) for group in run.optimizer.param_groups for one in group["params"]}
    is_plain &= held == {id(one) for one in run.model.parameters()}
    then = state_of(run.model)
    loss = pair_loss if name in CHAIN else word_loss
    train(run.model, run.optimizer, loss, [batches_of(name, STEPS)])
    return is_plain, newest, then, state_of(run.model)


@pytest.mark.parametrize("name", EVERY)
def test_a_closed_run_leaves_a_plain_model_with_the_newest_weights_that_trains_on(crew, name):
    answers = crew(EVERY[name][0]).run(closed, name, plan_of(name))
    for is_plain, newest, then, after in answers:
        assert is_plain and differ(then, newest, 0.0) == {}
        model = chain() if name in CHAIN else made(Reader)
        if name in WORDS:  # exact: the loop knows the weights, and those of a step more
            optimizer = OPTIMIZERS["adam"](model.parameters())
            train(model, optimizer, word_loss, [batches_of(name, step) for step in range(STEPS)])
            assert differ(then, state_of(model)) == {}
            train(model, optimizer, word_loss, [batches_of(name, STEPS)])
            assert differ(after, state_of(model)) == {}
        assert differ(after, then)  # it did train on


def used_after_the_end(rank, world, name, plan, folder):
    run = started(name, plan)
    take(name, run, range(1))
    face.close(run)
    face.close(run)  # does nothing
    said = []
    for attempt in (
        lambda: take(name, run, [1]),
        lambda: face.save(run, folder),
        lambda: face.export(run),
        lambda: face.load(run, folder),
    ):
        try:
            attempt()
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("name", [*list(WORDS)[::2], *CHAIN])
def test_a_closed_run_refuses_every_call_and_a_second_close_does_nothing(crew, tmp_path, name):
    answers = crew(EVERY[name][0]).run(used_after_the_end, name, plan_of(name), str(tmp_path))
    for rank, said in enumerate(answers):
        assert len(said) == 4
        assert all(f"rank {rank}" in one and "closed" in one and "attach again" in one for one in said), said
    assert not list(tmp_path.iterdir())


def twice(rank, world, name, plan):
    """Attached again after the end, on the same model and optimizer."""
    run = started(name, plan)
    with face.block(run):
        take(name, run, range(2))
    loss, example = (pair_loss, pair_batch(0, 0)) if name in CHAIN else (word_loss, word_batch(0, 0))
    again = face.start(plan, run.model, run.optimizer, loss, example)
    with face.block(again):
        take(name, again, range(2, STEPS))
    return state_of(run.model)


@pytest.mark.parametrize("name", WORDS)
def test_the_end_of_a_block_closes_and_the_model_can_be_attached_again(crew, name):
    model = made(Reader)
    train(model, OPTIMIZERS["adam"](model.parameters()), word_loss, [batches_of(name, step) for step in range(STEPS)])
    for got in crew(2).run(twice, name, plan_of(name)):
        assert differ(got, state_of(model)) == {}


def failing(rank, world, name, plan):
    """The last rank leaves its block by an error of its own; what the others are told, and when."""
    run = started(name, plan, timeout=4.0)  # what is under way when a rank leaves ends by its timeout
    began = 0.0
    try:
        with face.block(run):
            take(name, run, range(1))
            began = time.monotonic()
            if rank == world - 1:
                raise ValueError("the planted fault")
            take(name, run, range(1, 50))
    except (ValueError, RuntimeError) as error:
        return str(error), time.monotonic() - began, type(error) is ValueError
    return "nothing", 0.0, False


@pytest.mark.parametrize("name", [*list(WORDS)[::2], *CHAIN])
def test_a_rank_that_leaves_by_an_error_leaves_at_once_and_the_others_hear_why(crew, name):
    for rank, (said, seconds, is_own) in enumerate(crew(EVERY[name][0]).run(failing, name, plan_of(name))):
        assert seconds < 20 and "the planted fault" in said, (rank, said, seconds)
        assert is_own is (rank == EVERY[name][0] - 1)


def left_out(rank, world, plan):
    run = started("owned_rows", plan)
    take("owned_rows", run, range(2))
    face.close(run, gather=False)
    try:
        word_loss(run.model, word_batch(0, 0))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error)
    return "nothing"


def test_a_table_that_was_left_out_says_so_when_it_is_read(crew):
    for said in crew(2).run(left_out, plan_of("owned_rows")):
        assert TABLE in said, said


def reported(rank, world, name, plan):
    run = started(name, plan)
    take(name, run, range(2))
    said = face.report(run)
    face.close(run)
    return said


@pytest.mark.parametrize("name", EVERY)
def test_a_report_has_every_group_with_forecast_and_measured(crew, name):
    plan = plan_of(name)
    answers = crew(EVERY[name][0]).run(reported, name, plan)
    assert len(set(answers)) == 1 and "2 steps" in answers[0]
    assert "forecast" in answers[0] and "measured" in answers[0]
    assert "workers in all steps of this plan" in answers[0]
    assert all(group.name in answers[0] for group in plan.groups)
    is_on_edges = any(group.exchange is None for group in plan.groups) and plan.workers > 1
    assert ("of which, by edge" in answers[0]) == is_on_edges
