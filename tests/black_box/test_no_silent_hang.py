"""Who is waited for in vain is named: in a line after `report_after`, in the error of the others after `timeout`."""

import os
import re
import signal
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
from small_models import OPTIMIZERS, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import armillary
import face
from armillary.transport.watchdog import RankStatus, timeout_advice
from forked import Job

TABLE = "words.weight"
PATIENCE = {"report_after": 1.0, "timeout": 5.0}
SPREAD, DENSE, PIPELINE, DELAYED = "owned_rows", "all_reduce", "pipeline", "delayed_all_reduce"


def plan_of(name, ranks):
    if name in (PIPELINE, DELAYED):
        return face.plan_for(chain(), pair_loss, [pair_batch(0, n) for n in range(ranks)], ranks, schedule=name)
    batches = [word_batch(worker, 0) for worker in range(ranks)]
    return face.plan_for(made(Reader), word_loss, batches, ranks, exchange={TABLE: name})


def started(plan, owns_loop=False):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        dist.barrier()  # from here on ranks of a busy machine are not far apart
    model, loss, example = (chain(), pair_loss, pair_batch(0, 0)) if owns_loop else (made(Reader), word_loss, None)
    return face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), loss, example, **PATIENCE)


def train(run, steps, rank):
    for step in steps:
        face.step(run, [word_batch(rank, step)])


def train_chain(run, steps):
    for step in steps:
        count = run.plan.mesh.data_coordinates if run.plan.schedule.name == DELAYED else 2
        face.step(run, face.own(run, [pair_batch(step, n) for n in range(count)]))


# Scripts. Each is what a rank of a job runs.


def save_on_rank_0(rank, ranks, plan):
    run = started(plan)
    train(run, range(2), rank)
    if rank == 0:
        run.run.save("nowhere")
    train(run, range(2, 9), rank)


def export_on_rank_0(rank, ranks, plan):
    run = started(plan)
    train(run, range(2), rank)
    if rank == 0:
        run.run.export()
    train(run, range(2, 9), rank)


def evaluate_on_rank_0(rank, ranks, plan):
    run = started(plan)
    train(run, range(2), rank)
    if rank == 0:
        face.evaluate(run, word_loss, [word_batch(0, 9)])
    train(run, range(2, 9), rank)


def norm_on_rank_0(rank, ranks, plan):
    run = started(plan)
    for step in range(4):
        word_loss(run.model, word_batch(rank, step)).backward()
        if rank == 0:
            run.model.words.weight.grad.norm()
        run.optimizer.step()


def uneven_batches(rank, ranks, plan):
    run = started(plan)
    train(run, range(2 + rank), rank)
    run.run.close()


def raise_on_rank_1(rank, ranks, plan):
    run = started(plan)
    for step in range(4):
        if (rank, step) == (1, 2):
            raise KeyError("no such word")
        train(run, [step], rank)


def signalled(rank, ranks, plan, number, who):
    run = started(plan)
    for step in range(4):
        if (rank, step) == (who, 2):
            os.kill(os.getpid(), number)
        train(run, [step], rank)


def validate_on_rank_0_before_a_broadcast(rank, ranks, plan):
    run = started(plan)
    train(run, range(2), rank)
    stop = torch.zeros(1)
    if rank == 0:
        with torch.no_grad():
            stop += word_loss(run.model, word_batch(0, 9))
    dist.broadcast(stop, 0)


def evaluate_after_others_closed(rank, ranks, plan):
    run = started(plan)
    train(run, range(2), rank)
    if rank == 0:
        face.evaluate(run, word_loss, [word_batch(0, 9)])
    run.run.close()


def save_in_a_pipeline_on_rank_0(rank, ranks, plan):
    run = started(plan, owns_loop=True)
    train_chain(run, range(3))
    if rank == 0:
        run.run.save("nowhere")
    train_chain(run, range(3, 9))


def raise_in_a_pipeline(rank, ranks, plan):
    run = started(plan, owns_loop=True)
    for step in range(9):
        if (rank, step) == (1, 3):
            raise KeyError("no such word")
        train_chain(run, [step])


