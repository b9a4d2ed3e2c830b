"""What `armillary verify` does: compares N workers with one process."""

from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from armillary.cli.launch import count_of, rank, run_in_workers
from armillary.cli.names import FAILED, UNEQUAL
from armillary.cli.request import AskedPlan, AskedWorkload
from armillary.cli.resolve import job_request_of, refuse_unnamed, workload_of
from armillary.cli.terminal import as_json, console_here, put, tell
from armillary.plans.plan import SIMULTANEOUS
from armillary.session.double_precision import ask_for_repeatable
from armillary.session.plan_job import JobRequest, prepared
from armillary.session.verification import Verification
from armillary.session.verify import verify_workload
from armillary.session.workload import Workload
from armillary.transport.transport import Transport

__all__ = ["AskedVerification", "code_of", "verify_asked"]


@dataclass(frozen=True)
class AskedVerification:
    """What was typed of a comparison. one_batch: the one process takes the batches of all workers joined."""

    seed: int
    workers: int | None
    steps: int
    one_batch: bool


class _Ready(NamedTuple):
    """What is trained twice; joined: the same with the batches of all workers in one."""

    task: Workload
    request: JobRequest
    joined: Workload | None


def code_of(found: Verification) -> int:
    """What the process ends with."""
    if not found.is_equal:
        return UNEQUAL
    return FAILED if found.idle else 0


def verify_asked(workload: AskedWorkload, plan: AskedPlan, asked: AskedVerification, is_json: bool) -> NoReturn:
    """Compares, and ends the process."""
    ask_for_repeatable()  # before the first product here, and for the workers

    def prepare() -> _Ready:
        task, joined, workers = workload_of(workload), None, count_of(asked.workers)
        granted = job_request_of(plan, workers)
        if asked.one_batch and granted.schedule != SIMULTANEOUS:
            name = granted.schedule.name
            raise ValueError(f"--one-batch: no step of schedule {name} is one on the batch of all workers; drop it")
        task = prepared(task, granted, workers)
        refuse_unnamed(task, granted)
        if asked.one_batch:
            size = f"batch_size={task.batch_size * workers}"
            typed = replace(workload.typed, options=[*workload.typed.options, size])
            joined = workload_of(replace(workload, typed=typed))
        return _Ready(task, granted, joined)

    def body(ready: _Ready) -> int:
        transport = Transport()
        if rank() == 0 and not is_json:
            tell(f"training {ready.task.name} for {asked.steps} steps on the workers, then in one process ...")
        found = verify_workload(
            ready.task, steps=asked.steps, seed=asked.seed, request=ready.request, global_batch=ready.joined
        )
        if rank() == 0:
            if is_json:
                print(as_json({**vars(found), "is_equal": found.is_equal, "idle": found.idle}), flush=True)
            else:
                put(console_here(), found.page())
        transport.barrier()  # a rank that leaves with an exit code ends the others
        return code_of(found)

    run_in_workers(asked.workers, prepare, body)
