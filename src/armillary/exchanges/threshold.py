"""Gradients that reach a threshold of their layer, and where they stand; the others wait until they have grown.

Every rank has a threshold for each layer (a parameter), which a share 1 - sparsity of its numbers reaches. It is taken
anew every `lifespan` pushes, since a quantile costs more than to compare. All get everybody's code and add up what they
mean, in the order of ranks. How much is sent the data decide.

Source: dynamic communication thresholding (Gupta et al., KDD 2021), its data-parallel half. Departures: thresholds are
taken anew after 1, 2, 4, ... pushes too, since gradients change most at the beginning, and at once where more than
four times the share would pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.codecs.threshold import (
    add_sparse,
    most_bytes,
    places_above,
    quantile,
    refuse_other_shares,
    sparse,
    sparse_bytes,
)
from armillary.exchanges.coded import cut, why_not_numbers
from armillary.exchanges.dense import CompletedPush, DenseExchange, Leg, Mechanisms, PushResult
from armillary.exchanges.error_feedback import RESIDUAL, alone, kept_back, nothing_owed, owed, was_owed
from armillary.exchanges.exchange import dense_exchange
from armillary.plans.advice import Advice, Situation, advises, planned
from armillary.plans.parcel import Layout, Parcel, RankInfo, State
from armillary.plans.requests import AllGather, AllToAll, Program
from armillary.plans.topology import Topology

__all__ = ["is_due", "threshold"]

NUMBER_BYTES = 8  # of a number in the header
LIMIT, AGE = "limit", "age"  # by parameter: its threshold, and pushes so far
RUNAWAY = 4  # times the share that is meant to pass


@dense_exchange(
    {"sparsity": 0.9, "small": 4}, {"sparsity": 0.5, "lifespan": 3, "small": 0},
    offers=lambda fact, topology: [{"sparsity": 0.99}], departs=("lossy",),
    costs="gradients below a threshold wait until they have grown", mildness=5, soon={"lifespan": 3, "small": 8},
)  # fmt: skip
def threshold(sparsity: float = 0.99, lifespan: int = 1000, small: int = 256) -> DenseExchange:
    """
    Args:
        sparsity: the share of a layer's numbers that stay below, in [0, 1).
        lifespan: pushes after which a threshold is taken anew.
        small: layers of fewer numbers are sent whole.

    Raises:
        ValueError: another share, a lifespan below 1 or a negative number.
    """
    refuse_other_shares(sparsity)
    for name, value, least in (("lifespan", lifespan, 1), ("small", small, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"threshold: want {name} as a whole number of {least} or more, got {value!r}")
    rule = _Rule(sparsity, lifespan, small)
    return DenseExchange(
        rule.push, 2, rule.sent_bytes, rule.legs, rule.oracle, rule.begin,
        resharding={RESIDUAL: "sum"}, most_bytes=rule.most_bytes,  # parts of a mean are smaller among more workers
        work=lambda layout, topology: layout.numel * (8.0 + 4 * topology.workers) * (topology.workers > 1),
        counts={LIMIT: lambda shape: 1, AGE: lambda shape: 1}, refuses=why_not_numbers, mechanisms=rule.mechanisms,
        density=rule.density,
    )  # fmt: skip


def is_due(age: int, lifespan: int) -> bool:
    """Whether a threshold is taken anew after so many pushes: at every lifespan; before the first, when they double."""
    return age % lifespan == 0 or (age < lifespan and age & (age - 1) == 0)


class _Passed(NamedTuple):
    """places: (count,) int64, rising, of a layer's numbers that pass. limit: (), the threshold that they reach."""

    places: Tensor
    limit: Tensor


def _passed(values: Tensor, limit: Tensor) -> _Passed:
    return _Passed(places_above(values, limit.to(values.dtype)), limit)


