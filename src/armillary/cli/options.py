"""The options that commands share: what they are called, their units and defaults; and what was asked, in groups."""

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from armillary.cli.names import built_in, import_own, refusing, schedules
from armillary.cli.request import GBIT, LATENCY_US

__all__ = [
    "OUTPUT",
    "PLAN",
    "RUN",
    "WORKLOAD",
    "Allow",
    "AsJson",
    "Autotune",
    "Corpus",
    "Data",
    "EdgeBacks",
    "Edges",
    "Exchanges",
    "Gbit",
    "Imports",
    "IsSmall",
    "LatencyUs",
    "Lazy",
    "PlanFile",
    "ProfileFile",
    "Replicate",
    "Rule",
    "Schedule",
    "Seed",
    "Set",
    "TopologyFile",
    "Verbose",
    "Workers",
    "WorkloadName",
    "at_least_one",
    "bytes_of",
    "not_negative",
]  # fmt: skip

UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
SIZE = re.compile(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*")

# The panels of --help.
WORKLOAD, PLAN, SCHEDULE, RUN, OUTPUT = "Workload", "Plan", "Schedule", "Run", "Output"


Number = TypeVar("Number", int, float, int | None)


def at_least_one(option: typer.CallbackParam, value: Number) -> Number:
    """A callback: ends the process with a refusal where there is to be none of something."""
    with refusing():
        if value is not None and value < 1:
            raise ValueError(f"{option.opts[0]}: want at least 1, got {value}")
    return value


def not_negative(option: typer.CallbackParam, value: Number) -> Number:
    """A callback, for what may be 0."""
    with refusing():
        if value is not None and value < 0:
            raise ValueError(f"{option.opts[0]}: want 0 or more, got {value}")
    return value


def bytes_of(text: str) -> int:
    """
    Raises:
        ValueError: it is no size.
    """
    found = SIZE.fullmatch(text)
    if found is None or found[2].upper() not in UNITS or found[1].count(".") > 1:
        raise ValueError(f"--memory: want a size such as 40MiB or 2GiB, got {text!r}")
    return int(float(found[1]) * UNITS[found[2].upper()])


def _many(option: str, metavar: str, text: str, panel: str = PLAN) -> Any:
    """An option that may be given again and again."""
    return typer.Option(option, metavar=metavar, help=f"{text} Repeatable.", rich_help_panel=panel)


WorkloadName = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD",
        help=f"What to train: {', '.join(built_in())}, or the path of a .py file with a function workload().",
        autocompletion=lambda: list(built_in()),
    ),
]
Set = Annotated[
    list[str],
    _many(
        "--set",
        "KEY=VALUE",
        "Set an option of the workload: a number, true, false, a Python literal, or else text.",
        WORKLOAD,
    ),
]
Imports = Annotated[
    list[str],
    typer.Option(
        "--import",
        metavar="FILE",
        help="First import this .py file (or module) of your own, here and on every worker: codecs, exchanges and "
        "schedules that register themselves. Repeatable.",
        callback=import_own,
    ),
]
IsSmall = Annotated[
    bool,
    typer.Option(
        "--small/--full",
        help="Take the workload's small version, on made-up data, or all of it.",
        rich_help_panel=WORKLOAD,
    ),
]
Corpus = Annotated[
    str,
    typer.Option(
        help="Train on this text file or folder (plain or .gz), if the workload is one of text.",
        rich_help_panel=WORKLOAD,
    ),
]
Data = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="Train on these data, if the workload takes some. recommender: MovieLens ratings (u.data, ratings.dat or "
        "ratings.csv), or their folder.",
        rich_help_panel=WORKLOAD,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed for initial values, data order and dropout.", rich_help_panel=WORKLOAD)]

Lazy = Annotated[
    list[str], _many("--lazy", "PATTERN", "Update only the touched rows of these tables: less memory, NOT exact.")
]
Replicate = Annotated[list[str], _many("--replicate", "PATTERN", "Keep these parameters whole on every worker.")]
ALLOWED = "Let the plan choose among ways that are NOT exact: lossy (rounded or thinned gradients)."
Allow = Annotated[list[str], _many("--allow", "DEPARTURE", ALLOWED)]
EXCHANGED = "Communicate these parameters this way: 'int8=*', or row-wise sharding, 'owned_rows(owners=2)=emb.*'."
Exchanges = Annotated[list[str], _many("--exchange", "CHOICE=PATTERN", EXCHANGED)]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        help="Carry out the plan in this file (from plan --json or --out) and make none.",
        rich_help_panel=PLAN,
    ),
]
TopologyFile = Annotated[
    Path | None,
    typer.Option(
        "--topology", help="Plan for the machines in this file (from armillary measure).", rich_help_panel=PLAN
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile", help="Take the model's profile from this file (from armillary measure).", rich_help_panel=PLAN
    ),
]
Autotune = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Before step 0, time the N best plans, with prefetch and without, and carry out the fastest. 0: none.",
        callback=not_negative,
        rich_help_panel=PLAN,
    ),
]
Rule = Annotated[
    str,
    typer.Option(
        metavar="RULE",
        help="Plan by this rule: 'price' (the shortest forecast), or 'parallax' (row-wise sharding of tables, over as "
        "many ranks as its search finds).",
        rich_help_panel=PLAN,
    ),
]

Schedule = Annotated[
    str,
    typer.Option(
        metavar="CHOICE",
        help="Which rank computes what and when: '1f1b(micro_batches=8)', 'ring(slack=1)', 'pipeline(micro_batches=4, "
        f"clip_norm=1.0)'. Schedules: {', '.join(schedules())}. "
        "Options: slack, micro_batches, stages, points (where to cut), costs, recompute, clip_norm, clip_by, "
        "corrections, bucket_bytes, head, objective; a schedule that lacks one says which it has. "
        "The plan says what is NOT exact.",
        rich_help_panel=SCHEDULE,
    ),
]
Edges = Annotated[
    list[str],
    _many(
        "--edge", "CHOICE[=STAGES]",
        "Compress activations between pipeline stages, NOT exact: 'int8' between all, or 'one_bit=0,2' behind stages "
        "0 and 2. Options beside the codec's: warm_up=STEPS, at_eval=off.",
        SCHEDULE,
    ),
]  # fmt: skip
EdgeBacks = Annotated[
    list[str],
    _many(
        "--edge-back", "CHOICE[=STAGES]|same",
        "Compress the gradients that come back; 'same': as the activation was, in its places if it keeps some.",
        SCHEDULE,
    ),
]  # fmt: skip

Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-w",
        metavar="N",
        help="Start this many worker processes. (default: 2; under torchrun, the processes it started)",
        callback=at_least_one,
        show_default=False,
        rich_help_panel=RUN,
    ),
]

Gbit = Annotated[
    float | None,
    typer.Option(
        help=f"Without --topology: speed of a worker's link in Gbit/s. (default: {GBIT:g})",
        show_default=False,
        rich_help_panel=RUN,
    ),
]
LatencyUs = Annotated[
    float | None,
    typer.Option(
        help=f"Without --topology: latency of a message in microseconds. (default: {LATENCY_US:g})",
        show_default=False,
        rich_help_panel=RUN,
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help="Print the profile of the model and the machines too.", rich_help_panel=OUTPUT),
]
