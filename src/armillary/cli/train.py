"""`armillary train`: trains a workload on some workers under a plan made for it."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.options import (
    AsJson,
    Corpus,
    Exchanges,
    IsSmall,
    Lazy,
    PlanFile,
    ReplanEvery,
    Replicate,
    Seed,
    Set,
    TopologyFile,
    Trials,
    Workers,
    WorkloadName,
    wishes,
    workload_of,
)  # fmt: skip
from armillary.cli.schedule_options import Schedule, scheduled
from armillary.cli.show import as_json, drain, show
from armillary.cli.workers import rank, run_in_workers
from armillary.facts.plan import SIMULTANEOUS
from armillary.runtime.transport import Transport
from armillary.session.checkpoint import latest_checkpoint
from armillary.session.folder import CHECKPOINTS, run_folder
from armillary.session.rank_zero import by_rank_zero
from armillary.session.settings import Settings
from armillary.session.train import train

__all__ = ["train_command"]


def train_command(
    workload: WorkloadName,
    workers: Workers = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps. (default: the workload's)")] = None,
    seed: Seed = 0,
    small: IsSmall = False,
    corpus: Corpus = "",
    options: Set = [],  # noqa: B006  typer copies it
    lazy: Lazy = [],  # noqa: B006
    replicate: Replicate = [],  # noqa: B006
    exchange: Exchanges = [],  # noqa: B006
    schedule: Schedule = SIMULTANEOUS.name,
    plan_file: PlanFile = None,
    topology_file: TopologyFile = None,
    trials: Trials = 0,
    runs: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    name: Annotated[str, typer.Option(help="Of this run's folder. (default: the workload's name, numbered)")] = "",
    resume: Annotated[bool, typer.Option(help="Go on from the run's last checkpoint.")] = False,
    every_steps: Annotated[int, typer.Option(help="Steps between checkpoints; 0: see --every-seconds.")] = 0,
    every_seconds: Annotated[float, typer.Option(help="Seconds between checkpoints; 0: never.")] = 60.0,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.")] = 2,
    replan_every: ReplanEvery = 0,
    json: AsJson = False,
) -> None:
    """Trains WORKLOAD: profiles it, prints a plan, carries it out, and holds the forecast beside what happened.

    Leaves plan.json, profile.json, trace.json, metrics.jsonl, plot.png and checkpoints under RUNS/NAME.
    """
    stem = Path(workload).stem

    def body() -> int:
        task = workload_of(workload, options, corpus, small)
        granted = scheduled(schedule, wishes(lazy, replicate, exchange, plan_file, topology_file, trials))
        folder = folder_of_all(runs, stem, name, resume)
        count = task.steps if steps is None else steps
        settings = Settings(folder, count, seed, every_steps, every_seconds, keep, resume, replan_every, granted)
        events = train(task, settings)
        if not json and rank() == 0:
            show(events, count, task.unit, folder)
        elif (ended := drain(events)) and rank() == 0:
            print(as_json({"workload": task.name, "folder": folder, **vars(ended)}))
        return 0

    chosen: list[Path] = []  # by the launcher, so that it can say where the last checkpoint is

    def named() -> list[str]:
        chosen.append(run_folder(runs, stem, name, resume))
        return [] if name else ["--name", chosen[0].name]

    run_in_workers(workers, body, named, lambda: how_to_go_on(workload, [*chosen, runs / (name or stem)][0]))


def folder_of_all(runs: Path, stem: str, name: str, resume: bool) -> Path:
    """The run's folder as rank 0 finds it, on every rank."""
    transport = Transport()
    folder = by_rank_zero(transport, lambda: run_folder(runs, stem, name, resume))
    transport.close()
    return folder


def how_to_go_on(workload: str, folder: Path) -> str:
    """What a user who pressed Ctrl-C wants to know."""
    with warnings.catch_warnings(action="ignore"):  # the one that Ctrl-C cut short is no news here
        good = latest_checkpoint(folder / CHECKPOINTS) if (folder / CHECKPOINTS).is_dir() else None
    if good is None:
        return "No checkpoint was written yet."
    return f"The last checkpoint is {good}; go on with: armillary train {workload} --resume --name {folder.name}"
