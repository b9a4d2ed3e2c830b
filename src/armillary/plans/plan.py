"""What was decided: how ranks are arranged, which parameters travel together, by what, in which order, at what cost.

The plan stands between the planner and the runtime, which never import one another. It is frozen, prints as tables,
goes to JSON and back, and says what model and machines it was made for. Groups are listed in the order in which their
gradients arrive, which is the order in which every rank launches them (design law 8).

Source: the idea of a strategy as a message is AutoDist's (Zhang et al., 2020); the choice per parameter is Parallax's.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from armillary.plans.group import DEPARTURES, PREFETCH_KINDS, Forecast, Group, StagePlan, checked
from armillary.plans.mesh import Axis, Mesh
from armillary.plans.plan_text import expected_words, number_of, plan_page, plan_words
from armillary.plans.registry import Choice
from armillary.plans.units import Page, page_text

__all__ = [
    "FORMAT",
    "SIMULTANEOUS",
    "Choice",
    "Consensus",
    "Forecast",
    "Group",
    "Mean",
    "Plan",
    "Trainable",
    "model_fingerprint",
]

FORMAT = 3
SIMULTANEOUS = Choice("simultaneous")

Mean = Literal["workers", "weights"]
Consensus = Literal["same", "mean", "owners"]


class Trainable(NamedTuple):
    """A parameter that is trained, as a plan knows it again. dtype: as in "float32"."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def model_fingerprint(parameters: Iterable[Trainable]) -> str:
    """Sixteen hex digits of the trainable parameters, in any order."""
    listing = sorted([name, list(shape), dtype] for name, shape, dtype in parameters)
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """The decision for one model on the workers of a mesh.

    Args of note:
        groups: in launch order.
        model_fingerprint, topology_fingerprint: what the plan was made for; the runtime refuses another model.
        workers_per_node: how ranks are packed into nodes, for the exchanges that merge inside a node first.
        mean: "workers" divides the sum of gradients by the number of data coordinates (as DDP does, a worker without
            data counting as zero); "weights" divides by the sum of the weights the user declares each step.
        schedule: a registry name and options.
        stages: one row a stage, in order; empty: one stage, all defaults.
        consensus: what export, save and evaluate show while workers hold different weights. "same": they never do;
            "owners": each stage as its owner has it; "mean": the mean over replicas.
        compute_seconds: forecast of one step without any exchange; 0, and step_seconds too: nobody timed it yet.
        activation_bytes: what the fullest moment of a step adds on the fullest worker: activations, temporaries, what
            is on its way.
        step_seconds: forecast of one step against a clock, where compute hides what it can; 0: nobody played it.
        all_reduce_seconds: what the data of one step would take if every gradient were all-reduced whole, likewise.
        priced_with: what pricing took for granted (optimizer, processor), by name; empty if nobody priced it. "own":
            parameter -> the same of its optimizer, where it differs.
    """

    mesh: Mesh
    groups: tuple[Group, ...]
    model_fingerprint: str
    topology_fingerprint: str = ""
    workers_per_node: int = 1
    mean: Mean = "workers"
    schedule: Choice = SIMULTANEOUS
    stages: tuple[StagePlan, ...] = ()
    consensus: Consensus = "same"
    compute_seconds: float = 0.0
    activation_bytes: float = 0.0
    notes: tuple[str, ...] = ()
    priced_with: Mapping[str, Any] = field(default_factory=dict)
    step_seconds: float = 0.0
    all_reduce_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.workers_per_node < 1 or self.workers % self.workers_per_node:
            raise ValueError(f"plan: {self.workers} workers do not fill nodes of {self.workers_per_node}")
        if self.mean not in get_args(Mean):
            raise ValueError(f"plan: mean {self.mean!r} is none of {', '.join(get_args(Mean))}")
        if self.consensus not in get_args(Consensus):
            raise ValueError(f"plan: consensus {self.consensus!r} is none of {', '.join(get_args(Consensus))}")
        seen: dict[str, str] = {}
        for group in self.groups:
            if group.stage >= max(1, len(self.stages)):
                raise ValueError(f"plan: group {group.name!r} is of stage {group.stage}; there are {len(self.stages)}")
            for parameter in group.parameters:
                if parameter in seen:
                    raise ValueError(
                        f"plan: {parameter!r} is in groups {seen[parameter]!r} and {group.name!r}; want one"
                    )
                seen[parameter] = group.name

    @property
    def workers(self) -> int:
        """How many ranks carry it out."""
        return self.mesh.workers

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(parameter for group in self.groups for parameter in group.parameters)

    @property
    def departures(self) -> tuple[str, ...]:
        """Every word that is true of some group; empty: the plan equals one process."""
        return tuple(word for word in DEPARTURES if any(word in self.departures_of(group) for group in self.groups))

    def departures_of(self, group: Group) -> tuple[str, ...]:
        """Every word that is true of a group: its own, and what coded edges do to its gradients."""
        is_reached = any(
            stage.edge is not None or (stage.edge_back is not None and group.stage <= number)
            for number, stage in enumerate(self.stages)
        )
        return checked((*group.departures, *(("lossy",) if is_reached else ())))

    @property
    def is_timed(self) -> bool:
        """Whether it is known what a step takes, or nobody will look."""
        return self.compute_seconds > 0 or self.step_seconds > 0 or not self.priced_with

    @property
    def looks_ahead(self) -> bool:
        """Whether it means loops over `run.batches`, whose loader may then be ahead of them."""
        return any(group.prefetch != "none" for group in self.groups)

    @property
    def forecast(self) -> Forecast:
        """The whole step: bytes and memory add up; seconds are compute plus every exchange, none hidden."""
        total = Forecast(seconds=self.compute_seconds, peak_bytes=self.activation_bytes)
        for group in self.groups:
            total = total + group.forecast
        return total

    def group_of(self, parameter: str) -> Group:
        """
        Raises:
            KeyError: the plan does not mention the parameter.
        """
        for group in self.groups:
            if parameter in group.parameters:
                return group
        raise KeyError(f"plan: no group holds {parameter!r}; it holds {', '.join(self.parameters)}")

    def with_group(self, group: Group) -> "Plan":
        """The same plan with the group of that name replaced."""
        if group.name not in {other.name for other in self.groups}:
            raise ValueError(f"plan: no group {group.name!r}; there are {', '.join(g.name for g in self.groups)}")
        return replace(self, groups=tuple(group if other.name == group.name else other for other in self.groups))

    def page(self) -> Page:
        """What it prints, its tables apart: in words, then the groups, the stages, what the figures mean, notes."""
        is_plain = self.schedule == SIMULTANEOUS
        groups = [replace(group, departures=self.departures_of(group)) for group in self.groups]
        words = plan_words(groups, self.workers, len(self.stages), None if is_plain else self.schedule)
        expected = expected_words(self.forecast, self.step_seconds, self.all_reduce_seconds, self.is_timed)
        is_of_data = self.mesh.data_coordinates == self.workers
        divisor = "the sum of declared weights" if self.mean != "workers" else "workers" if is_of_data else "replicas"
        title = (
            f"plan for {number_of(self.workers, 'worker')}{'' if is_of_data else f' ({self.mesh})'}, "
            f"{self.workers_per_node} a node, model {self.model_fingerprint}\n"
            f"schedule {self.schedule}{' (the loop is yours)' if is_plain else ''}; mean over {divisor}"
        )
        ahead = [
            f"prefetch {kind} ({meaning}): {', '.join(names)}"
            for kind, meaning in PREFETCH_KINDS.items()
            if (names := [group.name for group in self.groups if group.prefetch == kind])
        ]
        said = f"{words}\n{expected}"
        seconds = self.step_seconds if self.is_timed else None
        return plan_page(said, title, groups, self.stages, self.forecast, seconds, (*ahead, *self.notes))

    def __str__(self) -> str:
        return page_text(self.page())

    def _repr_html_(self) -> str:
        """In a notebook: the same text."""
        return f'<pre style="overflow-x: auto; white-space: pre">{escape(str(self))}</pre>'

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self), "mesh": self.mesh.sizes}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """
        Raises:
            ValueError: the text is no plan, or one of another format; the message says what is missing.
        """
        given = _object(text)
        if given.pop("format", 1) != FORMAT:
            raise ValueError(
                f"plan: this plan has another format than {FORMAT}, as older versions wrote it; plan again"
            )
        _refuse_other_fields("plan", given, cls)
        return cls(
            **{
                **given,
                "mesh": _mesh(given["mesh"]),
                "groups": tuple(_group(group) for group in _list("groups", given["groups"])),
                "stages": tuple(_stage(stage) for stage in _list("stages", given.get("stages", ()))),
                "schedule": _choice(given.get("schedule", asdict(SIMULTANEOUS))),
                "notes": tuple(given.get("notes", ())),
            }
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        return cls.from_json(Path(path).read_text())


def _object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"plan: the text is no JSON ({error}); want what Plan.save wrote") from None
    if not isinstance(given, dict):
        raise ValueError(f"plan: want a JSON object, as Plan.save writes it, got {type(given).__name__}")
    return given


