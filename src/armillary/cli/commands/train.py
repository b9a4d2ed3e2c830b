"""`armillary train`: trains a workload on some workers under a plan made for it."""

from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.names import refusing
from armillary.cli.options import (
    OUTPUT,
    RUN,
    Allow,
    AsJson,
    Autotune,
    Corpus,
    Data,
    EdgeBacks,
    Edges,
    Exchanges,
    Imports,
    IsSmall,
    Lazy,
    PlanFile,
    Replicate,
    Rule,
    Schedule,
    Seed,
    Set,
    TopologyFile,
    Verbose,
    Workers,
    WorkloadName,
    at_least_one,
    not_negative,
)
from armillary.cli.request import AskedPlan, AskedRun, AskedWorkload
from armillary.planning.demand import PRICE
from armillary.plans.plan import SIMULTANEOUS

__all__ = ["train_command"]

Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        "-n",
        help="Take this many optimizer steps. (default: the workload's)",
        callback=at_least_one,
        rich_help_panel=RUN,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the run's last checkpoint, under its plan unless another is asked for.",
        rich_help_panel=RUN,
    ),
]
EverySteps = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Save a checkpoint every N steps. 0: by the clock only.",
        callback=not_negative,
        rich_help_panel=RUN,
    ),
]
EverySeconds = Annotated[
    float,
    typer.Option(
        metavar="S",
        help="Save a checkpoint every S seconds. 0: by steps only.",
        callback=not_negative,
        rich_help_panel=RUN,
    ),
]
Keep = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Keep the last N checkpoints.",
        callback=at_least_one,
        rich_help_panel=RUN,
    ),
]
Runs = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of all runs.", rich_help_panel=OUTPUT)]
Name = Annotated[
    str,
    typer.Option(
        help="Name of this run's folder. (default: the workload's, or its file's, numbered)", rich_help_panel=OUTPUT
    ),
]


def train_command(
    workload: WorkloadName,
    imports: Imports = [],  # noqa: B006  typer copies it, and has imported them
    options: Set = [],  # noqa: B006
    small: IsSmall = False,
    corpus: Corpus = "",
    data: Data = "",
    seed: Seed = 0,
    plan_file: PlanFile = None,
    topology_file: TopologyFile = None,
    lazy: Lazy = [],  # noqa: B006
    replicate: Replicate = [],  # noqa: B006
    exchange: Exchanges = [],  # noqa: B006
    allow: Allow = [],  # noqa: B006
    rule: Rule = PRICE,
    autotune: Autotune = 0,
    schedule: Schedule = SIMULTANEOUS.name,
    edge: Edges = [],  # noqa: B006
    edge_back: EdgeBacks = [],  # noqa: B006
    workers: Workers = None,
    steps: Steps = None,
    resume: Resume = False,
    every_steps: EverySteps = 0,
    every_seconds: EverySeconds = 60.0,
    keep: Keep = 2,
    runs: Runs = Path("runs"),
    name: Name = "",
    verbose: Verbose = False,
    json: AsJson = False,
) -> None:
    """Train WORKLOAD: print a plan, carry it out, and show the forecast beside what happened.

    The folder RUNS/NAME gets plan.json, profile.json, trace.json, metrics.jsonl, plot.png and checkpoints.
    """
    with refusing():
        task = AskedWorkload(workload, options, corpus, small, data)
        wanted = AskedPlan(
            lazy,
            replicate,
            exchange,
            schedule,
            plan_file,
            topology_file,
            autotune=autotune,
            allow=allow,
            rule=rule,
            edges=edge,
            edge_backs=edge_back,
        )
        run = AskedRun(workers, steps, seed, runs, name, task.stem, resume, every_steps, every_seconds, keep)
    from armillary.cli.train import train_asked

    train_asked(task, wanted, run, json, verbose)
