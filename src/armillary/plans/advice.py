"""What a method says of itself for a model on machines: whether it applies, what it would bring, the line to type.

Every method says it in one function, in its own file or room, and registers that here. Who asks them all (`advise`)
knows none by name. A room beside the step has its functions in a file `advice.py`; methods on a shelf, in their own.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from armillary.plans.group import Forecast, checked
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.registry import Choice, Registry
from armillary.plans.topology import Topology

__all__ = [
    "ADVICE",
    "ONE_STAGE",
    "TARGETS",
    "Advice",
    "Adviser",
    "Combination",
    "ForwardFacts",
    "MethodPoint",
    "PricedPlan",
    "Recurrent",
    "Situation",
    "advisers",
    "advises",
    "not_for",
    "parallelized",
    "planned",
    "planned_in_stages",
]

TARGETS = ("seconds", "memory", "bytes", "latency")  # that rows are sorted by
MOST_LINES = 10  # of a script
MOST_SECONDS = 5.0  # that a forecast may take unless its user asks for it
ONE_RANK = "one worker: nothing crosses"
ONE_STAGE = "one stage: nothing to pipeline"
NOTHING: Mapping[str, Choice | str] = MappingProxyType({})


class Recurrent(NamedTuple):
    """A module that takes one step of a recurrence after another. steps: in a forward. is_cell: the loop over them is
    the model's own."""

    path: str
    kind: str
    steps: int
    is_cell: bool


@dataclass(frozen=True)
class ForwardFacts:
    """What one forward and loss showed beside the profile.

    Args of note:
        seconds: of the forward and the loss.
        is_causal: attention with a causal mask was called. classes: of a cross entropy with one label a sample; 0:
            there was none.
        is_stream: whether batches come from an iterator: a program of the user's may make them.
    """

    seconds: float
    recurrents: tuple[Recurrent, ...] = ()
    is_causal: bool = False
    classes: int = 0
    is_stream: bool = False


@dataclass(frozen=True)
class PricedPlan:
    """A plan with what a step of it takes in which every rank takes one batch. forecast: memory_bytes and peak_bytes
    are those of the fullest rank, frozen parameters too."""

    plan: Plan
    forecast: Forecast


@dataclass(frozen=True)
class Situation:
    """A model on machines, as every method's function is given it; nothing of it may be changed.

    Args of note:
        model, optimizer, loss: as the user wrote them. batches: some, in the order in which the ranks take them.
        chosen: the plan that is taken by price. price: constraints, schedule, edge, prefetch -> the plan that has them;
            it raises ValueError where there is none.
        pipeline: the quickest exact schedule that cuts the model over the ranks; None where there is none.
        compute_seconds: of one batch, forward and backward.
        typed: the workload as it was typed; empty in a script. preamble: lines that make model, optimizer, batches and
            loss of it.
        measures: forecasts that take more than 5 seconds are wanted too.
    """

    model: Any
    optimizer: Any
    loss: Callable[[Any, Any], Any]
    batches: Sequence[Any]
    profile: Profile
    topology: Topology
    facts: ForwardFacts
    chosen: PricedPlan
    price: Callable[..., PricedPlan]
    pipeline: Choice | None = None
    optimizer_slots: float = 2.0
    typed: str = ""
    preamble: tuple[str, ...] = ()
    measures: bool = False

    @property
    def workers(self) -> int:
        return self.topology.workers

    @property
    def stage_counts(self) -> tuple[int, ...]:
        """Into how many stages the model may be cut so that all ranks have one, the most first."""
        modules = sum(bool(stage.name) for stage in self.profile.stages)
        return tuple(n for n in range(self.workers, 1, -1) if self.workers % n == 0 and n <= modules)

    @property
    def compute_seconds(self) -> float:
        return sum(stage.forward_seconds + stage.backward_seconds for stage in self.profile.stages)

    def affords(self, seconds: float) -> bool:
        """Whether a forecast may take as long."""
        return self.measures or seconds <= MOST_SECONDS

    def train(self, options: str = "", command: str = "train") -> str:
        """The line to type; empty in a script."""
        line = f"armillary {command} {self.typed} --workers {self.workers} {options}".rstrip()
        return line if self.typed else ""

    def script(self, *lines: str) -> str:
        """A script of at most ten lines, those of the preamble among them."""
        return "\n".join((*self.preamble, *lines))


class MethodPoint(NamedTuple):
    """A method in a picture."""

    method: str
    seconds: float
    held_bytes: float
    is_exact: bool


@dataclass(frozen=True)
class Combination:
    """Methods that work together, priced together. Fields as those of `Advice`."""

    name: str
    forecast: Forecast | None
    departures: tuple[str, ...] = ()
    shell: str = ""
    python: str = ""
    tells: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "departures", checked(self.departures))
        _refuse_silent(self.shell, self.python, self.tells, self.forecast is not None)


