"""The options of the commands, each written once: what they are called, their help, units and defaults.

Options that belong together are the fields of a dataclass (`request.py`). A command names that as the type of a
parameter, and `takes` lays its fields over the command line: typer sees an option for every field, the command gets one
object that has refused what makes no sense.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

from armillary.cli.names import built_in, import_own, refusing, schedules

__all__ = [
    "BANDS",
    "GBIT",
    "LATENCY_US",
    "OUTPUT",
    "PLAN",
    "RUN",
    "AdvisedMemory",
    "Allow",
    "AsJson",
    "Autotune",
    "Corpus",
    "Data",
    "EdgeBacks",
    "Edges",
    "EverySeconds",
    "EverySteps",
    "Exchanges",
    "Gbit",
    "Imports",
    "IsSmall",
    "KeptCheckpoints",
    "LatencyUs",
    "Lazy",
    "Measures",
    "Picture",
    "PlanFile",
    "ProfileFile",
    "Replicate",
    "Resume",
    "Rule",
    "RunName",
    "Runs",
    "Schedule",
    "ScriptOf",
    "Seed",
    "Set",
    "Steps",
    "Target",
    "TopologyFile",
    "Verbose",
    "Workers",
    "WorkloadName",
    "at_least_one",
    "but",
    "bytes_of",
    "option",
    "takes",
    "workload_argument",
]

# The panels of --help.
WORKLOAD, PLAN, SCHEDULE, RUN, OUTPUT, BANDS = "Workload", "Plan", "Schedule", "Run", "Output", "Bands"
GBIT, LATENCY_US = 1.0, 100.0  # of a link that is assumed
UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
SIZE = re.compile(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*")

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


def option(panel: str, names: str, text: str, metavar: str | None = None, **more: Any) -> Any:
    """One option, on its panel of --help. names: as in "--steps -n"."""
    return typer.Option(*names.split(), help=text, metavar=metavar, rich_help_panel=panel, **more)


def workload_argument(text: str, metavar: str = "WORKLOAD") -> Any:
    """text: what comes before the names of the workloads there are."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=lambda: list(built_in()))


WorkloadName = Annotated[
    str,
    workload_argument(f"What to train: {', '.join(built_in())}, or the path of a .py file with a function workload()."),
]
Set = Annotated[
    list[str],
    option(
        WORKLOAD, "--set",
        "Set an option of the workload: a number, true, false, a Python literal, or else text. Repeatable.",
        "KEY=VALUE",
    ),
]  # fmt: skip
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
    option(WORKLOAD, "--small/--full", "Take the workload's small version, on made-up data, or all of it."),
]
Corpus = Annotated[
    str,
    option(
        WORKLOAD, "--corpus", "Train on this text file or folder (plain or .gz), if the workload is one of text."
    ),
]  # fmt: skip
Data = Annotated[
    str,
    option(
        WORKLOAD, "--data",
        "Train on these data, if the workload takes some. recommender: MovieLens ratings (u.data, ratings.dat or "
        "ratings.csv), or their folder.",
        "PATH",
    ),
]  # fmt: skip
Seed = Annotated[int, option(WORKLOAD, "--seed", "Seed for initial values, data order and dropout.")]

PlanFile = Annotated[
    Path | None,
    option(PLAN, "--plan", "Carry out the plan in this file (from plan --json or --out) and make none."),
]
TopologyFile = Annotated[
    Path | None, option(PLAN, "--topology", "Plan for the machines in this file (from armillary measure).")
]
ProfileFile = Annotated[
    Path | None, option(PLAN, "--profile", "Take the model's profile from this file (from armillary measure).")
]
Lazy = Annotated[
    list[str],
    option(
        PLAN, "--lazy", "Update only the touched rows of these tables: less memory, NOT exact. Repeatable.", "PATTERN"
    ),
]  # fmt: skip
Replicate = Annotated[
    list[str], option(PLAN, "--replicate", "Keep these parameters whole on every worker. Repeatable.", "PATTERN")
]
Exchanges = Annotated[
    list[str],
    option(
        PLAN, "--exchange",
        "Communicate these parameters this way: 'int8=*', or row-wise sharding, 'owned_rows(owners=2)=emb.*'. "
        "Repeatable.",
        "CHOICE=PATTERN",
    ),
]  # fmt: skip
Allow = Annotated[
    list[str],
    option(
        PLAN, "--allow",
        "Let the plan choose among ways that are NOT exact: lossy (rounded or thinned gradients). Repeatable.",
        "DEPARTURE",
    ),
]  # fmt: skip
Rule = Annotated[
    str,
    option(
        PLAN, "--rule",
        "Plan by this rule: 'price' (the shortest forecast), or 'parallax' (row-wise sharding of tables, over as "
        "many ranks as its search finds).",
        "RULE",
    ),
]  # fmt: skip
Autotune = Annotated[
    int,
    option(
        PLAN, "--autotune",
        "Before step 0, time the N best plans, with prefetch and without, and carry out the fastest. 0: none.",
        "N", callback=not_negative,
    ),
]  # fmt: skip

