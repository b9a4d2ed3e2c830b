"""`armillary plan`: says what training a workload would take, without training it."""

from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.names import refusing
from armillary.cli.options import (
    OUTPUT,
    Allow,
    AsJson,
    Corpus,
    Data,
    EdgeBacks,
    Edges,
    Exchanges,
    Imports,
    IsSmall,
    Lazy,
    ProfileFile,
    Replicate,
    Rule,
    Schedule,
    Seed,
    Set,
    TopologyFile,
    Verbose,
    Workers,
    WorkloadName,
)
from armillary.cli.request import AskedPlan, AskedWorkload
from armillary.planning.demand import PRICE
from armillary.plans.plan import SIMULTANEOUS
from armillary.session.run_folder import refuse_unwritable

__all__ = ["plan_command"]

Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write the plan to this file, for train --plan and simulate; what it was made from goes beside it.",
        rich_help_panel=OUTPUT,
    ),
]


def plan_command(
    workload: WorkloadName,
    imports: Imports = [],  # noqa: B006  typer copies it, and has imported them
    options: Set = [],  # noqa: B006
    small: IsSmall = False,
    corpus: Corpus = "",
    data: Data = "",
    seed: Seed = 0,
    topology_file: TopologyFile = None,
    profile_file: ProfileFile = None,
    lazy: Lazy = [],  # noqa: B006
    replicate: Replicate = [],  # noqa: B006
    exchange: Exchanges = [],  # noqa: B006
    allow: Allow = [],  # noqa: B006
    rule: Rule = PRICE,
    schedule: Schedule = SIMULTANEOUS.name,
    edge: Edges = [],  # noqa: B006
    edge_back: EdgeBacks = [],  # noqa: B006
    workers: Workers = None,
    out: Out = None,
    verbose: Verbose = False,
    json: AsJson = False,
) -> None:
    """Print a plan for WORKLOAD: what its training would send, hold and take, and what else was considered.

    The model is profiled and the links between the workers are measured, unless --profile and --topology say what they
    are. With --topology no worker is started; --workers then says how many of its machines to plan for.
    """
    with refusing():
        task = AskedWorkload(workload, options, corpus, small, data)
        wanted = AskedPlan(
            lazy,
            replicate,
            exchange,
            schedule,
            topology_file=topology_file,
            profile_file=profile_file,
            allow=allow,
            rule=rule,
            edges=edge,
            edge_backs=edge_back,
        )
        if out is not None:
            if out.is_dir():
                raise ValueError(f"--out: {out} is a folder; pass the path of a file, as in {out / 'plan.json'}")
            refuse_unwritable(out.parent)
    from armillary.cli.plan import AskedPrint, plan_asked

    plan_asked(task, wanted, workers, seed, AskedPrint(out, json, verbose))