def uneven_steps_of_delayed(rank, ranks, plan):
    run = started(plan, owns_loop=True)
    train_chain(run, range(2 + rank))
    run.run.close()


def come_late(rank, ranks, plan):
    dist.init_process_group("gloo")
    if rank == 1:
        started(plan)
    else:
        time.sleep(8.0)


def fail_in_attach(rank, ranks, plan):
    dist.init_process_group("gloo")
    model = made(Reader)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    if rank == 1:
        model.named_buffers = lambda: [][0]
    face.start(plan, model, optimizer, word_loss, **PATIENCE)


# Legal ones.


def look_up_alone_for_longer_than_the_timeout(rank, ranks, plan):
    run = started(plan)
    train(run, range(2), rank)
    until = time.monotonic() + 6.0
    while rank == 0 and time.monotonic() < until:
        with torch.no_grad():
            word_loss(run.model, word_batch(0, 9))
        time.sleep(0.1)
    train(run, range(2, 4), rank)
    run.run.close()


def work_alone_while_others_wait_for_nothing_of_ours(rank, ranks, plan):
    run = started(plan)
    train(run, range(2), rank)
    time.sleep(6.0 * (rank == 0))
    dist.barrier()
    train(run, range(2, 4), rank)
    run.run.close()


def work_alone_for_longer_than_a_report(rank, ranks, plan):
    run = started(plan)
    train(run, range(2), rank)
    time.sleep(2.5 * (rank == 0))
    train(run, range(2, 4), rank)
    run.run.close()


JOBS = {
    "save": (save_on_rank_0, SPREAD),
    "export": (export_on_rank_0, DENSE),
    "evaluate": (evaluate_on_rank_0, SPREAD),
    "norm": (norm_on_rank_0, SPREAD),
    "uneven": (uneven_batches, DENSE),
    "raise": (raise_on_rank_1, SPREAD),
    "stop": (signalled, SPREAD, signal.SIGSTOP, 1),
    "stop of the store": (signalled, DENSE, signal.SIGSTOP, 0),
    "kill": (signalled, DENSE, signal.SIGKILL, 1),
    "broadcast": (validate_on_rank_0_before_a_broadcast, SPREAD),
    "closed": (evaluate_after_others_closed, DENSE),
    "pipeline save": (save_in_a_pipeline_on_rank_0, PIPELINE),
    "pipeline raise": (raise_in_a_pipeline, PIPELINE),
    "delayed": (uneven_steps_of_delayed, DELAYED),
    "late": (come_late, DENSE),
    "attach": (fail_in_attach, DENSE),
    "look-ups": (look_up_alone_for_longer_than_the_timeout, SPREAD),
    "nothing of ours": (work_alone_while_others_wait_for_nothing_of_ours, DENSE),
    "report": (work_alone_for_longer_than_a_report, DENSE),
}
RANKS = 2
STOPPED = {"stop": [1], "stop of the store": [0]}
TOGETHER = 9  # jobs that wait at the same time, so that the tests need not


@cache
def ended_together(number):
    names = list(JOBS)[number * TOGETHER :][:TOGETHER]
    jobs = {name: Job(RANKS, JOBS[name][0], plan_of(JOBS[name][1], RANKS), *JOBS[name][2:]) for name in names}
    return {name: job.ended(STOPPED.get(name, [])) for name, job in jobs.items()}


