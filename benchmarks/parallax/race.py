"""Training by turns as plain data: when each side reached the goal, and how far their losses are apart.

A side has a clock of its own that runs in its turns alone, and what is evaluated is evaluated between turns. So a
machine whose speed drifts drifts for all sides alike, and seconds are of training only.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Curve", "Goal", "Point", "Race", "Turn", "apart", "load", "points", "reached", "save"]


@dataclass(frozen=True)
class Goal:
    """rises: whether the metric of held-out data grows as the model learns."""

    metric: str
    target: float
    rises: bool

    def is_met(self, value: float) -> bool:
        return value >= self.target if self.rises else value <= self.target


@dataclass(frozen=True)
class Turn:
    """Some steps of one side, and what held-out data said after them."""

    seconds: float  # of all ranks: from a barrier before to a barrier after
    sent_bytes: float  # by a worker, mean; as the kernel counted
    losses: tuple[tuple[float, ...], ...]  # of each rank, step by step, before the update
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        if not self.losses or not self.steps or {len(one) for one in self.losses} != {self.steps}:
            raise ValueError(f"race: every rank takes the same steps, at least one, got {[*map(len, self.losses)]}")

    @property
    def steps(self) -> int:
        return len(self.losses[0])


Curve = tuple[Turn, ...]


@dataclass(frozen=True)
class Race:
    """curves: by side, the one that others are held against first; turn after turn all have taken the same steps.
    beside: metrics that are shown beside that of the goal."""

    conditions: Mapping[str, Any]
    goal: Goal
    beside: tuple[str, ...]
    curves: Mapping[str, Curve]

    def __post_init__(self) -> None:
        steps = {name: [turn.steps for turn in curve] for name, curve in self.curves.items()}
        if not steps or any(one != next(iter(steps.values())) or not one for one in steps.values()):
            raise ValueError(f"race: all sides take the same steps in every turn, got {steps}")


@dataclass(frozen=True)
class Point:
    """seconds: of training so far."""

    step: int
    seconds: float
    metrics: Mapping[str, float]


def points(curve: Curve) -> tuple[Point, ...]:
    """One after each turn."""
    found, step, seconds = [], 0, 0.0
    for turn in curve:
        step, seconds = step + turn.steps, seconds + turn.seconds
        found.append(Point(step, seconds, turn.metrics))
    return tuple(found)


def reached(curve: Curve, goal: Goal) -> Point | None:
    """The first evaluation that meets the goal."""
    return next((point for point in points(curve) if goal.is_met(point.metrics[goal.metric])), None)


def apart(one: Curve, other: Curve) -> float:
    """The largest difference of a rank's loss at a step, relative to the other's."""
    return max(
        abs(mine - theirs) / abs(theirs)
        for turn, beside in zip(one, other, strict=True)
        for ours, others in zip(turn.losses, beside.losses, strict=True)
        for mine, theirs in zip(ours, others, strict=True)
    )


def save(race: Race, path: Path) -> None:
    path.write_text(json.dumps(asdict(race)) + "\n")


def load(path: Path) -> Race:
    found = json.loads(path.read_text())
    curves = {name: tuple(_turn(fields) for fields in curve) for name, curve in found["curves"].items()}
    return Race(found["conditions"], Goal(**found["goal"]), tuple(found["beside"]), curves)


def _turn(fields: dict[str, Any]) -> Turn:
    """JSON has lists where a turn has tuples."""
    return Turn(**{**fields, "losses": tuple(tuple(one) for one in fields["losses"])})
