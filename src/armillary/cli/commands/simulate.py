"""`armillary simulate`: plays a step of a plan against a clock, draws it, and how workloads would scale."""

from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.names import built_in, refusing
from armillary.cli.options import (
    OUTPUT,
    RUN,
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
    ProfileFile,
    Schedule,
    Set,
    TopologyFile,
    at_least_one,
)
from armillary.cli.request import AskedMachines, AskedPlan, AskedWorkload, read_plan
from armillary.plans.plan import SIMULTANEOUS
from armillary.session.run_folder import refuse_unwritable

__all__ = ["simulate_command"]

Subject = Annotated[
    str | None,
    typer.Argument(
        metavar="PLAN|WORKLOAD",
        help=f"A plan.json as plan --out or a run leaves it; or a workload: {', '.join(built_in())}, or a .py file.",
        autocompletion=lambda: list(built_in()),
    ),
]
Count = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-w",
        metavar="N",
        help="Simulate this many workers. (default: the plan's; 8)",
        show_default=False,
        callback=at_least_one,
        rich_help_panel=RUN,
    ),
]
Scaling = Annotated[
    bool,
    typer.Option(
        "--scaling",
        help="Draw curves up to --workers (default: 1024), of WORKLOAD or of all workloads.",
        rich_help_panel=RUN,
    ),
]
Out = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Folder for the trace and the picture.", rich_help_panel=OUTPUT)
]


def simulate_command(
    subject: Subject = None,
    imports: Imports = [],  # noqa: B006  typer copies it, and has imported them
    options: Set = [],  # noqa: B006
    small: IsSmall = False,
    corpus: Corpus = "",
    data: Data = "",
    topology_file: TopologyFile = None,
    profile_file: ProfileFile = None,
    exchange: Exchanges = [],  # noqa: B006
    schedule: Schedule = SIMULTANEOUS.name,
    edge: Edges = [],  # noqa: B006
    edge_back: EdgeBacks = [],  # noqa: B006
    workers: Count = None,
    gbit: Gbit = None,
    latency_us: LatencyUs = None,
    scaling: Scaling = False,
    out: Out = Path(),
    json: AsJson = False,
) -> None:
    """Play one step of a plan, or of the plan made for WORKLOAD, on any number of workers, in this one process.

    It writes timeline.json, which Perfetto and chrome://tracing open; with --scaling it writes
    scaling.json and scaling.png. The links are those of --topology, else those that stand beside the plan; of
    a WORKLOAD they are assumed. Beside a plan its profile stands, too, else pass --profile.
    """
    with refusing():
        if subject is None and not scaling:
            raise ValueError("simulate: want a plan.json or a WORKLOAD; or --scaling, which takes all workloads")
        names_methods = bool(exchange or edge or edge_back or schedule != SIMULTANEOUS.name)
        if scaling and (names_methods or profile_file is not None):
            raise ValueError(
                "--scaling: profiles every workload, and compares the chosen plan with all-reduce; drop --profile, "
                "--exchange, --schedule, --edge, --edge-back"
            )
        if subject is None and (options or corpus or data):
            raise ValueError("--set, --corpus, --data: are for one workload; name it, or drop them")
        asked = AskedMachines(workers, topology_file, profile_file, gbit, latency_us)
        is_plan = subject is not None and subject.endswith(".json") and not scaling
        if is_plan:
            _refuse_beside_plan(names_methods, bool(options or corpus or data or small), asked.assumes_links)
            read_plan(Path(str(subject)))
        task = None if subject is None or is_plan else AskedWorkload(subject, options, corpus, small, data)
        way = AskedPlan(exchanges=exchange, schedule_text=schedule, edges=edge, edge_backs=edge_back)
        refuse_unwritable(out)
    from armillary.cli.simulate import scaling_asked, simulate_asked

    if scaling:
        scaling_asked(task, small, asked, out, json)
    simulate_asked(task if task is not None else Path(str(subject)), asked, way, out, json)


def _refuse_beside_plan(names_methods: bool, names_data: bool, assumes_links: bool) -> None:
    """
    Raises:
        ValueError: something is asked that a plan in a file, and what stands beside it, say themselves.
    """
    if names_methods:
        raise ValueError("--exchange, --schedule, --edge, --edge-back: the plan in the file says its own; edit it")
    if names_data:
        raise ValueError("--set, --small, --corpus, --data: the plan in the file is of its own workload; drop them")
    if assumes_links:
        raise ValueError(
            "--gbit, --latency-us: the links are those that stand beside the plan; pass --topology for others"
        )
