"""`armillary plan`: what training a workload would take, without training it."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.options import (
    AsJson,
    Corpus,
    Exchanges,
    IsSmall,
    Lazy,
    ProfileFile,
    Replicate,
    Seed,
    Set,
    TopologyFile,
    Workers,
    WorkloadName,
    read_profile,
    wishes,
    workload_of,
)  # fmt: skip
from armillary.cli.schedule_options import Clip, ClipBy, Cut, MicroBatches, Mode, Schedule, Scheduled, Slack, Stages
from armillary.cli.show import as_json, decided_text
from armillary.cli.workers import rank, run_in_workers
from armillary.session.decide import decide, subject_of

__all__ = ["plan_command"]


def plan_command(
    workload: WorkloadName,
    workers: Workers = None,
    seed: Seed = 0,
    small: IsSmall = False,
    corpus: Corpus = "",
    options: Set = [],  # noqa: B006  typer copies it
    lazy: Lazy = [],  # noqa: B006
    replicate: Replicate = [],  # noqa: B006
    exchange: Exchanges = [],  # noqa: B006
    schedule: Schedule = "simultaneous",
    mode: Mode = "",
    slack: Slack = 0,
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    cut: Cut = [],  # noqa: B006
    clip: Clip = None,
    clip_by: ClipBy = "",
    topology_file: TopologyFile = None,
    profile_file: ProfileFile = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan to this file, to edit it or for train --plan.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Profiles WORKLOAD, measures the links between the workers, and prints the plan with its forecast.

    With --topology nothing is measured and no worker is started: the file says what is planned for. With --profile the
    model is not run. `armillary measure` writes both files.
    """
    asked = Scheduled(schedule, mode, slack, stages, micro_batches, cut, clip, clip_by)

    def body() -> int:
        task = workload_of(workload, options, corpus, small)
        granted = asked.added_to(wishes(lazy, replicate, exchange, None, topology_file), workers)
        if profile_file is not None:
            granted = replace(granted, profile=read_profile(profile_file))
        decided = decide(subject_of(task, seed), granted)
        if rank() == 0:
            print(as_json(decided) if json else decided_text(decided))
            if out is not None:
                decided.plan.save(out)
        return 0

    run_in_workers(asked.processes(workers) if topology_file is None else 1, body)
