"""`armillary verify`: says whether N workers train exactly as one process does."""

from typing import Annotated

import typer

from armillary.cli.names import refusing
from armillary.cli.options import (
    RUN,
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
    PlanFile,
    Replicate,
    Rule,
    Schedule,
    Seed,
    Set,
    TopologyFile,
    Workers,
    WorkloadName,
    at_least_one,
)
from armillary.cli.request import AskedPlan, AskedWorkload
from armillary.planning.demand import PRICE
from armillary.plans.plan import SIMULTANEOUS

__all__ = ["verify_command"]

Steps = Annotated[
    int,
    typer.Option(
        "--steps",
        "-n",
        help="Compare after this many optimizer steps.",
        callback=at_least_one,
        rich_help_panel=RUN,
    ),
]
OneBatch = Annotated[
    bool,
    typer.Option(
        "--one-batch",
        help="Claim more: equality with one process that takes the batches of all workers as one.",
        rich_help_panel=RUN,
    ),
]


def verify_command(
    workload: WorkloadName,
    imports: Imports = [],  # noqa: B006  typer copies it, and has imported them
    options: Set = [],  # noqa: B006
    small: IsSmall = True,
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
    schedule: Schedule = SIMULTANEOUS.name,
    edge: Edges = [],  # noqa: B006
    edge_back: EdgeBacks = [],  # noqa: B006
    workers: Workers = None,
    steps: Steps = 5,
    one_batch: OneBatch = False,
    json: AsJson = False,
) -> None:
    """Train WORKLOAD in one process and on the workers, in float64, and compare every tensor.

    This is done under the plan, and under every exchange in turn. Tensors may differ by 1e-10 of their norm. With
    --schedule both follow that schedule, and every bit must be equal, except where gloo sums three or more workers in
    its own order.

    What the plan's exchanges do is counted, over all ranks. The exit code is 3 where something differs, and 1 where
    something never happened.
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
            allow=allow,
            rule=rule,
            edges=edge,
            edge_backs=edge_back,
        )
    from armillary.cli.verify import AskedVerification, verify_asked

    verify_asked(task, wanted, AskedVerification(workers, steps, seed, one_batch), json)
