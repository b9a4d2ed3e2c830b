"""`armillary advise`: one page that says what each method would do for a model on these machines."""

from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.names import refusing
from armillary.cli.options import (
    OUTPUT,
    PLAN,
    RUN,
    AsJson,
    Corpus,
    Data,
    Gbit,
    Imports,
    IsSmall,
    LatencyUs,
    ProfileFile,
    Seed,
    Set,
    TopologyFile,
    WorkloadName,
    at_least_one,
    bytes_of,
)
from armillary.cli.request import AskedAdvice, AskedMachines, AskedWorkload

__all__ = ["advise_command"]

Count = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-w",
        metavar="N",
        help="Advise for this many workers. (default: 8; those of --topology)",
        show_default=False,
        callback=at_least_one,
        rich_help_panel=RUN,
    ),
]
Memory = Annotated[
    str,
    typer.Option(
        "--memory", metavar="SIZE", help="That a worker may hold, such as 500MiB or 8GiB.", rich_help_panel=PLAN
    ),
]
Target = Annotated[
    str,
    typer.Option(help="Sort by seconds, memory, bytes, or latency (serving a trained model).", rich_help_panel=PLAN),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Make forecasts, too, that take longer than 5 s each.", rich_help_panel=PLAN)
]
Script = Annotated[
    str,
    typer.Option(
        "--script",
        metavar="METHOD",
        help="Print the Python script of this row and nothing else.",
        rich_help_panel=OUTPUT,
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Draw seconds against memory into this .png.", rich_help_panel=OUTPUT),
]


def advise_command(
    workload: WorkloadName,
    imports: Imports = [],  # noqa: B006  typer copies it, and has imported them
    options: Set = [],  # noqa: B006
    small: IsSmall = False,
    corpus: Corpus = "",
    data: Data = "",
    seed: Seed = 0,
    workers: Count = None,
    topology_file: TopologyFile = None,
    profile_file: ProfileFile = None,
    gbit: Gbit = None,
    latency_us: LatencyUs = None,
    memory: Memory = "",
    target: Target = "seconds",
    measure: Measure = False,
    script: Script = "",
    out: Picture = None,
    json: AsJson = False,
) -> None:
    """Say what each method would do for WORKLOAD on these machines: seconds, bytes, memory, exact or not, what to type.

    Nothing is trained, and no worker is started: the model is profiled here, and every forecast is made from that. The
    links are those of --topology (from armillary measure), else they are assumed.
    """
    with refusing():
        task = AskedWorkload(workload, options, corpus, small, data)
        machines = AskedMachines(workers, topology_file, profile_file, gbit, latency_us)
        asked = AskedAdvice(bytes_of(memory) if memory else None, target, measure, script, out, tuple(imports))
    from armillary.cli.advise import advise_asked

    advise_asked(task, machines, asked, seed, json)
