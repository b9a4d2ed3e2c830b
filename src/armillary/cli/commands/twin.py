"""`armillary twin`: what an exchange that is not exact does to the loss, beside what it does to the seconds."""

from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.names import refusing
from armillary.cli.options import (
    OUTPUT,
    RUN,
    Allow,
    AsJson,
    Corpus,
    Data,
    EdgeBacks,
    Edges,
    Exchanges,
    Gbit,
    Imports,
    IsSmall,
    LatencyUs,
    Schedule,
    Set,
    TopologyFile,
    WorkloadName,
    at_least_one,
)
from armillary.cli.request import AskedMachines, AskedPlan, AskedWorkload
from armillary.plans.plan import SIMULTANEOUS
from armillary.session.run_folder import refuse_unwritable

__all__ = ["twin_command"]

Count = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-w",
        metavar="N",
        help="Simulate this many workers. (default: those of --topology; 4)",
        show_default=False,
        callback=at_least_one,
        rich_help_panel=RUN,
    ),
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps",
        "-n",
        help="Train both for this many optimizer steps.",
        callback=at_least_one,
        rich_help_panel=RUN,
    ),
]
Seeds = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Train both under N seeds: initial values, data order, dropout.",
        callback=at_least_one,
        rich_help_panel=RUN,
    ),
]
Out = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Folder for twin.json and the picture twin.png.", rich_help_panel=OUTPUT)
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on after the seeds that twin.json in --out holds.", rich_help_panel=RUN),
]


def twin_command(
    workload: WorkloadName,
    imports: Imports = [],  # noqa: B006  typer copies it, and has imported them
    options: Set = [],  # noqa: B006
    small: IsSmall = False,
    corpus: Corpus = "",
    data: Data = "",
    exchange: Exchanges = [],  # noqa: B006
    allow: Allow = [],  # noqa: B006
    schedule: Schedule = SIMULTANEOUS.name,
    edge: Edges = [],  # noqa: B006
    edge_back: EdgeBacks = [],  # noqa: B006
    topology_file: TopologyFile = None,
    workers: Count = None,
    gbit: Gbit = None,
    latency_us: LatencyUs = None,
    steps: Steps = 300,
    seeds: Seeds = 3,
    out: Out = Path(),
    resume: Resume = False,
    json: AsJson = False,
) -> None:
    """Train WORKLOAD exactly and by --exchange or --edge side by side, in this one process; show the gap in the loss.

    Both take the same batches. The gap is shown at equal steps and at equal forecast seconds on these links, with the
    point where the curves cross. The links are those of --topology, or assumed. Workers are simulated.
    """
    with refusing():
        task = AskedWorkload(workload, options, corpus, small, data)
        way = AskedPlan(exchanges=exchange, schedule_text=schedule, allow=allow, edges=edge, edge_backs=edge_back)
        machines = AskedMachines(workers, topology_file, None, gbit, latency_us)
        refuse_unwritable(out)
    from armillary.cli.twin import AskedTwin, twin_asked

    twin_asked(task, AskedTwin(way, machines, steps, seeds), out, resume, json)
