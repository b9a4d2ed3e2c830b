"""`armillary verify`: whether N workers train exactly as one process does."""

from typing import Annotated

import typer

from armillary.cli.options import (
    AsJson,
    Corpus,
    Exchanges,
    Lazy,
    PlanFile,
    Replicate,
    Seed,
    Set,
    TopologyFile,
    Workers,
    WorkloadName,
    wishes,
    workload_of,
)  # fmt: skip
from armillary.cli.schedule_options import Schedule, scheduled
from armillary.cli.show import as_json
from armillary.cli.workers import rank, run_in_workers
from armillary.facts.plan import SIMULTANEOUS
from armillary.runtime.transport import Transport
from armillary.session.kernel_mode import ask_for_repeatable
from armillary.session.verify import verify_workload

__all__ = ["verify_command"]


def verify_command(
    workload: WorkloadName,
    workers: Workers = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare after.")] = 5,
    seed: Seed = 0,
    full: Annotated[bool, typer.Option(help="The workload at full size, not its small version.")] = False,
    one_batch: Annotated[
        bool, typer.Option(help="Claim more: equality with one process on the batches of all workers joined.")
    ] = False,
    corpus: Corpus = "",
    options: Set = [],  # noqa: B006  typer copies it
    lazy: Lazy = [],  # noqa: B006
    replicate: Replicate = [],  # noqa: B006
    exchange: Exchanges = [],  # noqa: B006
    schedule: Schedule = SIMULTANEOUS.name,
    plan_file: PlanFile = None,
    topology_file: TopologyFile = None,
    json: AsJson = False,
) -> None:
    """Trains WORKLOAD in one process and on the workers, in float64, and compares every tensor.

    Under the plan and under every exchange in turn. Exit code 1 if one differs by more than 1e-10 of its norm.
    With --schedule both follow that schedule, and every bit must be equal (to rounding: where gloo sums three or more
    workers in an order of its own, and tables kept by row).
    """
    ask_for_repeatable()  # before the first product here, and for the workers

    def body() -> int:
        task = workload_of(workload, options, corpus, not full)
        granted = scheduled(schedule, wishes(lazy, replicate, exchange, plan_file, topology_file))
        transport = Transport()
        joined = None
        if one_batch and granted.owns_loop:
            raise ValueError("--one-batch: a schedule that is not simultaneous keeps micro-batches apart; drop it")
        if one_batch:
            size = task.batch_size * transport.place.workers
            joined = workload_of(workload, [*options, f"batch_size={size}"], corpus, not full)
        found = verify_workload(task, steps=steps, seed=seed, wishes=granted, global_batch=joined)
        if rank() == 0:
            print(as_json({**vars(found), "is_equal": found.is_equal}) if json else found, flush=True)
        transport.barrier()  # a rank that leaves with an exit code ends the others
        return 0 if found.is_equal else 1

    run_in_workers(workers, body)
