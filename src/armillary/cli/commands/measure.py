"""`armillary measure`: times this cluster's links, processors and a model's stages, into files."""

from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.names import built_in, refusing
from armillary.cli.options import OUTPUT, AsJson, Corpus, Data, Imports, IsSmall, Seed, Set, Workers
from armillary.cli.request import AskedWorkload
from armillary.session.run_folder import refuse_unwritable

__all__ = ["measure_command"]

Subject = Annotated[
    str | None,
    typer.Argument(
        metavar="[WORKLOAD]",
        help=f"Also profile this model: {', '.join(built_in())}, or the path of a .py file.",
        autocompletion=lambda: list(built_in()),
    ),
]
Out = Annotated[
    Path, typer.Option(metavar="FOLDER", help="Folder for topology.json and profile.json.", rich_help_panel=OUTPUT)
]


def measure_command(
    workload: Subject = None,
    imports: Imports = [],  # noqa: B006  typer copies it, and has imported them
    options: Set = [],  # noqa: B006
    small: IsSmall = False,
    corpus: Corpus = "",
    data: Data = "",
    seed: Seed = 0,
    workers: Workers = None,
    out: Out = Path(),
    json: AsJson = False,
) -> None:
    """Measure the links between the workers, their processors and memory, and the model of WORKLOAD.

    The files topology.json (topology_nccl.json too where the job has NCCL) and profile.json, if WORKLOAD is given, are
    what plan and simulate read. It takes some ten seconds, longer on slow links.
    """
    with refusing():
        task = None if workload is None else AskedWorkload(workload, options, corpus, small, data)
        refuse_unwritable(out)
    from armillary.cli.measure import measure_asked

    measure_asked(task, workers, seed, out, json)
