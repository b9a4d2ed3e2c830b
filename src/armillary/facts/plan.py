"""What was decided: which parameters travel together, by which exchange, in which order, at what predicted cost.

The plan stands between the planner and the runtime, which never import one another. It is frozen, prints as a table,
goes to JSON and back, and says what model and machines it was made for. Groups are listed in the order in which their
gradients arrive, which is the order in which every rank launches them (design law 8).

Source: the idea of a strategy as a message is AutoDist's (Zhang et al., 2020); the choice per parameter is Parallax's.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from armillary.facts.plan_table import Line, plan_table
from armillary.facts.topology import TURN_BYTES

__all__ = ["UPDATES", "Choice", "Forecast", "Group", "Plan", "model_fingerprint"]

Placement = Literal["replicated", "row_sharded", "stage_sharded"]
Mean = Literal["workers", "weights"]
Update = Literal["exact", "lazy", "stale", "stale_lazy"]
LookAhead = Literal["none", "ids", "rows", "gradients"]

UPDATES = {
    "exact": "every row moves as in one process",
    "lazy": "NOT exact: rows without gradient stay put, though the optimizer may have moved them",
    "stale": "NOT exact: gradients are taken at weights at most one step old, see staleness in the picture",
    "stale_lazy": "NOT exact: gradients are taken at rows at most one step old, and rows without gradient stay put",
}

LOOK_AHEADS = {
    "ids": "in a loop over run.batches, ids of foreseen look-ups go two batches early, their rows right after the "
    "step; exact",
    "rows": "as ids, and rows that no rank touches at a step go before it; exact",
    "gradients": "as rows, and gradients of rows that no rank reads in the next batch follow during it; exact",
}


def model_fingerprint(parameters: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """Sixteen hex digits of (name, shape, dtype as in "float32") of the trainable parameters, in any order."""
    listing = sorted([name, list(shape), dtype] for name, shape, dtype in parameters)
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Choice:
    """A name in a registry and its options: the only way a plan points at code."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        inner = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}({inner})" if inner else self.name


@dataclass(frozen=True)
class Forecast:
    """What one worker is expected to send, hold and spend for one group in one step.

    sent_bytes: mean over workers. memory_bytes: of the fullest worker, between steps (weights, gradients, optimizer
    state). seconds: requests, index work and the optimizer's pass, none of it hidden behind anything.
    """

    sent_bytes: float = 0.0
    memory_bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Forecast") -> "Forecast":
        return Forecast(
            self.sent_bytes + other.sent_bytes, self.memory_bytes + other.memory_bytes, self.seconds + other.seconds
        )


@dataclass(frozen=True)
class Group:
    """Parameters that cross the workers together.

    `update` says which rows of a table the optimizer step moves (see `UPDATES`); a dense group is always exact.
    `look_ahead` says what of a table's pulls leaves one batch early in a loop over `run.batches` (see `LOOK_AHEADS`).
    `reason` is the planner's sentence for the reader.
    """

    name: str
    parameters: tuple[str, ...]
    placement: Placement
    exchange: Choice
    update: Update = "exact"
    forecast: Forecast = Forecast()
    reason: str = ""
    look_ahead: LookAhead = "none"

    @property
    def is_lazy(self) -> bool:
        """Whether only rows with a gradient move, whatever the optimizer would do to the others."""
        return self.update in ("lazy", "stale_lazy")

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError(f"plan: group {self.name!r} holds no parameter")
        if self.placement == "row_sharded" and len(self.parameters) != 1:
            raise ValueError(f"plan: group {self.name!r} is row_sharded and must hold one table, got {self.parameters}")
        if self.update not in UPDATES:
            raise ValueError(f"plan: group {self.name!r}: update {self.update!r} is none of {sorted(UPDATES)}")
        if self.look_ahead != "none" and (self.look_ahead not in LOOK_AHEADS or self.placement != "row_sharded"):
            raise ValueError(
                f"plan: group {self.name!r} is {self.placement}: look_ahead {self.look_ahead!r}; want none, or for a "
                f"row_sharded group one of {sorted(LOOK_AHEADS)}"
            )