def _mesh(given: Any) -> Mesh:
    if not isinstance(given, Mapping):
        raise ValueError(f'plan: mesh is {given!r}; want the ranks along each axis, as in {{"data": 2}}')
    return Mesh(tuple(Axis(name, size) for name, size in given.items()))


def _list(what: str, given: Any) -> Iterable[Any]:
    if not isinstance(given, list | tuple):
        raise ValueError(f"plan: {what} is a {type(given).__name__}; want a list")
    return given


def _refuse_other_fields(what: str, given: Any, kind: type) -> None:
    known = {one.name: one for one in fields(kind)}
    if not isinstance(given, Mapping):
        raise ValueError(f"plan: {what} is {given!r}; want an object with {', '.join(known)}")
    if strange := sorted(set(given) - known.keys()):
        raise ValueError(f"plan: {what} has no field {', '.join(strange)}; it has {', '.join(known)}")
    needed = ("mesh", "groups", "model_fingerprint", "name", "parameters", "layout", "begins")
    if missing := [name for name in needed if name in known and name not in given]:
        raise ValueError(f"plan: {what} lacks {', '.join(missing)}")


def _choice(given: Any) -> Choice:
    _refuse_other_fields(_called("choice", given, "name"), given, Choice)
    return Choice.of_fields(given)


def _called(kind: str, given: Any, key: str) -> str:
    return f"{kind} {given.get(key, '')!r}" if isinstance(given, Mapping) else f"a {kind}"


def _maybe(given: Any) -> Choice | None:
    return None if given is None else _choice(given)


def _forecast(given: Mapping[str, float]) -> Forecast:
    _refuse_other_fields("forecast", given, Forecast)
    return Forecast(**given)


def _group(given: Mapping[str, Any]) -> Group:
    _refuse_other_fields(_called("group", given, "name"), given, Group)
    return Group(
        **{
            **given,
            "parameters": tuple(given["parameters"]),
            "exchange": _maybe(given.get("exchange")),
            "departures": tuple(given.get("departures", ())),
            "forecast": _forecast(given.get("forecast", {})),
        }
    )


def _stage(given: Mapping[str, Any]) -> StagePlan:
    _refuse_other_fields(_called("stage", given, "begins"), given, StagePlan)
    chosen = {name: _choice(given[name]) for name in ("residency", "objective", "split") if name in given}
    edges = {name: _maybe(given.get(name)) for name in ("edge", "edge_back")}
    return StagePlan(**{**given, **chosen, **edges, "forecast": _forecast(given.get("forecast", {}))})
