"""A rank that dies inside a coded exchange or while residuals are saved, or whose data end early, is named by the
others; what was saved before opens, with all that waited."""

import os
import signal
from functools import cache

import pytest
import torch
import torch.distributed as dist
from small_models import OPTIMIZERS, Reader, made, word_batch, word_loss

import face
from armillary import Choice
from armillary.checkpoint.row_file import RowFile
from forked import Job

PATIENCE = {"report_after": 1.0, "timeout": 5.0}
TEXT, RANKS = "quantize(bits=4, wire=scattered)", 2


def plan_for(ranks):
    batches = [word_batch(worker, 0) for worker in range(ranks)]
    return face.plan_for(made(Reader), word_loss, batches, ranks, exchange={"*": Choice.parse(TEXT)})


def started(plan):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        dist.barrier()
    model = made(Reader)
    return face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss, **PATIENCE)


def units_of(run):
    return run.run._engine.executor.units


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_a_code(rank, ranks, plan, folder):
    """Rank 1 dies when codes have come to it, and before it codes their sum."""
    run = started(plan)
    for step in range(4):
        if (rank, step) == (1, 2):
            for unit in units_of(run):
                push = unit.exchange.push

                def dying(parcel, state, place, push=push):
                    program = push(parcel, state, place)
                    yield program.send(None)
                    die()

                unit.exchange = unit.exchange._replace(push=dying)
        face.step(run, [word_batch(rank, step)])


def uneven(rank, ranks, plan, folder):
    run = started(plan)
    for step in range(3 - rank):
        face.step(run, [word_batch(rank, step)])
    run.run.close()


def killed_in_a_save(rank, ranks, plan, folder):
    """Rank 1 dies while it writes its residuals for the second time."""
    run = started(plan)
    for step in range(4):
        face.step(run, [word_batch(rank, step)])
        if step == 1:
            face.save(run, folder)
            waiting = {unit.name: unit.state["residual"].clone() for unit in units_of(run)}
            torch.save(waiting, folder / f"waiting-{rank}.pt")
    if rank == 1:
        RowFile.append = lambda self, block: die()
    face.save(run, folder)


JOBS = {"code": killed_in_a_code, "uneven": uneven, "save": killed_in_a_save}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """All at the same time, as most of it is waiting."""

    @cache
    def jobs():
        folder = tmp_path_factory.mktemp("saved")
        started = {name: Job(RANKS, program, plan_for(RANKS), folder) for name, program in JOBS.items()}
        return folder, {name: job.ended() for name, job in started.items()}

    return jobs


def error_of(one):
    return [line.partition("Error: ")[2] for line in one.err.splitlines() if "Error: " in line][-1]


def test_a_rank_that_is_killed_inside_a_coded_exchange_is_named(ended):
    first, second = ended()[1]["code"]
    assert second.code == -signal.SIGKILL and first.code == 1
    assert error_of(first).startswith("rank 0: step, all-to-all of ") and "step 2" in first.err
    assert "a peer has stopped" in error_of(first) or "within timeout=5 s" in error_of(first)
    assert "rank 1: no sign of life for" in error_of(first)


def test_data_that_end_a_step_early_on_one_rank_are_told_of_run_batches(ended):
    first, second = ended()[1]["uneven"]
    assert (first.code, second.code) == (1, 1)
    assert all("run.batches(loader)" in error_of(one) for one in (first, second))


def opened(rank, workers, plan, folder):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    face.load(run, face.latest_checkpoint(folder))
    found = {unit.name: unit.state["residual"].clone() for unit in units_of(run)}
    face.close(run)
    return found


@pytest.mark.filterwarnings("ignore:checkpoint. skipped:UserWarning")
def test_a_rank_that_is_killed_while_residuals_are_saved_is_named_and_the_last_checkpoint_has_them(ended, crew):
    folder, jobs = ended()
    first, second = jobs["save"]
    assert second.code == -signal.SIGKILL and first.code == 1
    assert error_of(first).startswith("rank 0: save, ") and "rank 1: no sign of life for" in error_of(first)
    assert face.latest_checkpoint(folder).name == "step-00000002"
    for rank, found in enumerate(crew(RANKS).run(opened, plan_for(RANKS), folder)):
        waiting = torch.load(folder / f"waiting-{rank}.pt")
        assert found.keys() == waiting.keys() and any(bool(one.any()) for one in waiting.values())
        assert all(torch.equal(found[name], want) for name, want in waiting.items())