@dataclass(frozen=True)
class Plan:
    """The decision for one model on `workers` workers.

    Args of note:
        groups: in launch order.
        mean: "workers" divides the sum of gradients by the number of workers (as DDP does, a worker without data
            counting as zero); "weights" divides by the sum of the weights the user declares each step.
        workers_per_node: how ranks are packed into nodes, for the exchanges that merge inside a node first.
        model_fingerprint, topology_fingerprint: what the plan was made for; the runtime refuses another model.
        compute_seconds: forecast of one step without any exchange.
        priced_with: what pricing took for granted (optimizer, processor), by name; empty if nobody priced it.
        picture: of a schedule other than simultaneous: worker by tick, with the staleness of the weights.
        turn_bytes: what goes from rank to rank in pieces up to this long leaves at once; longer ones take turns on
            the links (`runtime/pairwise.py`).
    """

    workers: int
    groups: tuple[Group, ...]
    model_fingerprint: str
    topology_fingerprint: str = ""
    workers_per_node: int = 1
    mean: Mean = "workers"
    schedule: Choice = Choice("simultaneous")
    compute_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    priced_with: Mapping[str, float] = field(default_factory=dict)
    picture: str = ""
    turn_bytes: int = TURN_BYTES

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"plan: want at least 1 worker, got {self.workers}")
        if self.workers_per_node < 1 or self.workers % self.workers_per_node:
            raise ValueError(f"plan: {self.workers} workers do not fill nodes of {self.workers_per_node}")
        if self.turn_bytes < 0:
            raise ValueError(f"plan: turn_bytes must not be negative, got {self.turn_bytes}")
        if self.mean not in ("workers", "weights"):
            raise ValueError(f"plan: mean {self.mean!r} is none of workers, weights")
        seen: dict[str, str] = {}
        for group in self.groups:
            for parameter in group.parameters:
                if parameter in seen:
                    raise ValueError(
                        f"plan: {parameter!r} is in groups {seen[parameter]!r} and {group.name!r}; want one"
                    )
                seen[parameter] = group.name

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(parameter for group in self.groups for parameter in group.parameters)

    @property
    def looks_ahead(self) -> bool:
        """Whether it means loops over `run.batches`, whose loader may then be ahead of them."""
        return any(group.look_ahead != "none" for group in self.groups)

    @property
    def forecast(self) -> Forecast:
        """The whole step: bytes and memory add up; seconds are compute plus every exchange, none hidden."""
        total = Forecast(seconds=self.compute_seconds)
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

    def __str__(self) -> str:
        divisor = "the number of workers" if self.mean == "workers" else "the sum of declared weights"
        machines = f", topology {self.topology_fingerprint}" if self.topology_fingerprint else ""
        title = (
            f"plan for {self.workers} workers, {self.workers_per_node} a node, model {self.model_fingerprint}"
            f"{machines}; schedule {self.schedule}; mean over {divisor}"
        )
        lines = [_line(group) for group in self.groups]
        ahead = [
            f"look-ahead {kind} ({meaning}): {', '.join(names)}"
            for kind, meaning in LOOK_AHEADS.items()
            if (names := [group.name for group in self.groups if group.look_ahead == kind])
        ]
        table = plan_table(title, lines, self.compute_seconds, UPDATES, (*ahead, *self.notes))
        return f"{table}\n\n{self.picture}" if self.picture else table

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        fields = json.loads(text)
        groups = tuple(
            Group(
                **{
                    **group,
                    "parameters": tuple(group["parameters"]),
                    "exchange": Choice(**group["exchange"]),
                    "forecast": Forecast(**group["forecast"]),
                }
            )
            for group in fields["groups"]
        )
        return cls(
            **{**fields, "groups": groups, "schedule": Choice(**fields["schedule"]), "notes": tuple(fields["notes"])}
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        return cls.from_json(Path(path).read_text())


def _line(group: Group) -> Line:
    cost, exchange = group.forecast, str(group.exchange)
    names = (group.name, group.parameters, group.placement, exchange, group.update)
    return Line(*names, cost.sent_bytes, cost.memory_bytes, cost.seconds, group.reason)
