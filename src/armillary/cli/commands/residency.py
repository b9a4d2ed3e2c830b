"""`armillary residency`: trains a few steps under a memory budget, and says what other budgets would cost."""

from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.names import refusing
from armillary.cli.options import PLAN, AsJson, Corpus, Data, Imports, IsSmall, Seed, Set, WorkloadName, bytes_of
from armillary.cli.request import AskedWorkload

__all__ = ["residency_command"]

Memory = Annotated[
    str,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="For all tensors together, such as 40MiB or 2GiB: weights, gradients, optimizer state, activations.",
        rich_help_panel=PLAN,
    ),
]
TierFolder = Annotated[
    Path | None,
    typer.Option("--tier", metavar="FOLDER", help="Swap to a file in this folder, on a disk.", rich_help_panel=PLAN),
]
Stages = Annotated[
    list[str],
    typer.Option(
        "--stage",
        metavar="PATTERN",
        help="Modules to decide for, such as 'blocks.*'. Repeatable; the model's children if none are given.",
        rich_help_panel=PLAN,
    ),
]


def residency_command(
    workload: WorkloadName,
    memory: Memory,
    tier: TierFolder = None,
    stages: Stages = [],  # noqa: B006  typer copies it
    imports: Imports = [],  # noqa: B006
    options: Set = [],  # noqa: B006
    small: IsSmall = False,
    corpus: Corpus = "",
    data: Data = "",
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Train ten steps of WORKLOAD in one process within --memory, and print the plan beside what was measured.

    Each stage keeps its activations, recomputes them, or swaps them to --tier. A last table says what six budgets,
    from the least that fits to keeping all, would take.
    """
    with refusing():
        task = AskedWorkload(workload, options, corpus, small, data)
        memory_bytes = bytes_of(memory)
    from armillary.cli.residency import residency_asked

    residency_asked(task, memory_bytes, tier, stages, seed, json)