@dataclass(frozen=True)
class Advice:
    """
    Args of note:
        applies: to this model on these machines. reason: why not; else in a few words what it does here.
        forecast: of a step in which every rank takes one batch; None: not known. tells: then, the command that would
            tell.
        latency_seconds: of one forward, for methods that serve a trained model; None: it does not, or nobody knows.
        departures: words of `DEPARTURES`; empty: exact.
        shell: the line to type; empty where there is no command. python: for a script, at most ten lines.
        source: the plan that the figures are from, as the method's own planner made it.
        combinations: with others, priced together.
    """

    applies: bool
    reason: str
    forecast: Forecast | None = None
    departures: tuple[str, ...] = ()
    shell: str = ""
    python: str = ""
    tells: str = ""
    latency_seconds: float | None = None
    source: Any = None
    combinations: tuple[Combination, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "departures", checked(self.departures))
        if self.applies:
            is_known = self.forecast is not None or self.latency_seconds is not None
            _refuse_silent(self.shell, self.python, self.tells, is_known)
        elif not self.reason:
            raise ValueError("advice: a method that does not apply says why: give reason=")


def _refuse_silent(shell: str, python: str, tells: str, is_known: bool) -> None:
    if not (shell or python):
        raise ValueError("advice: a method that applies says how: give shell= or python=")
    if not (is_known or tells):
        raise ValueError("advice: want a forecast, or tells=, the command that would tell what it brings")
    if len(python.splitlines()) > MOST_LINES:
        raise ValueError(f"advice: want a script of at most {MOST_LINES} lines, got {len(python.splitlines())}")


@dataclass(frozen=True)
class Adviser:
    """A row. says: what it is, in a few words. page: of the documentation, or an address. is_inference: it serves a
    trained model."""

    says: str
    ask: Callable[[Situation], Advice]
    page: str = ""
    is_inference: bool = False


ADVICE: Registry[Adviser] = Registry("advice", "armillary.plans")


def advises(
    name: str, says: str, page: str = "", is_inference: bool = False
) -> Callable[[Callable[[Situation], Advice]], Callable[[Situation], Advice]]:
    """Registers the function of a method as the row of that name."""

    def keep(ask: Callable[[Situation], Advice]) -> Callable[[Situation], Advice]:
        ADVICE.register(name, Adviser(says, ask, page, is_inference))
        return ask

    return keep


def advisers() -> Mapping[str, Adviser]:
    """Every row, by name; rooms beside the step are looked through first."""
    root = importlib.import_module("armillary")
    for folder in map(Path, root.__path__):
        for room in pkgutil.iter_modules([str(folder)]):
            if room.ispkg and (folder / room.name / "advice.py").exists():
                importlib.import_module(f"armillary.{room.name}.advice")
    return ADVICE.all()


def not_for(reason: str) -> Advice:
    """It does not apply."""
    return Advice(False, reason)


def planned(
    situation: Situation,
    reason: str,
    options: str,
    constraints: Mapping[str, Choice | str] = NOTHING,
    **asked: Any,
) -> Advice:
    """Advice of a method that is one word in a plan: priced by the planner, or not for this model as it says.

    Args:
        options: of the command line, that ask for it.
        asked: more of `plan`'s keywords.
    """
    if situation.workers == 1:
        return not_for(ONE_RANK)
    if constraints:
        asked = {"constraints": {name: str(way) for name, way in constraints.items()}, **asked}
    try:
        made = situation.price(**asked)
    except ValueError as error:
        return not_for(str(error))
    shell, python = situation.train(options), parallelized(**asked)
    return Advice(True, reason, made.forecast, made.plan.departures, shell, python, source=made.plan)


def parallelized(*more: str, **asked: Any) -> str:
    """Lines of a script that ask for a plan by these keywords, and then more of them."""
    words = [f"{name}={str(one) if isinstance(one, Choice) else one!r}" for name, one in asked.items()]
    call = f"run = armillary.parallelize({', '.join(['model', 'optimizer', 'batches', 'loss', *words])})"
    return "\n".join(("import armillary", call, *more))


def planned_in_stages(situation: Situation, name: str, **options: Any) -> Advice:
    """The same of a schedule that cuts the model, into as many stages as there are ranks or modules for."""
    if situation.workers == 1:
        return not_for(ONE_RANK)
    if len(situation.stage_counts) == 0:
        return not_for(ONE_STAGE)
    for count in situation.stage_counts:
        micro_batches = {} if "micro_batches" in options or count == situation.workers else {"micro_batches": count}
        given = {name: one for name, one in options.items() if one is not None}
        schedule = Choice(name, {**micro_batches, "stages": count, **given})
        found = planned(situation, f"{count} stages", f"--schedule '{schedule}'", schedule=schedule)
        if found.applies:
            break
    return found
