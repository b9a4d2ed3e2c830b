"""What a dense exchange is: how one group of whole tensors crosses the workers, every step or when it is due.

A program asks, and holds nothing: state comes in with the parcel and goes out with the result. So the runtime decides
whether it counts, a checkpoint keeps it, and the oracle moves it for all workers in one process.

A `Leg` tells pricing what passes the busiest rank's link, and how many messages wait for one another there. Seconds are
made of it and a topology (`planning/link_costs.py`), so an exchange is priced without being known by name.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from armillary.plans.parcel import Layout, Parcel, RankInfo, State
from armillary.plans.registry import Choice
from armillary.plans.requests import Program
from armillary.plans.topology import Topology

__all__ = [
    "AveragedGradients",
    "CompletedPush",
    "DenseExchange",
    "EarlyLegs",
    "Leg",
    "Legs",
    "Links",
    "Mechanisms",
    "Meeting",
    "PushResult",
    "Resharding",
    "exact_sum",
    "why_not_beside",
]

Links = Literal["slowest", "everyone", "neighbour", "node", "rail"]


class Leg(NamedTuple):
    """
    links: "slowest": every byte passes the slowest link there is; "everyone": even pieces to all other ranks, of which
        those inside the node and those beyond it leave by different links at once; "neighbour": each rank sends to the
        next one, so a node's last rank alone sends beyond it; "node", "rail": to the other ranks of the node, or to the
        ranks of the same place in the other nodes.
    link_bytes: through the busiest link in one direction. messages: that wait for one another, each for one latency.
    request: the kind that is made, by the name of its class: links serve some kinds better than others.
    """

    links: Links
    link_bytes: float
    messages: float
    request: str = "AllToAll"


class Legs(NamedTuple):
    """Of a row exchange: `pull` delays forward, `push` follows in backward and may hide behind what is left of it. A
    push has one leg a request, in order: programs that are under way together take turns."""

    pull: tuple[Leg, ...]
    push: tuple[Leg, ...]


class EarlyLegs(NamedTuple):
    """Of a pull that is prefetched, in the order of its requests. What is not `late` leaves before the step it is for.

    ids: asked for; masks: which of the rows stay put until they are read; early: those rows; late: the others.
    """

    ids: Leg
    masks: Leg
    early: Leg
    late: Leg


Resharding = Literal["sum", "mean", "same", "drop"]
Meeting = Literal["after", "before"]
PushResult = tuple[Parcel, State]
Shape = tuple[int, ...]
PERIOD = 5040  # steps in which cadences of every 1 to 10 come out even
SETTLED = 1_000_000  # steps after which what is only done at the start is past


class CompletedPush(NamedTuple):
    """A push of one rank that has landed: what the state was before, and is after."""

    layout: Layout
    workers: int
    before: State
    after: State


Mechanisms = Mapping[str, Callable[[CompletedPush], int]]  # how often each acted in a push


class AveragedGradients(NamedTuple):
    """Gradients of a group that carries weights, averaged beside them: over all ranks ("world") or over those of each
    node, in the steps that are due (as `DenseExchange.due`)."""

    scope: Literal["world", "node"]
    due: Callable[[int], bool]


def exact_sum(parcels: Sequence[Parcel], states: Sequence[State]) -> tuple[list[Parcel], list[State]]:
    """What every exact exchange means: each worker gets the sum, and there is no state."""
    values = torch.stack([parcel.values for parcel in parcels]).sum(0)
    tail = torch.stack([parcel.tail for parcel in parcels]).sum(0)
    return [parcel.answered(values, tail) for parcel in parcels], list(states)


def _no_state(layout: Layout, place: RankInfo, values: Tensor) -> State:
    return {}


def _every_step(steps: int) -> bool:
    return True


@lru_cache(64)
def _share_due(due: Callable[[int], bool]) -> float:
    return sum(map(due, range(SETTLED + 1, SETTLED + PERIOD + 1))) / PERIOD


def _nothing_refused(layout: Layout) -> str:
    return ""


def _no_work(layout: Layout, topology: Topology) -> float:
    return 0.0


def _all_sent(layout: Layout, state: State) -> float:
    return 1.0


def _exchanged(layout: Layout, workers: int) -> Mechanisms:
    return {"exchanges": lambda pushed: 1}


class DenseExchange(NamedTuple):
    """How the parcels of one group become what every worker goes on with. Exact and without state but for what it says.

    push(parcel, state, place): program that returns (result, next state). It changes no state in place: the runtime
        takes the next one when the result has landed, and leaves it where some rank's numbers are not finite. Values
        it overwrites only in `Parcel.room`, once it needs them no more.
    requests: how many requests a push makes at most, the same on every rank; the runtime orders launches by it.
    sent_bytes(layout, topology): payload bytes per rank of one push, one number per rank, as expected.
    legs(layout, topology): the same for the busiest link, request by request, with the messages that each waits for.
    oracle(parcels, states): the meaning seen from above: all workers' parcels and states -> results and next states.
    begin(layout, place, values): the state before the first push; values: (layout.numel,) the group's weights then.
    counts: by entry of the state, how many numbers it has for a parameter of a shape; if nothing is said, one for each
        value, laid out as the values are.
    resharding: by entry, how a state is dealt to another number of workers: every one gets the "sum" over their
        number (nothing is lost), the "mean", rank 0's ("same"), or begins anew ("drop", if nothing is said).
    carries: "gradient": this rank's part of the mean gradient, before the optimizer's step. "weights": those of this
        rank; the result takes their place, and the step is made with this rank's own gradient. Nobody reads the tail of
        a result then, so no push has to add it up.
    meeting: of weights, whether they are exchanged "after" the optimizer's step or "before" it. Before it, the gradient
        was taken at the weights as they were, and the step moves those that the exchange gave.
    gradients: of weights, the steps in which gradients of the same group are averaged besides; the first that is due
        says over which ranks.
    due(steps): whether to push in the step after which so many are complete (1: the first). If not, nothing is
        requested, and the optimizer gets this rank's own gradient.
    most_bytes: as sent_bytes, what is never exceeded; None: what is expected is what is sent.
    bytes_after(layout, topology, pushes): sent_bytes of the push after so many, where they are not all alike.
    work(layout, topology): numbers that the processor reads and writes per push, besides packing.
    align: tensors begin at a multiple of so many numbers.
    refuses(layout): why it cannot carry such a group; empty where it can.
    density(layout, state): the share of the values that the last push sent.
    takes_rows: whether a gradient may come as rows (`Parcel.rows`); the result is rows where every rank gave rows.
    says: what its options come to, where they do not say it themselves.
    mechanisms(layout, workers): what it does with such a group among so many, in words; what never acts where it is
        verified is not called verified.
    """

    push: Callable[[Parcel, State, RankInfo], Program[PushResult]]
    requests: int
    sent_bytes: Callable[[Layout, Topology], list[float]]
    legs: Callable[[Layout, Topology], list[Leg]]
    oracle: Callable[[Sequence[Parcel], Sequence[State]], tuple[list[Parcel], list[State]]] = exact_sum
    begin: Callable[[Layout, RankInfo, Tensor], State] = _no_state
    resharding: Mapping[str, Resharding] = MappingProxyType({})
    carries: Literal["gradient", "weights"] = "gradient"
    meeting: Meeting = "after"
    gradients: tuple[AveragedGradients, ...] = ()
    due: Callable[[int], bool] = _every_step
    most_bytes: Callable[[Layout, Topology], list[float]] | None = None
    bytes_after: Callable[[Layout, Topology, int], list[float]] | None = None
    work: Callable[[Layout, Topology], float] = _no_work
    align: int = 1
    counts: Mapping[str, Callable[[Shape], int]] = MappingProxyType({})
    refuses: Callable[[Layout], str] = _nothing_refused
    density: Callable[[Layout, State], float] = _all_sent
    takes_rows: bool = False
    says: str = ""
    mechanisms: Callable[[Layout, int], Mechanisms] = _exchanged

    @property
    def is_guarded(self) -> bool:
        """Whether it keeps a state, which what is not finite must not enter."""
        return self.begin is not _no_state

    @property
    def keeps_replicas_alike(self) -> bool:
        """Whether all workers hold the same weights after every step."""
        return self.carries == "gradient" and self.cadence == "step"

    @property
    def cadence(self) -> Literal["step", "meeting"]:
        """Whether it pushes in every step, or only in some."""
        return "step" if self.due is _every_step else "meeting"

    @property
    def share_due(self) -> float:
        """Of the steps, how many push, in the long run."""
        return 1.0 if self.due is _every_step else _share_due(self.due)

    @property
    def period(self) -> int:
        """Steps from one push to the next, in the long run; 1 where none comes any more."""
        if self.due is _every_step:
            return 1
        found = [steps for steps in range(SETTLED + 1, SETTLED + 2 * PERIOD + 1) if self.due(steps)][:2]
        return found[1] - found[0] if len(found) == 2 else 1

    def span(self, entry: str, layout: Layout, number: int) -> tuple[int, int]:
        """First and last number, the last not included, of what an entry of the state holds for one parameter."""
        if entry not in self.counts:
            return layout.spans[number]
        lengths = [self.counts[entry](shape) for shape in layout.shapes[: number + 1]]
        return sum(lengths[:-1]), sum(lengths)

    def misfit(self, layout: Layout, state: State) -> str:
        """Which entry of a state is not as long as `counts` says, so that no checkpoint could keep it by parameter;
        empty where all are."""
        for entry, value in state.items():
            whole = self.span(entry, layout, len(layout.shapes) - 1)[1] if entry in self.counts else layout.numel
            if value.shape != (whole,):
                said = "its `counts` say" if entry in self.counts else "the values are"
                have = f"state {entry!r} has shape {tuple(value.shape)}; want ({whole},)"
                return f"{have}, as {said}: a checkpoint keeps it by parameter"
        return ""

    def state_bytes(self, layout: Layout, workers: int) -> int:
        """What its state takes on one worker."""
        values = torch.empty(layout.numel, dtype=getattr(torch, layout.dtype), device="meta")
        return sum(entry.nbytes for entry in self.begin(layout, RankInfo(0, workers), values).values())


def why_not_beside(choice: Choice, exchange: DenseExchange, mean: str, workers_per_node: int) -> str:
    """What speaks against an exchange of weights on such machines, with such a mean; empty where nothing does."""
    if exchange.carries != "weights":
        return ""
    if mean == "weights":
        return (
            f"mean='weights' weighs gradients, but {choice} lets weights meet, of which each rank's count alike; plan "
            "with mean='workers'"
        )
    if workers_per_node == 1 and any(one.scope == "node" for one in exchange.gradients):
        return (
            f"{choice} averages gradients inside a node, but each node has one rank; drop that option, or start more "
            "ranks on every node"
        )
    return ""