def ended(name):
    return ended_together(list(JOBS).index(name) // TOGETHER)[name]


def said(name):
    """By rank: what it printed of who stands where, and the message it ended with, empty if it ended well."""
    found = []
    for one in ended(name):
        lines = [line for line in one.err.splitlines() if line.startswith("armillary: ")]
        errors = [line.partition("Error: ")[2] for line in one.err.splitlines() if "Error: " in line]
        assert (one.code == 1) == bool(errors), one
        found.append(("\n".join(lines), errors[-1] if errors else ""))
    return found


def is_placed(rank, call, error):
    """Whether it says that the rank is in that call, or has just raised there."""
    return re.search(rf"rank {rank}: (in|has stopped with RuntimeError, outside armillary since its) {call}\b", error)


def test_save_on_rank_0_alone_is_named_at_once_on_both_ranks():
    for lines, error in said("save"):
        assert "ranks [0] are in a call between two steps (run.save, " in error and not lines
        assert "while the others run a backward; every rank must make that call, not one alone" in error


def test_export_on_rank_0_alone_is_named_on_both_ranks():
    (lines, first), (_, second) = said("export")
    assert "rank 0: in export, " in lines and "rank 1: in step, all-reduce of bucket 0, step 2" in lines
    assert "a wait ends after timeout=5 s" in lines
    assert first.startswith("rank 0: export, ") and is_placed(1, "step", first)
    assert second.startswith("rank 1: step, ") and is_placed(0, "export", second)
    for error in (first, second):
        assert "within timeout=5 s" in error and "Every rank must call run.export, not one alone" in error
        assert "gloo" not in error
    assert sum("The first error was on rank" in error for error in (first, second)) == 1, "quoted by the other rank"


def test_evaluation_on_rank_0_alone_is_named_at_once_on_both_ranks():
    for lines, error in said("evaluate"):
        assert "ranks [0] are in run.evaluate while the others run a backward" in error and not lines
        assert "every rank must call run.evaluate, not one alone" in error


def test_a_gradient_norm_of_a_spread_table_on_rank_0_alone_is_named_at_once_on_both_ranks():
    for lines, error in said("norm"):
        assert "ranks [0] ask for a norm, sum or other value of a whole table while the others run a backward" in error
        assert "let every rank ask, not one alone" in error and not lines


def test_ranks_that_close_after_different_numbers_of_steps_are_told_so():
    """As under a ring, whose last steps end in close."""
    here, there = RankStatus("close", step=8), RankStatus("close", step=9)
    assert timeout_advice(here, [there]) == "Ranks have taken different numbers of steps (8 to 9): take as many on each"
    assert timeout_advice(here, [here]) == ""


def test_uneven_dense_batches_are_told_of_run_batches():
    (lines, first), (_, second) = said("uneven")
    assert "rank 0: in close, " in lines and "rank 1: in step, all-reduce of bucket 0, step 2" in lines
    assert all("run.batches(loader)" in error for error in (first, second))


@pytest.mark.parametrize(
    ("name", "waiting"),
    [("raise", "all-to-all of look-ups"), ("pipeline raise", "activation gradient of stage 1 from rank 1")],
)
def test_what_one_rank_raises_is_quoted_by_the_other_without_any_with_block(name, waiting):
    (_, first), (_, second) = said(name)
    assert second == "'no such word'"
    assert first.startswith(f"rank 0: step, {waiting}")
    assert first.endswith("a peer has stopped. The first error was on rank 1: KeyError: 'no such word'")


def test_a_stopped_rank_is_named_as_silent():
    (lines, first), _ = said("stop")
    assert "rank 0: in step, all-to-all of look-ups, step 2" in lines
    assert "rank 1: no sign of life for" in first and "within timeout=5 s" in first


def test_a_stopped_rank_that_keeps_the_store_stops_no_other():
    _, (lines, second) = said("stop of the store")
    for text in (lines, second):
        assert "step, all-reduce of bucket 0, step 2" in text and "the job's store (rank 0, or the launcher)" in text


def test_a_rank_that_does_not_come_to_attach_is_named():
    _, (lines, second) = said("late")
    assert "rank 0: has not come; rank 1: in attach, connections to the others" in lines
    assert "rank 0: has not come. Every rank of the job must call attach" in second


def test_what_one_rank_raises_in_attach_is_quoted_by_the_other():
    (_, first), (_, second) = said("attach")
    assert second == "list index out of range"
    assert first.endswith("The first error was on rank 1: IndexError: list index out of range")


def test_a_killed_rank_is_named_as_silent():
    (_, first), (_, second) = said("kill")
    assert "a peer has stopped" in first and "rank 1: no sign of life for" in first and not second


def test_who_reads_rows_while_others_are_in_a_collective_of_their_own_is_told_where_they_are():
    (lines, first), _ = said("broadcast")
    assert f"rank 0: in look-up of {TABLE}, " in lines and "rank 1: outside armillary since its step, " in lines
    assert "rank 1: outside armillary since its step" in first and "run.evaluate" in first


def test_an_evaluation_after_others_have_closed_is_told_so():
    (_, first), (_, second) = said("closed")
    assert first.startswith("rank 0: evaluate, ") and "rank 1: " in first and "run.evaluate" in first
    assert second.startswith("rank 1: close, ") and is_placed(0, "evaluate", second)  # who waits first ends first


def test_save_on_rank_0_alone_is_named_under_a_schedule_that_owns_the_loop():
    (lines, first), (_, second) = said("pipeline save")
    assert "rank 0: in save, " in lines and "rank 1: in step, activation of stage 0 from rank 0, step 3" in lines
    assert is_placed(1, "step", first) and is_placed(0, "save", second)
    assert all("Every rank must call run.save" in error for error in (first, second))


def test_uneven_steps_are_named_under_delayed_all_reduce():
    (lines, first), (_, second) = said("delayed")
    assert "rank 0: in close, " in lines and "rank 1: in step, " in lines
    assert is_placed(1, "step", first) and is_placed(0, "close", second)


@pytest.mark.parametrize("name", ["look-ups", "nothing of ours"])
def test_who_works_alone_and_keeps_nobody_in_one_wait_is_not_told_of(name):
    for lines, error in said(name):
        assert not error and not re.search(r"since [3-9] s", lines), lines


def test_who_is_away_for_longer_than_a_report_is_told_of_and_training_goes_on():
    (_, first), (lines, second) = said("report")
    assert "rank 0: outside armillary since its step, 1 s ago; rank 1: in step, all-reduce of bucket 0" in lines
    assert not (first or second)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"timeout": 0}, "timeout: want a positive number of seconds, got 0"),
        ({"timeout": True}, "timeout: want a positive number of seconds, got True"),
        ({"timeout": None}, "timeout: want a positive number of seconds, got None"),
        ({"timeout": float("inf")}, "timeout: want a positive number of seconds, got inf"),
        ({"report_after": -1.0}, "report_after: want a positive number of seconds, or None for no reports, got -1.0"),
        ({"report_after": "60"}, "report_after: want a positive number of seconds, or None for no reports, got '60'"),
        ({"report_after": 30.0, "timeout": 30.0}, "report_after=30: a wait ends after timeout=30 seconds, before it"),
    ],
)
def test_waits_that_mean_nothing_are_refused_before_anything_happens(asked, complaint):
    model = made(Reader)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(ValueError, match=re.escape(complaint)):
        armillary.attach(plan_of(DENSE, 1), model, optimizer, **asked)
    with pytest.raises(ValueError, match=re.escape(complaint)):
        armillary.parallelize(model, optimizer, [word_batch(0, 0)], word_loss, **asked)
    assert not dist.is_initialized()


