"""What was typed on a command line, refused as far as its text and files tell it: before torch is imported.

A method that is not in the lists may be one of the user's own (--import). A file that registers one has imported torch,
and then the shelves are asked, later.
"""

import ast
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli import options as ask
from armillary.cli.names import aliases, codecs, edges_only, exchanges, refuse_unknown, schedules
from armillary.planning.demand import PRICE, Constraint, refuse_other_allowed, refuse_unknown_rule, refuse_unlisted
from armillary.plans.advice import TARGETS
from armillary.plans.plan import SIMULTANEOUS, Plan
from armillary.plans.profile import Profile
from armillary.plans.registry import Choice, no_entry
from armillary.plans.topology import Link, Topology, read_kept
from armillary.session.run_folder import claim_folder, refuse_unwritable, run_folder

if TYPE_CHECKING:
    from armillary.planning.stage_costs import EdgeRequest

__all__ = [
    "AskedAdvice",
    "AskedMachines",
    "AskedPlan",
    "AskedRun",
    "AskedWorkload",
    "WorkloadOptions",
    "edge_request",
    "read_plan",
    "read_profile",
    "read_topology",
]

STAGES = re.compile(r"(?P<choice>.*?)(=(?P<stages>\d+(,\d+)*))?", re.DOTALL)
NO_LIMIT = 1 << 62  # bytes of memory


@dataclass(frozen=True)
class WorkloadOptions:
    """Options of a workload as they were typed: KEY=VALUE each; corpus, data: one more each, empty if not given."""

    options: ask.Set = field(default_factory=list)
    is_small: ask.IsSmall = False
    corpus: ask.Corpus = ""
    data: ask.Data = ""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The options with their values.

        Raises:
            ValueError: one is not KEY=VALUE.
        """
        given = dict(_pair(option) for option in self.options)
        named = {"corpus": self.corpus, "data": self.data}
        return {**given, **{name: path for name, path in named.items() if path}}


@dataclass(frozen=True)
class AskedWorkload:
    """A workload as it was typed: the name of a built-in one, or a file's path.

    Raises:
        ValueError: no such workload, an option that is not KEY=VALUE, or one the workload does not have.
    """

    name: ask.WorkloadName
    typed: WorkloadOptions = field(default_factory=WorkloadOptions)

    def __post_init__(self) -> None:
        refuse_unknown(self.name, self.settings)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.typed.settings

    @property
    def is_small(self) -> bool:
        return self.typed.is_small

    @property
    def stem(self) -> str:
        """What its runs are called."""
        return Path(self.name).stem


@dataclass(frozen=True)
class AskedPlan:
    """A plan as it was typed.

    Raises:
        ValueError: something is not of the form that is wanted, names what is not there, or a file cannot be read.
    """

    plan_file: ask.PlanFile = None
    topology_file: ask.TopologyFile = None
    profile_file: ask.ProfileFile = None
    lazy: ask.Lazy = field(default_factory=list)
    replicate: ask.Replicate = field(default_factory=list)
    exchanges: ask.Exchanges = field(default_factory=list)
    allow: ask.Allow = field(default_factory=list)
    rule: ask.Rule = PRICE
    autotune: ask.Autotune = 0
    schedule_text: ask.Schedule = SIMULTANEOUS.name
    edges: ask.Edges = field(default_factory=list)
    edge_backs: ask.EdgeBacks = field(default_factory=list)

    def __post_init__(self) -> None:
        named = (self.constraints, self.schedule, self.edge, self.edge_back)
        if "torch" not in sys.modules:
            _refuse_unknown_methods(*named)
        refuse_unknown_rule(self.rule)
        refuse_other_allowed(self.allow)
        if self.plan_file is not None:
            read_plan(self.plan_file)
        if self.topology_file is not None:
            read_topology(self.topology_file)
        if self.profile_file is not None:
            read_profile(self.profile_file)

    @property
    def constraints(self) -> Mapping[str, Constraint]:
        """What was typed as --exchange and --replicate."""
        found: dict[str, Constraint] = dict.fromkeys(self.replicate, "replicated")
        for text in self.exchanges:
            way, equals, pattern = text.rpartition("=")
            is_cut = way.count("(") > way.count(")")  # the last = stands inside a choice
            if is_cut or not (way and equals and pattern):
                raise ValueError(f"--exchange: want CHOICE=PATTERN, as in owned_rows=emb.*, got {text!r}")
            choice = Choice.parse(way)
            found[pattern] = choice if choice.options else choice.name
        return found

    @property
    def schedule(self) -> Choice:
        return Choice.parse(self.schedule_text)

    @property
    def edge(self) -> "EdgeRequest":
        return edge_request("--edge", self.edges)

    @property
    def edge_back(self) -> "EdgeRequest":
        return edge_request("--edge-back", self.edge_backs)


@dataclass(frozen=True)
class AskedMachines:
    """Machines to be simulated: how many workers, and links from a file or assumed.

    Raises:
        ValueError: the file cannot be read, there are no such links, or both are given.
    """

    topology_file: ask.TopologyFile = None
    profile_file: ask.ProfileFile = None
    workers: ask.Workers = None
    gbit: ask.Gbit = None
    latency_us: ask.LatencyUs = None

    def __post_init__(self) -> None:
        if self.topology_file is not None and self.assumes_links:
            raise ValueError("--gbit, --latency-us: the links are those of --topology; drop these, or that")
        _ = self.topology  # refuses what is none
        if self.profile_file is not None:
            read_profile(self.profile_file)

    @property
    def assumes_links(self) -> bool:
        return self.gbit is not None or self.latency_us is not None

    @property
    def topology(self) -> Topology:
        """Assumed ones are two nodes of one worker (`Topology.of` makes more of them) and have no limit of memory."""
        if self.topology_file is not None:
            return read_topology(self.topology_file)
        latency_us = ask.LATENCY_US if self.latency_us is None else self.latency_us
        gbit = ask.GBIT if self.gbit is None else self.gbit
        link = Link(latency_us * 1e-6, gbit * 1e9 / 8)
        return Topology(2, 1, link, link, NO_LIMIT)


@dataclass(frozen=True)
class AskedAdvice:
    """What was typed of advice.

    Raises:
        ValueError: no such size or target, or the picture cannot be written.
    """

    memory: ask.AdvisedMemory = ""
    target: ask.Target = "seconds"
    measures: ask.Measures = False
    script: ask.ScriptOf = ""
    out: ask.Picture = None

    def __post_init__(self) -> None:
        _ = self.memory_bytes  # refuses what is none
        if self.target not in TARGETS:
            raise ValueError(f"--target: no target {self.target!r}; there are {', '.join(TARGETS)}")
        if self.out is not None:
            if self.out.suffix != ".png":
                raise ValueError(f"--out: want the path of a .png, got {self.out}")
            refuse_unwritable(self.out.parent)

    @property
    def memory_bytes(self) -> int | None:
        """That a worker may hold; None: as the machines say."""
        return ask.bytes_of(self.memory) if self.memory else None


@dataclass(frozen=True)
class AskedRun:
    """What was typed of a run: how long, where, and when to save. steps: None for the workload's own."""

    seed: ask.Seed = 0
    workers: ask.Workers = None
    steps: ask.Steps = None
    resume: ask.Resume = False
    every_steps: ask.EverySteps = 0
    every_seconds: ask.EverySeconds = 60.0
    keep: ask.KeptCheckpoints = 2
    runs: ask.Runs = Path("runs")
    name: ask.RunName = ""

    def folder(self, stem: str) -> Path:
        """As this process finds it.

        Args:
            stem: what it is called where it has no name.
        """
        return run_folder(self.runs, stem, self.name, self.resume)

    @property
    def is_numbered(self) -> bool:
        """Whether its folder is a new one, called after the workload."""
        return not (self.name or self.resume)

    def claimed(self, stem: str) -> Path:
        """The folder, which no other run will take."""
        return claim_folder(self.runs, stem) if self.is_numbered else self.folder(stem)


