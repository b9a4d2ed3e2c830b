"""What `armillary train` does: trains a workload on some workers under a plan made for it."""

import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from armillary.checkpoint.folder import latest_checkpoint
from armillary.cli.launch import count_of, rank, run_in_workers
from armillary.cli.request import AskedPlan, AskedRun, AskedWorkload
from armillary.cli.resolve import job_request_of, refuse_unnamed, workload_of
from armillary.cli.terminal import as_json, drain, show, tell
from armillary.session.plan_job import prepared
from armillary.session.run_folder import CHECKPOINTS, give_back
from armillary.session.train import train
from armillary.session.train_settings import Settings
from armillary.session.workload import Workload
from armillary.transport.agreement import by_rank_zero
from armillary.transport.transport import Transport

__all__ = ["train_asked"]


class _Ready(NamedTuple):
    """What a worker trains, and how; `settings.folder` as one process finds it."""

    task: Workload
    settings: Settings


def train_asked(workload: AskedWorkload, plan: AskedPlan, run: AskedRun, is_json: bool, is_verbose: bool) -> NoReturn:
    """Trains, and ends the process."""
    chosen: list[Path] = []  # by this process, so that it can say where the last checkpoint is
    unmade = [one for one in (run.runs, *run.runs.parents) if not one.exists()]  # the innermost first

    def prepare() -> _Ready:
        task = workload_of(workload)  # first: it may bring methods of its own
        granted = job_request_of(plan, count_of(run.workers))
        task = prepared(task, granted, count_of(run.workers))
        refuse_unnamed(task, granted)
        steps = task.steps if run.steps is None else run.steps
        how = (run.seed, run.every_steps, run.every_seconds, run.keep, run.resume)
        return _Ready(
            task, Settings(run.folder(workload.stem), steps, *how, granted, asks_options=bool(workload.settings))
        )

    def body(ready: _Ready) -> int:
        settings = replace(ready.settings, folder=folder_of_all(run, workload.stem))
        chosen.append(settings.folder)
        with given_back(run, chosen, unmade):  # a worker that fails ends at once, with no word to the block further out
            if not is_json and rank() == 0:
                tell(f"profiling {ready.task.name} and planning ...")
            events = train(ready.task, settings)
            if not is_json and rank() == 0:
                show(events, settings.steps, ready.task.unit, settings.folder, is_verbose)
            elif (ended := drain(events)) and rank() == 0:
                print(as_json({"workload": ready.task.name, "folder": settings.folder, **vars(ended)}))
        return 0

    def named(_: _Ready) -> list[str]:
        chosen.append(run.claimed(workload.stem))
        return [] if run.name else ["--name", chosen[0].name]

    def how() -> str:
        return how_to_go_on(sys.argv[1:], chosen[0]) if chosen else ""

    with given_back(run, chosen, unmade):
        run_in_workers(run.workers, prepare, body, named, how)


@contextmanager
def given_back(run: AskedRun, chosen: Sequence[Path], unmade: Sequence[Path]) -> Iterator[None]:
    """Behind it a folder that was claimed for a run is gone, if the run has not begun.

    Args:
        unmade: folders around it that there were not before; they go too, if they are empty.
    """
    try:
        yield
    finally:
        for folder in (*chosen, *unmade) if run.is_numbered else ():
            give_back(folder)


def folder_of_all(run: AskedRun, stem: str) -> Path:
    """The run's folder as rank 0 claims it, on every rank."""
    transport = Transport()
    folder = by_rank_zero(transport, lambda: run.claimed(stem))
    transport.close()
    return folder


def how_to_go_on(typed: Sequence[str], folder: Path) -> str:
    """What a user who pressed Ctrl-C wants to know: the command line that goes on, with all that was typed."""
    with warnings.catch_warnings(action="ignore"):  # the one that Ctrl-C cut short is no news here
        good = latest_checkpoint(folder / CHECKPOINTS) if (folder / CHECKPOINTS).is_dir() else None
    if good is None:
        return "No checkpoint was written yet."
    is_named = any(word.partition("=")[0] == "--name" for word in typed)
    more = [*(() if "--resume" in typed else ("--resume",)), *(() if is_named else ("--name", folder.name))]
    return f"The last checkpoint is {good}; go on with: {shlex.join(['armillary', *typed, *more])}"