def test_a_timeout_alone_is_never_refused_and_a_long_wait_is_reported_before_its_end():
    model = made(Reader)
    run = armillary.attach(plan_of(DENSE, 1), model, OPTIMIZERS["sgd"](model.parameters()), timeout=30)
    timeouts = run._engine.transport.watchdog.timeouts
    assert (timeouts.timeout, timeouts.report_after) == (30, 15)
    run.close()


def work_alone_for_longer_than_a_report_as_torchrun_starts_it(plan):
    model = made(Reader)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    run = face.start(plan, model, optimizer, word_loss, report_after=1.0, timeout=60.0)
    train(run, range(2), run.rank)
    time.sleep(2.5 * (run.rank == 0))
    train(run, range(2, 4), run.rank)
    run.run.close()


def as_torchrun(rank, ranks, plan):
    """What `torchrun --standalone` does: its agent holds the store and starts the ranks, here forked from it."""
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "reported"}
    config = LaunchConfig(1, 1, RANKS, start_method="fork", max_restarts=0, **place)
    elastic_launch(config, work_alone_for_longer_than_a_report_as_torchrun_starts_it)(plan)


def test_under_torchrun_the_report_comes_too_and_nothing_else_is_said():
    (ended,) = Job(1, as_torchrun, plan_of(SPREAD, RANKS)).ended()
    assert ended.code == 0, ended.err
    assert "armillary: rank 0: outside armillary since its step, " in ended.err
    assert "[c10d]" not in ended.err