def edge_request(option: str, texts: Sequence[str]) -> "EdgeRequest":
    """What was typed of edges: one codec for all, or one for each of some stages.

    Raises:
        ValueError: a text that is no choice, or a stage twice.
    """
    found: dict[int, Choice] = {}
    for text in texts:
        read_text = STAGES.fullmatch(text)
        assert read_text is not None
        try:
            choice = Choice.parse(read_text["choice"])
        except ValueError as error:
            raise ValueError(f"{option}: {error}. Want CHOICE or CHOICE=STAGES, as in 'quantize(bits=8)=0,2'") from None
        if read_text["stages"] is None:
            if len(texts) > 1:
                raise ValueError(f"{option}: {choice} is for all stages; name the stages of each, as in {choice}=0")
            return choice
        for stage in map(int, read_text["stages"].split(",")):
            if stage in found:
                raise ValueError(f"{option}: stage {stage} has {found[stage]} and {choice}; want one")
            found[stage] = choice
    return found or None


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


def _refuse_unknown_methods(
    constraints: Mapping[str, Constraint], schedule: Choice, edge: "EdgeRequest", edge_back: "EdgeRequest"
) -> None:
    for pattern, constraint in constraints.items():
        if _name(constraint) not in aliases():
            refuse_unlisted(pattern, constraint, exchanges())
    if schedule.name not in (*(listed := schedules()), *aliases()):
        raise ValueError(no_entry("schedule", schedule.name, listed))
    coded = [*_of_stages(edge), *_of_stages(edge_back)]
    named = [choice.name for choice in coded if choice.name not in edges_only()]
    holders = [*coded, *(way for way in constraints.values() if isinstance(way, Choice))]
    named += [choice.name for choice in _inside(holders)]
    listed = codecs()
    for name in named:
        if name not in (*listed, *aliases()):
            raise ValueError(no_entry("codec", name, listed))


def _name(constraint: Constraint) -> str:
    return constraint.name if isinstance(constraint, Choice) else constraint


def _of_stages(request: "EdgeRequest") -> list[Choice]:
    if request is None:
        return []
    asked = request.values() if isinstance(request, Mapping) else [request]
    return [Choice.parse(one) if isinstance(one, str) else one for one in asked]


def _inside(choices: Iterable[Choice]) -> list[Choice]:
    """Those that are options of others: codecs, wherever they stand."""
    found: list[Choice] = []
    for choice in choices:
        held = [value for value in choice.options.values() if isinstance(value, Choice)]
        found += [*held, *_inside(held)]
    return found


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ValueError(f"--set: want NAME=VALUE, got {text!r}")
    return key, _value(value)


def _value(text: str) -> Any:
    """A number, boolean or other Python literal, `true` and `false` among them; else the text itself."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
