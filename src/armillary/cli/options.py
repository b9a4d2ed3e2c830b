"""The options that commands share: what they are called, their units and defaults, and what they are turned into."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from armillary.cli.find import find, small
from armillary.facts.choice import Choice
from armillary.facts.plan import Plan
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.planning.constraints import Constraint
from armillary.session.decide import Wishes
from armillary.session.folder import read_kept
from armillary.session.workload import Workload

__all__ = [
    "AsJson", "Corpus", "Exchanges", "IsSmall", "Lazy", "PlanFile", "ProfileFile", "ReplanEvery", "Replicate", "Seed",
    "Set", "TopologyFile", "Trials", "Workers", "WorkloadName", "read_plan", "read_profile", "read_topology", "wishes",
    "workload_of",
]  # fmt: skip

WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="A built-in workload, or the path of a file that has workload().")
]
Workers = Annotated[
    int | None,
    typer.Option(help="Worker processes. (default: 2; under torchrun as many as it started)", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Corpus = Annotated[str, typer.Option(help="Text file or folder (plain or .gz) to train on, for workloads of text.")]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="An option of the workload; may be repeated.")
]
IsSmall = Annotated[bool, typer.Option("--small", help="The workload's small version, on stand-in data.")]
Seed = Annotated[int, typer.Option(help="Of initial values, data order and random layers.")]
Lazy = Annotated[
    list[str],
    typer.Option(
        metavar="PATTERN", help="Tables of which only rows with a gradient move: less memory, NOT exact. Repeatable."
    ),
]
Replicate = Annotated[
    list[str], typer.Option(metavar="PATTERN", help="Parameters that stay whole on every worker. Repeatable.")
]
Exchanges = Annotated[
    list[str],
    typer.Option(
        "--exchange",
        metavar="CHOICE=PATTERN",
        help="Parameters that travel by this exchange, as 'owned_rows(owners=2)=emb.*'. Repeatable.",
    ),
]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Carry out this plan.json instead of making one.")]
TopologyFile = Annotated[
    Path | None, typer.Option("--topology", help="Plan for the machines in this file instead of measuring these.")
]

ProfileFile = Annotated[
    Path | None, typer.Option("--profile", help="Take the model's facts from this file instead of profiling it.")
]
ReplanEvery = Annotated[
    int,
    typer.Option(metavar="N", help="At every N-th checkpoint, moves tables whose owners are unbalanced; 0: never."),
]
Trials = Annotated[
    int,
    typer.Option(
        help="Times so many of the best plans, with look-ahead and without, before step 0 and carries out the fastest; "
        "what is far behind after a few steps is timed no more. Below 2: none."
    ),
]


def workload_of(name: str, settings: Sequence[str], corpus: str, is_small: bool) -> Workload:
    """
    Raises:
        ValueError: no such workload, or an option it refuses.
    """
    options = small(name) if is_small else {}
    options |= {key: _value(text) for key, text in (_pair(setting, "--set") for setting in settings)}
    if corpus:
        options["corpus"] = corpus
    return find(name, options)


def wishes(
    lazy: Sequence[str],
    replicate: Sequence[str],
    exchanges: Sequence[str],
    plan_file: Path | None,
    topology_file: Path | None,
    trials: int = 0,
) -> Wishes:
    """
    Raises:
        ValueError: a file cannot be read, or a wish is not of the form that is wanted.
    """
    constraints: dict[str, Constraint] = dict.fromkeys(replicate, "replicated")
    for wish in exchanges:
        way, equals, pattern = wish.rpartition("=")
        if not (way and equals and pattern):
            raise ValueError(f"--exchange: want CHOICE=PATTERN, as in owned_rows=emb.*, got {wish!r}")
        choice = Choice.parse(way)
        constraints[pattern] = choice if choice.options else choice.name
    plan = None if plan_file is None else read_plan(plan_file)
    if plan is not None and (constraints or lazy):
        raise ValueError("plan: --plan is carried out as it is; edit the file, or drop --lazy, --replicate, --exchange")
    topology = None if topology_file is None else read_topology(topology_file)
    return Wishes(constraints, tuple(lazy), plan, topology, trials=trials)


def read_plan(path: Path) -> Plan:
    """
    Raises:
        ValueError: the file cannot be read, or is no plan.
    """
    plan: Plan = read_kept(path, Plan, "plan")
    return plan


def read_topology(path: Path) -> Topology:
    """
    Raises:
        ValueError: the file cannot be read, or is no topology.
    """
    topology: Topology = read_kept(path, Topology, "topology")
    return topology


def read_profile(path: Path) -> Profile:
    """
    Raises:
        ValueError: the file cannot be read, or is no profile.
    """
    profile: Profile = read_kept(path, Profile, "profile")
    return profile


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ValueError(f"{option}: want NAME=VALUE, got {text!r}")
    return key, value


def _value(text: str) -> Any:
    """A number, boolean or other Python literal; else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
