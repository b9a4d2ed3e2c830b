"""Weights go to both neighbours of a ring, a tensor only when its norm has moved enough; no rank waits for all others.

Between backward and the optimizer's step a rank mixes its weights with the copies that it has of its neighbours'. A
tensor whose norm is still near what was sent last is not sent: the neighbours go on with the copy that they have. The
threshold is the mean of the last two slopes of the norm, times `horizon` in every pass without a message.

Source: EventGraD (Ghosh et al., Neurocomputing 2022), on D-PSGD's ring (Lian et al., 2017), which is horizon=0.
Departures: `mixing="keep"`, since "replace", as published, forgets what a rank learns alone where copies grow old: a
rank adds a third of each neighbour's copy less the copy that the neighbours have of it, so that the mean of all ranks
stays as it was. And `cap`: a norm does not see a tensor turn, so that copies grew 600 passes old.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.exchanges.dense import CompletedPush, DenseExchange, Leg, Mechanisms, PushResult
from armillary.exchanges.exchange import dense_exchange
from armillary.plans.advice import Advice, Situation, advises, planned
from armillary.plans.parcel import Layout, Parcel, RankInfo, State
from armillary.plans.requests import AllToAll, Program
from armillary.plans.topology import Topology

__all__ = ["gossip"]

MIXINGS = ("keep", "replace")
MOST_HORIZON = 1.05  # beyond it thresholds outgrow the norms, and training diverges
SLOPES = 2  # of the norm, whose mean is the threshold
LEFT, RIGHT, SENT = "left", "right", "sent"  # copies: of the neighbours, and what they have of this rank
NORM, LIMIT, SLOPE, LAST, PASS = "norm", "limit", "slope", "last", "pass"  # by parameter; LAST: the pass when sent last
EXPECTED = 0.5  # of the values in a pass, where the data decide: 0.4 to 0.5 was seen at horizon 1


@dense_exchange(
    {"horizon": 1.0, "cap": 3, "start": 1}, {"mixing": "replace", "start": 1}, {"horizon": 0.0},
    offers=lambda fact, topology: [], departs=("event",), soon={"cap": 3, "start": 2},
    costs="weights reach two neighbours, and only when their norm has moved by more than a threshold",
)  # fmt: skip
def gossip(horizon: float = 1.0, cap: int = 20, mixing: str = "keep", start: int = 30) -> DenseExchange:
    """
    Args:
        horizon: by which a threshold is multiplied in each pass, in [0, 1.05]; the larger, the less is sent. 0: all is.
        cap: passes after which a tensor is sent in any case.
        mixing: "keep" holds the mean of all ranks; "replace" is the mean with both copies, as published.
        start: passes in which everything is sent, while norms move most.

    Raises:
        ValueError: a number out of its range, or another mixing.
    """
    if isinstance(horizon, bool) or not isinstance(horizon, int | float) or not 0 <= horizon <= MOST_HORIZON:
        raise ValueError(
            f"exchange: gossip wants a horizon from 0 (send all) to {MOST_HORIZON} (thresholds grow), got {horizon!r}"
        )
    for name, value, least in (("cap", cap, 1), ("start", start, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"exchange: gossip wants {name} as a whole number of {least} or more, got {value!r}")
    if mixing not in MIXINGS:
        raise ValueError(f"exchange: gossip wants mixing={' or mixing='.join(MIXINGS)}, got {mixing!r}")
    ring = _Ring(horizon, cap, mixing == "keep", start)
    return DenseExchange(
        ring.push, 2, ring.sent_bytes, ring.legs, ring.oracle, ring.begin, carries="weights", meeting="before",
        most_bytes=ring.most_bytes, counts=dict.fromkeys((NORM, LIMIT, SLOPE, LAST, PASS), lambda shape: 1),
        work=lambda layout, topology: (12.0 if ring.keeps else 9.0) * layout.numel * (topology.workers > 1),
        refuses=_why_not, density=ring.density, mechanisms=ring.mechanisms,
        says=f"a ring; all in the first {start} passes, then what has moved, or was last sent {cap} passes ago",
    )  # fmt: skip


def _why_not(layout: Layout) -> str:
    is_real = getattr(torch, layout.dtype).is_floating_point
    names = ", ".join(layout.names)
    return "" if is_real else f"it mixes real floating numbers, {names} holds {layout.dtype}; name another for it"


class _Side(NamedTuple):
    """A neighbour: the copy that is of it, its rank, and which of its copies is of this rank."""

    copy: str
    rank: int
    back: str


def _sides(rank: int, workers: int) -> list[_Side]:
    """Of two ranks, each is the other's one neighbour."""
    if workers <= 2:
        return [_Side(LEFT, 1 - rank, LEFT)][: workers - 1]
    return [_Side(LEFT, (rank - 1) % workers, RIGHT), _Side(RIGHT, (rank + 1) % workers, LEFT)]