Schedule = Annotated[
    str,
    option(
        SCHEDULE, "--schedule",
        "Which rank computes what and when: '1f1b(micro_batches=8)', 'ring(slack=1)', 'pipeline(micro_batches=4, "
        f"clip_norm=1.0)'. Schedules: {', '.join(schedules())}. "
        "Options: slack, micro_batches, stages, points (where to cut), costs, recompute, clip_norm, clip_by, "
        "corrections, bucket_bytes, head, objective, bound; a schedule that lacks one says which it has. "
        "The plan says what is NOT exact.",
        "CHOICE",
    ),
]  # fmt: skip
Edges = Annotated[
    list[str],
    option(
        SCHEDULE, "--edge",
        "Compress activations between pipeline stages, NOT exact: 'int8' between all, or 'one_bit=0,2' behind stages "
        "0 and 2. Options beside the codec's: warm_up=STEPS, at_eval=off. Repeatable.",
        "CHOICE[=STAGES]",
    ),
]  # fmt: skip
EdgeBacks = Annotated[
    list[str],
    option(
        SCHEDULE, "--edge-back",
        "Compress the gradients that come back; 'same': as the activation was, in its places if it keeps some. "
        "Repeatable.",
        "CHOICE[=STAGES]|same",
    ),
]  # fmt: skip

Workers = Annotated[
    int | None,
    option(
        RUN, "--workers -w",
        "Start this many worker processes. (default: 2; under torchrun, the processes it started)",
        "N", callback=at_least_one, show_default=False,
    ),
]  # fmt: skip
Gbit = Annotated[
    float | None,
    option(
        RUN, "--gbit", f"Without --topology: speed of a worker's link in Gbit/s. (default: {GBIT:g})",
        show_default=False,
    ),
]  # fmt: skip
LatencyUs = Annotated[
    float | None,
    option(
        RUN, "--latency-us",
        f"Without --topology: latency of a message in microseconds. (default: {LATENCY_US:g})",
        show_default=False,
    ),
]  # fmt: skip
Steps = Annotated[
    int | None,
    option(
        RUN, "--steps -n", "Take this many optimizer steps. (default: the workload's)", callback=at_least_one
    ),
]  # fmt: skip
Resume = Annotated[
    bool,
    option(RUN, "--resume", "Go on from the run's last checkpoint, under its plan unless another is asked for."),
]
EverySteps = Annotated[
    int,
    option(
        RUN, "--every-steps", "Save a checkpoint every N steps. 0: by the clock only.", "N", callback=not_negative
    ),
]  # fmt: skip
EverySeconds = Annotated[
    float,
    option(RUN, "--every-seconds", "Save a checkpoint every S seconds. 0: by steps only.", "S", callback=not_negative),
]
KeptCheckpoints = Annotated[int, option(RUN, "--keep", "Keep the last N checkpoints.", "N", callback=at_least_one)]
Runs = Annotated[Path, option(OUTPUT, "--runs", "Folder of all runs.", "FOLDER")]
RunName = Annotated[
    str, option(OUTPUT, "--name", "Name of this run's folder. (default: the workload's, or its file's, numbered)")
]
Verbose = Annotated[bool, option(OUTPUT, "--verbose", "Print the profile of the model and the machines too.")]
AsJson = Annotated[bool, option(OUTPUT, "--json", "Print one JSON object and nothing else.")]


AdvisedMemory = Annotated[str, option(PLAN, "--memory", "That a worker may hold, such as 500MiB or 8GiB.", "SIZE")]
Target = Annotated[
    str, option(PLAN, "--target", "Sort by seconds, memory, bytes, or latency (serving a trained model).")
]
Measures = Annotated[bool, option(PLAN, "--measure", "Make forecasts, too, that take longer than 5 s each.")]
ScriptOf = Annotated[str, option(OUTPUT, "--script", "Print the Python script of this row and nothing else.", "METHOD")]
Picture = Annotated[Path | None, option(OUTPUT, "--out", "Draw seconds against memory into this .png.", "FILE")]


class But(NamedTuple):
    """How a command's options differ from a group's. without: fields that it does not ask for. other: by field, another
    type with its help, or another default."""

    without: tuple[str, ...]
    other: Mapping[str, Any]


def but(*without: str, **other: Any) -> But:
    """In the type of a parameter, as in Annotated[AskedPlan, but("autotune", lazy=["*"])]."""
    return But(without, other)


def takes(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of the groups it takes, and --import, which every command has."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[Any, But]] = {}
    seen = []
    for one in inspect.signature(command).parameters.values():
        kind, *marks = get_args(hints[one.name]) if get_origin(hints[one.name]) is Annotated else (hints[one.name],)
        if is_dataclass(kind):
            groups[one.name] = (kind, next((mark for mark in marks if isinstance(mark, But)), but()))
            seen += list(_options(one.name, *groups[one.name]))
        else:
            seen.append(_option(one.name, hints[one.name], one.default))
    if "imports" not in hints:
        seen.append(_option("imports", Imports, []))

    def called(**given: Any) -> None:
        with refusing():
            asked = {name: _built(name, kind, given) for name, (kind, _) in groups.items()}
        command(**asked, **{name: value for name, value in given.items() if name in hints})

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature(seen)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in seen}
    return called


def _option(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _options(place: str, group: Any, differs: But) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for one in fields(group):
        hint, other = hints[one.name], differs.other.get(one.name)
        if is_dataclass(hint):
            yield from _options(f"{place}_{one.name}", hint, differs)
        elif one.name not in differs.without:
            is_typed = get_origin(other) is Annotated
            default = _default(one) if other is None or is_typed else other
            yield _option(f"{place}_{one.name}", other if is_typed else hint, default)


def _default(one: "Field[Any]") -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return inspect.Parameter.empty if one.default is MISSING else one.default


def _built(place: str, group: Any, given: Mapping[str, Any]) -> Any:
    """The group of what was typed."""
    hints, found = get_type_hints(group), {}
    for one in fields(group):
        name = f"{place}_{one.name}"
        if is_dataclass(hints[one.name]):
            found[one.name] = _built(name, hints[one.name], given)
        elif name in given:
            found[one.name] = given[name]
    return group(**found)