@dataclass(frozen=True)
class _Rule:
    """Which numbers of a layer pass."""

    sparsity: float
    lifespan: int
    small: int

    def target(self, numel: int) -> int:
        """How many numbers of a layer are meant to pass."""
        return numel if numel < self.small else min(numel, max(1, round((1 - self.sparsity) * numel)))

    def passed(self, values: Tensor, limit: Tensor, age: int) -> _Passed:
        """Of a layer in this push, by its threshold or a new one."""
        if len(values) < self.small:
            return _passed(values, torch.zeros_like(limit))
        if not is_due(age, self.lifespan):
            found = _passed(values, limit)
            if len(found.places) <= RUNAWAY * self.target(len(values)):
                return found
        return _passed(values, quantile(values, self.sparsity).to(limit).nan_to_num(0.0, 0.0))

    def mechanisms(self, layout: Layout, workers: int) -> Mechanisms:
        def refreshed(pushed: CompletedPush) -> int:
            return int((pushed.before[LIMIT] != pushed.after[LIMIT]).sum())

        def kept(pushed: CompletedPush) -> int:
            is_large = torch.tensor([end - begin >= self.small for begin, end in pushed.layout.spans])
            is_same = (pushed.before[LIMIT] == pushed.after[LIMIT]) & (pushed.before[LIMIT] > 0)
            return int((is_same & is_large).sum()) * (pushed.workers > 1)

        return {"thresholds refreshed": refreshed, "thresholds kept": kept, "residuals sent": was_owed}

    def density(self, layout: Layout, state: State) -> float:
        """Zeros count as sent: nothing of them waits."""
        numel = sum(end - begin for begin, end in layout.spans)
        return 1 - int(state[RESIDUAL].count_nonzero()) / max(1, numel)

    def begin(self, layout: Layout, place: RankInfo, values: Tensor) -> State:
        none = torch.zeros(len(layout.names), dtype=torch.float64)
        return {RESIDUAL: nothing_owed(values), LIMIT: none, AGE: none.clone()}

    def push(self, parcel: Parcel, state: State, place: RankInfo) -> Program[PushResult]:
        if place.workers == 1:
            return alone(parcel, state)
        full, limits = owed(parcel, state), state[LIMIT] * parcel.scale
        values, found = full.to(parcel.values.dtype), []
        for number, (begin, end) in enumerate(parcel.layout.spans):
            passed = self.passed(values[begin:end], limits[number], int(state[AGE][number]))
            limits[number] = passed.limit
            found.append(passed.places + begin)
        places = torch.cat(found)
        code = sparse(values, places)
        everyones = yield AllGather(torch.cat([torch.tensor([len(code)], dtype=torch.float64), parcel.tail]))
        sizes = tuple(int(size) for size in everyones[:, 0])
        arrived = yield AllToAll(code.repeat(place.workers), (len(code),) * place.workers, sizes)
        total = parcel.room().zero_()
        for rank, theirs in enumerate(cut(arrived, sizes)):
            if not add_sparse(total, theirs):
                raise ValueError(
                    f"exchange: the code of rank {rank} has {len(theirs)} bytes, which is no code of {len(full)} "
                    "numbers; start all ranks with one version and one plan"
                )
        full.index_fill_(0, places, 0)  # how 16-bit numbers round as they leave is not kept, or all would seem to wait
        after = {RESIDUAL: kept_back(parcel, full), LIMIT: limits / parcel.scale, AGE: state[AGE] + 1}
        return parcel.answered(total, everyones[:, 1:].sum(0)), after

    def oracle(self, parcels: Sequence[Parcel], states: Sequence[State]) -> tuple[list[Parcel], list[State]]:
        """Layer by layer, with its numbers sorted."""
        layout, scale = parcels[0].layout, parcels[0].scale
        tail = torch.stack([parcel.tail for parcel in parcels]).sum(0)
        if len(parcels) == 1:
            parcel, state = alone(parcels[0], states[0])
            return [parcel], [state]
        total, after = torch.zeros_like(parcels[0].values), []
        for parcel, state in zip(parcels, states, strict=True):
            full, sent = owed(parcel, state), torch.zeros_like(parcel.values)
            rounded = full.to(sent.dtype)
            limits = state[LIMIT].clone()
            for number, (begin, end) in enumerate(layout.spans):
                values, age, target = rounded[begin:end], int(state[AGE][number]), self.target(end - begin)
                limit, sizes = float(limits[number]) * scale, values.abs()
                is_many = int(((sizes >= limit) & (values != 0)).sum()) > RUNAWAY * target
                if end - begin < self.small:
                    limit = 0.0
                elif is_many or is_due(age, self.lifespan):
                    limit = float(quantile(values, self.sparsity))
                    limit = limit if limit < math.inf else 0.0
                sent[begin:end] = torch.where(sizes >= limit, values, torch.zeros_like(values))
                limits[number] = limit / scale
            total = total + sent
            left = torch.where(sent == 0, full, torch.zeros_like(full))
            lost = torch.where(left.isfinite(), left, torch.zeros_like(left))
            after.append({RESIDUAL: lost / scale, LIMIT: limits, AGE: state[AGE] + 1})
        return [one.answered(total, tail) for one in parcels], after

    def _bytes(self, layout: Layout, topology: Topology, code: int) -> list[float]:
        return [float((topology.workers - 1) * (code + NUMBER_BYTES * (1 + layout.tail)))] * topology.workers

    def expected(self, layout: Layout) -> int:
        """Bytes of a code in which as many numbers pass as are meant to."""
        count = sum(self.target(end - begin) for begin, end in layout.spans)
        return sparse_bytes(layout.numel, count, layout.item_bytes)

    def sent_bytes(self, layout: Layout, topology: Topology) -> list[float]:
        return self._bytes(layout, topology, self.expected(layout))

    def most_bytes(self, layout: Layout, topology: Topology) -> list[float]:
        return self._bytes(layout, topology, most_bytes(layout.numel, layout.item_bytes))

    def legs(self, layout: Layout, topology: Topology) -> list[Leg]:
        others = topology.workers - 1
        if not others:
            return []
        header = Leg("everyone", float(others * NUMBER_BYTES * (1 + layout.tail)), others, "AllGather")
        return [header, Leg("everyone", float(others * self.expected(layout)), 1)]


@advises("DCT", "gradients that reach a threshold", "methods/codecs.md")
def _advice(situation: Situation) -> Advice:
    return planned(situation, "1 % of the values a step", "--exchange 'threshold=*'", {"*": "threshold"})
