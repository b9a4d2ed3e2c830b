"""What is not training changes nothing: not the weights, not the random numbers, not the user's process."""

import os
import sys
import threading

import pytest
import torch
from plain_loop import apart, same, state_of
from small_models import OPTIMIZERS, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss

import face

TABLE = "words.weight"
SCHEDULES = {
    "one_device(micro_batches=2, stages=2)": 1,
    "pipeline": 2,
    "ring(stages=2)": 2,
    "zero_ring(stages=2)": 2,
    "shared_stages": 3,
    "delayed_all_reduce": 2,
}


def words_plan(workers=2, exchange="owned_rows"):
    batches = [word_batch(worker, 0) for worker in range(workers)]
    return face.plan_for(made(Reader), word_loss, batches, workers, exchange={TABLE: exchange})


def chain_plan(text, processes):
    batches = [pair_batch(0, number) for number in range(processes)]
    return face.plan_for(chain(), pair_loss, batches, processes, schedule=text)


def hooks_of(optimizer, model):
    """How many hooks of anybody's there are."""
    counts = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
    for module in model.modules():
        counts += [len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks)]
    for parameter in model.parameters():
        if type(parameter) is not torch.nn.Parameter:  # of a table whose rows are spread
            continue
        counts.append(len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ()))
    return sum(counts)


def scheduling():
    """Policy and processors of every thread there is."""
    found = set()
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            found.add((os.sched_getscheduler(thread), frozenset(os.sched_getaffinity(thread))))
        except ProcessLookupError:
            continue
    return found


def test_profiling_and_planning_leave_model_and_random_numbers_as_they_were():
    model = made(Reader)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    before, hooks, numbers = state_of(model), hooks_of(optimizer, model), torch.get_rng_state()
    face.plan_for(model, word_loss, [word_batch(0, 0)], 1, optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert apart(state_of(model), before) == {} and hooks_of(optimizer, model) == hooks
    assert all(parameter.grad is None for parameter in model.parameters()) and not optimizer.state
    assert model.training and type(model.words.weight) is torch.nn.Parameter


def random_numbers(rank, world, plans):
    """Whether they are as before, after starting and after closing."""
    found = []
    for plan, text in plans:
        model = chain() if text else made(Reader)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        torch.manual_seed(17)
        before = torch.get_rng_state()
        loss, example = (pair_loss, pair_batch(0, 0)) if text else (word_loss, None)
        run = face.start(plan, model, optimizer, loss, example)
        found.append(torch.equal(torch.get_rng_state(), before))
        face.close(run)
        found.append(torch.equal(torch.get_rng_state(), before))
    return found


def test_to_start_and_to_close_a_run_draws_no_random_number(crew):
    for processes in (1, 2, 3):
        plans = [(words_plan(processes), "")]
        plans += [(chain_plan(text, count), text) for text, count in SCHEDULES.items() if count == processes]
        for found in crew(processes).run(random_numbers, plans):
            assert found == [True] * 2 * len(plans)


def hooks_left(rank, world, plan):
    model = made(Reader)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    mine = []
    optimizer.register_step_post_hook(lambda *_: mine.append(1))
    before = hooks_of(optimizer, model)
    run = face.start(plan, model, optimizer, word_loss)
    for step in range(2):
        face.step(run, [word_batch(rank, step)])
    during = hooks_of(optimizer, model)
    face.close(run)
    return before, during, hooks_of(optimizer, model), len(mine)


def test_a_closed_run_leaves_the_users_hooks_and_none_of_its_own(crew):
    for exchange in ("all_reduce", "owned_rows"):
        for before, during, after, mine in crew(2).run(hooks_left, words_plan(exchange=exchange)):
            assert during != before and after == before and mine == 2


def scheduled(rank, world, plan):
    before, hook, earlier = scheduling(), sys.excepthook, threading.enumerate()
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["momentum"](model.parameters()), word_loss)
    for step in range(2):
        face.step(run, [word_batch(rank, step)])
    face.close(run)
    threads = [thread.name for thread in threading.enumerate() if thread not in earlier]
    return before == scheduling() and sys.excepthook is hook, threads


def test_policy_processors_and_excepthook_are_as_before_where_ranks_outnumber_the_processors(crew):
    for is_as_before, threads in crew(4).run(scheduled, words_plan(4)):
        assert is_as_before and not [name for name in threads if "armillary" in name]


def disturbed(rank, world, plan, folder, is_looking):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["adam"](model.parameters()), word_loss)
    for step in range(4):
        face.step(run, [word_batch(rank, step)])
        if is_looking:
            face.evaluate(run, word_loss, [word_batch(rank, 90 + extra) for extra in range(2)])
            face.export(run)
            face.save(run, folder)
            face.count_bytes(run)
            str(run.plan)
    got = face.weights(run), face.losses(run)
    face.close(run)
    return got


@pytest.mark.parametrize("exchange", ["all_reduce", "gather_rows", "owned_rows"])
def test_evaluating_exporting_saving_and_counting_change_no_bit_of_training(crew, tmp_path, exchange):
    plan = words_plan(exchange=exchange)
    for looked, plain in zip(
        crew(2).run(disturbed, plan, str(tmp_path), True), crew(2).run(disturbed, plan, "", False), strict=True
    ):
        assert same(looked, plain)


def refused(rank, world, plan):
    """The process and the model before and after an attempt that must fail: the plan is for another number."""
    model = made(Reader)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    before = (state_of(model), hooks_of(optimizer, model), torch.get_rng_state())
    ids = [id(parameter) for parameter in model.parameters()]
    try:
        face.start(plan, model, optimizer, word_loss)
    except ValueError as error:
        said = str(error)
    else:
        said = "nothing"
    after = (state_of(model), hooks_of(optimizer, model), torch.get_rng_state())
    return said, same(list(before), list(after)), ids == [id(parameter) for parameter in model.parameters()]


def test_a_refused_start_leaves_the_model_its_parameters_hooks_and_random_numbers(crew):
    batches = [word_batch(worker, 0) for worker in range(3)]
    plan = face.plan_for(made(Reader), word_loss, batches, 3, exchange={TABLE: "owned_rows"}, per_node=1)
    for said, is_as_before, are_the_same in crew(2).run(refused, plan):
        assert "3 workers" in said and is_as_before and are_the_same


def two_runs(rank, world, plan):
    """One after the other in one process, on the same model and optimizer classes."""
    found = []
    for _ in range(2):
        model = made(Reader)
        run = face.start(plan, model, OPTIMIZERS["adagrad"](model.parameters()), word_loss)
        for step in range(3):
            face.step(run, [word_batch(rank, step)])
        found.append(face.weights(run))
        face.close(run)
    return apart(*found)


def test_a_second_run_in_the_same_process_is_the_first_again(crew):
    assert crew(2).run(two_runs, words_plan()) == [{}, {}]


def test_a_command_writes_nowhere_but_into_its_runs_folder(tmp_path):
    ended = face.command("train", "language_model", "--small", "--workers", "1", "--steps", "2", folder=tmp_path)
    assert ended.code == 0, ended
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["language_model"]
