"""Replicas that train alone for some steps, then take the mean of their weights, or an outer step towards it.

Between two meetings nothing crosses, or gradients inside each node. The optimizer is the user's, its state stays each
rank's own.

Sources: local SGD (Stich, ICLR 2019); post-local SGD, which begins as data parallelism (Lin et al., ICLR 2020); DiLoCo
(Douillard et al., 2023), whose outer step is SGD with Nesterov momentum on what a round has moved the mean. Departures:
an outer step of rate 1 without momentum is the mean itself, and keeps no state; after a start the first outer step is
taken from the weights that the start left.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from armillary.exchanges.dense import (
    AveragedGradients,
    CompletedPush,
    DenseExchange,
    Leg,
    Mechanisms,
    PushResult,
    Resharding,
)
from armillary.exchanges.exchange import dense_exchange
from armillary.plans.advice import Advice, Situation, advises, planned
from armillary.plans.parcel import Layout, Parcel, RankInfo, State
from armillary.plans.requests import AllReduce, Program
from armillary.plans.topology import Topology

__all__ = ["local_steps"]

ANCHOR, MOMENTUM = "anchor", "momentum"  # the weights that the last meeting left; the outer step's
MEETINGS = "meetings"  # so far, by parameter; the first ends a start


@dense_exchange(
    {"steps": 1}, {"steps": 4, "start": 3}, {"steps": 4, "outer_rate": 0.7, "outer_momentum": 0.9},
    offers=lambda fact, topology: [], departs=("local",),
    costs="replicas train alone and meet every few steps; on data that differ by rank they drift apart",
    soon={"steps": 2, "start": 2},
)  # fmt: skip
def local_steps(
    steps: int = 32, start: int = 0, inside: str = "", outer_rate: float = 1.0, outer_momentum: float = 0.0
) -> DenseExchange:
    """
    Args:
        steps: of the optimizer between two meetings.
        start: steps at the beginning in which gradients are averaged over all ranks, and nobody meets.
        inside: "node": from then on the ranks of a node average their gradients in every step.
        outer_rate, outer_momentum: of the step that a meeting takes from the weights of the last one towards the mean;
            DiLoCo's are 0.7 and 0.9. 1 and 0 are the mean.

    Raises:
        ValueError: steps below 1, a negative start, another word than "node", an outer rate that is not above 0, or a
            momentum outside [0, 1).
    """
    for name, value, least in (("steps", steps, 1), ("start", start, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"exchange: local_steps wants {name} as a whole number of {least} or more, got {value!r}")
    if inside not in ("", "node"):
        raise ValueError(f"exchange: local_steps wants inside='node' or nothing, got {inside!r}")
    if not _is_number(outer_rate) or not 0 < outer_rate < float("inf"):
        raise ValueError(f"exchange: local_steps wants an outer_rate above 0 (1 is the mean), got {outer_rate!r}")
    if not _is_number(outer_momentum) or not 0 <= outer_momentum < 1:
        raise ValueError(f"exchange: local_steps wants an outer_momentum of 0 to below 1, got {outer_momentum!r}")
    outer = _OuterStep(float(outer_rate), float(outer_momentum), has_start=start > 0)
    first = AveragedGradients("world", lambda taken: taken <= start)
    later = AveragedGradients("node", lambda taken: taken > start)
    met = DenseExchange(
        outer.push, 1, _sent_bytes, _legs, outer.oracle, carries="weights", refuses=_why_not,
        due=_meets(max(1, outer.first(start)), start, steps),
        mechanisms=outer.mechanisms,
        gradients=(*[first] * (start > 0), *[later] * (inside == "node")), says=_said(steps, start, inside),
    )  # fmt: skip
    if outer.is_mean:
        return met
    kept = f"{met.says}; beside them each rank keeps the weights of the last meeting and a momentum"
    dealt: Mapping[str, Resharding] = {ANCHOR: "same", MOMENTUM: "same", MEETINGS: "same"}
    return met._replace(begin=outer.begin, resharding=dealt, counts={MEETINGS: lambda shape: 1}, says=kept)


@lru_cache(64)  # one function for the same options, as a planner makes this exchange thousands of times
def _meets(first: int, start: int, steps: int) -> Callable[[int], bool]:
    return lambda taken: taken >= first and (taken - start) % steps == 0


def _said(steps: int, start: int, inside: str) -> str:
    before = f"gradients are averaged in the first {start} steps; then " if start else ""
    islands = ", and the ranks of a node average gradients in between" if inside else ""
    return f"{before}weights meet every {steps} steps{islands}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _why_not(layout: Layout) -> str:
    is_real = getattr(torch, layout.dtype).is_floating_point
    return "" if is_real else f"replicas of {layout.dtype} have no mean that local_steps could take"


def _sent_bytes(layout: Layout, topology: Topology) -> list[float]:
    return [2 * (topology.workers - 1) / topology.workers * layout.nbytes] * topology.workers


def _legs(layout: Layout, topology: Topology) -> list[Leg]:
    return [Leg("neighbour", max(_sent_bytes(layout, topology)), 2 * (topology.workers - 1), "AllReduce")]


@dataclass(frozen=True)
class _OuterStep:
    """What a meeting makes of the replicas' mean. has_start: the first meeting only says from where the next begin."""

    rate: float
    momentum: float
    has_start: bool

    @property
    def is_mean(self) -> bool:
        return self.rate == 1 and self.momentum == 0

    def first(self, start: int) -> int:
        """The step before which nobody meets."""
        return start + 1 if self.is_mean else start

    def begin(self, layout: Layout, place: RankInfo, values: Tensor) -> State:
        met = torch.full((len(layout.names),), float(not self.has_start), dtype=torch.float64)
        return {ANCHOR: values.clone(), MOMENTUM: torch.zeros_like(values), MEETINGS: met}

    def push(self, parcel: Parcel, state: State, place: RankInfo) -> Program[PushResult]:
        total = yield AllReduce(parcel.values.clone() if parcel.whole is None else parcel.values)  # else given away
        weights, after = self.taken(total.div_(place.workers), state)
        return parcel.answered(weights, parcel.tail), after

    def oracle(self, parcels: Sequence[Parcel], states: Sequence[State]) -> tuple[list[Parcel], list[State]]:
        """Replica by replica."""
        mean = torch.stack([parcel.values for parcel in parcels]).sum(0) / len(parcels)
        moved = [self.taken(mean, state) for state in states]
        results = [parcel.answered(weights, parcel.tail) for parcel, (weights, _) in zip(parcels, moved, strict=True)]
        return results, [after for _, after in moved]

    def taken(self, mean: Tensor, state: State) -> tuple[Tensor, State]:
        """The weights after the meeting, and the next state."""
        if self.is_mean:
            return mean, state
        met = state[MEETINGS] + 1
        if not bool(state[MEETINGS].any()):
            return mean, {ANCHOR: mean.clone(), MOMENTUM: state[MOMENTUM], MEETINGS: met}
        moved = state[ANCHOR] - mean  # in a round: DiLoCo's outer gradient
        momentum = self.momentum * state[MOMENTUM] + moved
        weights = state[ANCHOR] - self.rate * (moved + self.momentum * momentum)
        return weights, {ANCHOR: weights.clone(), MOMENTUM: momentum, MEETINGS: met}

    def mechanisms(self, layout: Layout, workers: int) -> Mechanisms:
        def has_momentum(pushed: CompletedPush) -> bool:
            return bool(pushed.before[MOMENTUM].any())

        found: Mechanisms = {"meetings": lambda pushed: 1}
        return {**found, "outer steps with momentum": has_momentum} if self.momentum else found


@advises("local SGD, DiLoCo", "replicas train alone, and meet every 32 steps", "methods/local_steps.md")
def _advice(situation: Situation) -> Advice:
    return planned(situation, "a meeting every 32 steps", "--exchange 'local_steps=*'", {"*": "local_steps"})