class _Decided(NamedTuple):
    """is_sent: (parameters,) bool. after: what the sender remembers then, by parameter."""

    is_sent: Tensor
    after: State


@dataclass(frozen=True)
class _Ring:
    horizon: float
    cap: int
    keeps: bool
    start: int

    @property
    def sends_all(self) -> bool:
        return self.horizon == 0 or self.cap == 1

    def begin(self, layout: Layout, place: RankInfo, values: Tensor) -> State:
        """As if nothing had been sent, so that the first message of each tensor replaces the copies."""
        copies = {name: values.clone() for name in (LEFT, RIGHT, SENT)}
        none = torch.zeros(len(layout.names), dtype=torch.float64, device=values.device)
        return {**copies, **{name: none.clone() for name in (NORM, LIMIT, SLOPE, LAST, PASS)}}

    def decided(self, values: Tensor, state: State, layout: Layout) -> _Decided:
        """Which tensors go out in this pass."""
        norms = [torch.linalg.vector_norm(values[a:b], dtype=torch.float64) for a, b in layout.spans]
        norm, passes = torch.stack(norms), state[PASS] + 1
        moved, age, limit = (norm - state[NORM]).abs(), passes - state[LAST], state[LIMIT] * self.horizon
        is_sent = (moved >= limit) | (passes <= self.start) | (age >= self.cap)
        slope = moved / age
        found = {NORM: norm, LIMIT: (slope + state[SLOPE]) / SLOPES, SLOPE: slope, LAST: passes}
        kept = {**state, LIMIT: limit}
        after = {name: torch.where(is_sent, value, kept[name]) for name, value in found.items()}
        return _Decided(is_sent, {**after, PASS: passes})

    def mixed(self, values: Tensor, state: State, sides: Sequence[_Side]) -> Tensor:
        """Of own weights and copies, all of this pass."""
        own = state[SENT] if self.keeps else values
        away = sum((state[side.copy] - own for side in sides), torch.zeros_like(values))
        return values + away / (1 + len(sides))

    def push(self, parcel: Parcel, state: State, place: RankInfo) -> Program[PushResult]:
        sides = _sides(place.rank, place.workers)
        if not sides:
            return parcel.answered(parcel.values, parcel.tail), state
        values, layout = parcel.values, parcel.layout
        is_sent, remembered = self.decided(values, state, layout)
        near = sorted(side.rank for side in sides)
        flags = is_sent.to(torch.uint8)
        headers = tuple(len(flags) * (rank in near) for rank in range(place.workers))
        heard = yield AllToAll(flags.repeat(len(near)), headers, headers)
        theirs = dict(zip(near, heard.bool().split(len(flags)), strict=True))
        mine = torch.cat([values[:0], *(values[a:b] for a, b in _chosen(layout, is_sent))])
        sizes = {rank: sum(b - a for a, b in _chosen(layout, sent)) for rank, sent in theirs.items()}
        send = tuple(len(mine) * (rank in near) for rank in range(place.workers))
        receive = tuple(sizes.get(rank, 0) for rank in range(place.workers))
        arrived = yield AllToAll(mine.repeat(len(near)), send, receive)
        pieces = dict(zip(near, arrived.split([sizes[rank] for rank in near]), strict=True))
        copies = {one.copy: _put(state[one.copy], layout, theirs[one.rank], pieces[one.rank]) for one in sides}
        after = {**state, **remembered, **copies, SENT: _put(state[SENT], layout, is_sent, mine)}
        return parcel.answered(self.mixed(values, after, sides), parcel.tail), after

    def oracle(self, parcels: Sequence[Parcel], states: Sequence[State]) -> tuple[list[Parcel], list[State]]:
        """Tensor by tensor: whoever sends writes into the copies of its neighbours."""
        ranks, workers = range(len(parcels)), len(parcels)
        if workers == 1:
            return [parcel.answered(parcel.values, parcel.tail) for parcel in parcels], list(states)
        after = [{name: value.clone() for name, value in state.items()} for state in states]
        for rank, (parcel, state) in enumerate(zip(parcels, after, strict=True)):
            for number, (a, b) in enumerate(parcel.layout.spans):
                state[PASS][number] += 1
                state[LIMIT][number] *= self.horizon
                values, age = parcel.values[a:b], float(state[PASS][number] - state[LAST][number])
                norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
                moved = abs(norm - float(state[NORM][number]))
                is_early = float(state[PASS][number]) <= self.start
                if not (is_early or age >= self.cap or moved >= float(state[LIMIT][number])):
                    continue
                state[LIMIT][number] = (moved / age + float(state[SLOPE][number])) / SLOPES
                state[SLOPE][number], state[NORM][number] = moved / age, norm
                state[LAST][number] = state[PASS][number]
                state[SENT][a:b] = values
                for side in _sides(rank, workers):
                    after[side.rank][side.back][a:b] = values
        results = [self.mixed(parcels[rank].values, after[rank], _sides(rank, workers)) for rank in ranks]
        return [one.answered(result, one.tail) for one, result in zip(parcels, results, strict=True)], after

    def density(self, layout: Layout, state: State) -> float:
        sent = sum(b - a for a, b in _chosen(layout, state[LAST] == state[PASS]))
        return sent / max(1, sum(b - a for a, b in layout.spans))

    def mechanisms(self, layout: Layout, workers: int) -> Mechanisms:
        def sent(pushed: CompletedPush) -> Tensor:
            return pushed.after[LAST] > pushed.before[LAST]

        def at_cap(pushed: CompletedPush) -> int:
            is_old = pushed.after[PASS] - pushed.before[LAST] >= self.cap
            return int((is_old & sent(pushed) & (pushed.after[PASS] > self.start)).sum())

        whole: Mechanisms = {"tensors sent": lambda pushed: int(sent(pushed).sum())}
        if workers == 1 or self.sends_all:
            return whole
        return {
            **whole,
            "tensors kept back": lambda pushed: int((~sent(pushed)).sum()),
            f"tensors sent {self.cap} passes after the last time": at_cap,
        }

    def _bytes(self, layout: Layout, topology: Topology, share: float) -> list[float]:
        """A flag of a byte goes ahead for each tensor."""
        ways = min(2, topology.workers - 1)
        return [ways * (len(layout.names) + share * layout.nbytes)] * topology.workers

    def sent_bytes(self, layout: Layout, topology: Topology) -> list[float]:
        return self._bytes(layout, topology, 1.0 if self.sends_all else EXPECTED)

    def most_bytes(self, layout: Layout, topology: Topology) -> list[float]:
        return self._bytes(layout, topology, 1.0)

    def legs(self, layout: Layout, topology: Topology) -> list[Leg]:
        if topology.workers == 1:
            return []
        flags, whole = (sent[0] for sent in (self._bytes(layout, topology, 0.0), self.sent_bytes(layout, topology)))
        return [Leg("neighbour", flags, 1), Leg("neighbour", whole - flags, 1)]


def _chosen(layout: Layout, is_sent: Tensor) -> list[tuple[int, int]]:
    """The spans of those tensors."""
    return [span for span, chosen in zip(layout.spans, is_sent.tolist(), strict=True) if chosen]


def _put(copy: Tensor, layout: Layout, is_sent: Tensor, sent: Tensor) -> Tensor:
    """The copy with these tensors in it, which lie one after another."""
    found, at = copy.clone(), 0
    for a, b in _chosen(layout, is_sent):
        found[a:b] = sent[at : at + b - a]
        at += b - a
    return found


@advises("EventGraD", "weights to two neighbours, when they have moved", "methods/gossip.md")
def _advice(situation: Situation) -> Advice:
    return planned(
        situation, "half of all values a step is taken for granted", "--exchange 'gossip=*'", {"*": "gossip"}
    )
