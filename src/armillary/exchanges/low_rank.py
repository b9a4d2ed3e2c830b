"""Gradients of matrices as products of two thin ones, each summed by one all-reduce; what they leave out follows later.

A power iteration, one round a step, goes on from where the step before ended. Vectors, and matrices whose factors are
not at most half as long, travel whole with the first factor.

Source: PowerSGD (Vogels et al., NeurIPS 2019); `alternate`: ACP-SGD (Zhang et al., 2023), one factor a step.
Departures: what is left out is this rank's own gradient less its own contribution, not less the mean of all, so that
nothing is lost; and a direction that has died out is drawn anew.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.codecs.packing import scale_bytes, working
from armillary.exchanges.coded import why_not_numbers
from armillary.exchanges.dense import CompletedPush, DenseExchange, Leg, Mechanisms, PushResult, Shape
from armillary.exchanges.error_feedback import RESIDUAL, alone, kept_back, nothing_owed, owed, was_owed
from armillary.exchanges.exchange import dense_exchange
from armillary.plans.advice import Advice, Situation, advises, planned
from armillary.plans.parcel import Layout, Parcel, RankInfo, State
from armillary.plans.requests import AllReduce, Program
from armillary.plans.topology import Topology

__all__ = ["low_rank", "orthonormal"]

FACTOR, AGE = "factor", "age"  # by parameter: the right factor (alternating: the last one summed); pushes so far


@dense_exchange(
    {"rank": 1, "start": 0}, {"rank": 1, "start": 1}, {"rank": 1, "start": 0, "alternate": True},
    offers=lambda fact, topology: [{"rank": 4}], departs=("lossy",),
    costs="gradients of matrices are cut to a low rank; what is left out is sent later", mildness=4, soon={"start": 2},
)  # fmt: skip
def low_rank(rank: int = 4, start: int = 100, alternate: bool = False) -> DenseExchange:
    """
    Args:
        rank: columns of a factor.
        start: pushes before which everything is sent whole, while gradients change most.
        alternate: send one factor a step, the left and the right in turn.

    Raises:
        ValueError: a rank below 1, a negative start, or another word than True and False.
    """
    for name, value, least in (("rank", rank, 1), ("start", start, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"exchange: low_rank wants {name} as a whole number of {least} or more, got {value!r}")
    if not isinstance(alternate, bool):
        raise ValueError(f"exchange: low_rank wants alternate=True or alternate=False, got {alternate!r}")
    way = _Way(rank, start, alternate)
    return DenseExchange(
        way.push, 1 if alternate else 2, way.sent_bytes, way.legs, way.oracle, way.begin,
        resharding={RESIDUAL: "sum", FACTOR: "same", AGE: "same"},
        most_bytes=way.most_bytes if start or alternate else None, bytes_after=way.bytes_after,
        work=lambda layout, topology: layout.numel * (9.0 + rank) * (topology.workers > 1),
        counts={FACTOR: way.factor_numbers, AGE: lambda shape: 1}, refuses=why_not_numbers,
        mechanisms=way.mechanisms, density=way.density,
        says=f"rank {rank}; vectors and small matrices go whole, as does everything in the first {start} steps",
    )  # fmt: skip


def orthonormal(columns: Tensor) -> Tensor:
    """(n, r): the same directions at right angles, of length 1, by Gram and Schmidt. A column that is zero, or but for
    rounding depends on those before it, becomes zero."""
    found = columns.clone()
    smallest = math.sqrt(torch.finfo(columns.dtype).eps)
    for place in range(columns.shape[1]):
        column = found[:, place]
        before = float(column.norm())
        for earlier in range(place):
            column -= found[:, earlier] * (found[:, earlier] @ column)
        length = float(column.norm())
        column.mul_(1 / length if length > smallest * before else 0.0)
    return found


def _times_transposed(matrix: Tensor, known: Tensor) -> Tensor:
    """matrix.T @ known, (cols, rank). In this order, since the other reads a large matrix column by column."""
    return (known.T @ matrix).T.contiguous()


class _Matrix(NamedTuple):
    """A parameter that is sent as factors: its place among the group's, and its form."""

    number: int
    begin: int
    end: int
    rows: int
    cols: int

    def of(self, values: Tensor) -> Tensor:
        return values[self.begin : self.end].view(self.rows, self.cols)


@dataclass(frozen=True)
class _Way:
    rank: int
    start: int
    alternate: bool

    def is_low(self, shape: Shape) -> bool:
        if len(shape) < 2:
            return False
        rows, cols = shape[0], math.prod(shape[1:])
        return 2 * self.rank * (rows + cols) <= rows * cols

    def factor_numbers(self, shape: Shape) -> int:
        """Of what is kept for a parameter: the longer factor, where both take turns."""
        if not self.is_low(shape):
            return 0
        rows, cols = shape[0], math.prod(shape[1:])
        return self.rank * (max(rows, cols) if self.alternate else cols)

    def matrices(self, layout: Layout) -> list[_Matrix]:
        spans = enumerate(zip(layout.spans, layout.shapes, strict=True))
        return [_Matrix(n, *span, shape[0], math.prod(shape[1:])) for n, (span, shape) in spans if self.is_low(shape)]

    def whole(self, layout: Layout) -> list[tuple[int, int]]:
        """The spans of what is sent as it is."""
        spans = zip(layout.spans, layout.shapes, strict=True)
        return [span for span, shape in spans if not self.is_low(shape)]

    def mechanisms(self, layout: Layout, workers: int) -> Mechanisms:
        def is_early(pushed: CompletedPush) -> bool:
            return float(pushed.before[AGE].max()) < self.start

        def orthonormalised(pushed: CompletedPush) -> int:
            return 0 if is_early(pushed) or pushed.workers == 1 else len(self.matrices(pushed.layout))

        found: Mechanisms = {"factors orthonormalised": orthonormalised, "residuals sent": was_owed}
        whole: Mechanisms = {"exchanges sent whole at the start": lambda pushed: is_early(pushed)}
        return {**whole, **found} if self.start else found

    def density(self, layout: Layout, state: State) -> float:
        """Numbers that were sent, of factors and of what goes whole, to all values."""
        numel = sum(end - begin for begin, end in layout.spans)
        if float(state[AGE].max()) <= self.start:
            return 1.0
        return (sum(self.requests(layout)) - layout.tail) / max(1, numel)

    def begin(self, layout: Layout, place: RankInfo, values: Tensor) -> State:
        numbers = sum(map(self.factor_numbers, layout.shapes))
        factor = torch.zeros(numbers, dtype=working(values.dtype), device=values.device)
        return {
            RESIDUAL: nothing_owed(values), FACTOR: factor, AGE: torch.zeros(len(layout.names), dtype=torch.float64)
        }  # fmt: skip

    def known(self, state: State, layout: Layout, matrix: _Matrix, count: int, age: int) -> Tensor:
        """(count, rank): what is known of a factor; columns of zeros are drawn, alike on all ranks."""
        lengths = [self.factor_numbers(shape) for shape in layout.shapes]
        at = sum(lengths[: matrix.number])
        found = state[FACTOR][at : at + count * self.rank].view(count, self.rank)
        generator = torch.Generator().manual_seed(age * 65537 + matrix.number)
        drawn = torch.randn(count, self.rank, generator=generator, dtype=torch.float64).to(found)
        return torch.where(found.any(0), found, drawn)

    def kept(self, layout: Layout, matrices: Sequence[_Matrix], factors: Sequence[Tensor], scale: float) -> Tensor:
        """The next FACTOR, in units of gradients, whatever the loss was scaled by; behind the shorter of two that take
        turns stand zeros."""
        found = []
        for matrix, factor in zip(matrices, factors, strict=True):
            missing = self.factor_numbers(layout.shapes[matrix.number]) - factor.numel()
            found.append(torch.nn.functional.pad(factor.reshape(-1) / scale, (0, missing)))
        return torch.cat(found).nan_to_num_(0.0, 0.0, 0.0)  # of sums that overflowed nothing is gone on from

    def is_left(self, age: int) -> bool:
        """Whether in that push, where factors take turns, the left one is summed."""
        return (age - self.start) % 2 == 0

    def is_turned(self, state: State, matrix: _Matrix) -> bool:
        """Whether the right factor is what is known in the end: always, but where it is the left one's turn. A matrix
        takes turns by its own age, since its factor stays where a push found it unused."""
        return not self.alternate or not self.is_left(int(state[AGE][matrix.number]))

    def push(self, parcel: Parcel, state: State, place: RankInfo) -> Program[PushResult]:
        if place.workers == 1:
            return alone(parcel, state)
        layout, age, full = parcel.layout, int(state[AGE].max()), owed(parcel, state)
        dtype = working(full.dtype)
        tail = parcel.tail.to(full.device, dtype)
        matrices = self.matrices(layout) if age >= self.start else []
        spans = self.whole(layout) if age >= self.start else layout.spans
        left, right = list[Tensor](), list[Tensor]()  # factors of every matrix: to be summed; known
        for one in matrices:
            matrix = one.of(full).to(dtype)
            if self.alternate and self.is_turned(state, one):
                known = orthonormal(self.known(state, layout, one, one.rows, age))
                left, right = [*left, _times_transposed(matrix, known)], [*right, known]
            else:
                known = self.known(state, layout, one, one.cols, age)
                known = orthonormal(known) if self.alternate else known
                left, right = [*left, matrix @ known], [*right, known]
        parts = [*(factor.reshape(-1) for factor in left), *(full[a:b].to(dtype) for a, b in spans), tail]
        total = yield AllReduce(torch.cat(parts))
        sums = list(total.split([len(part) for part in parts]))
        result = parcel.room().zero_() if parcel.values.dtype == dtype else torch.zeros_like(full, dtype=dtype)
        lost = full.to(dtype)  # what is owed, less what of it was sent: in place, it is as large as the model
        for (a, b), summed in zip(spans, sums[len(left) : -1], strict=True):
            result[a:b], lost[a:b] = summed, 0
        factors = [summed.view_as(own) for summed, own in zip(sums, left, strict=False)]
        if matrices and not self.alternate:
            right = [orthonormal(factor) for factor in factors]  # P, known to all from here on
            owed_there = [one.of(full).to(dtype) for one in matrices]
            left = [_times_transposed(matrix, known) for matrix, known in zip(owed_there, right, strict=True)]
            total = yield AllReduce(torch.cat([factor.reshape(-1) for factor in left]))
            pieces = total.split([factor.numel() for factor in left])
            factors = [piece.view_as(own) for piece, own in zip(pieces, left, strict=True)]
        for one, own, summed, known in zip(matrices, left, factors, right, strict=True):
            is_turned = self.is_turned(state, one)
            sent, came = ((known, found) if is_turned else (found, known) for found in (own, summed))
            one.of(lost).addmm_(sent[0], sent[1].T, alpha=-1)
            torch.mm(came[0], came[1].T, out=one.of(result))
        factor = self.kept(layout, matrices, factors, parcel.scale) if matrices else state[FACTOR]
        after = {RESIDUAL: kept_back(parcel, lost), FACTOR: factor, AGE: state[AGE] + 1}
        return parcel.answered(result.to(parcel.values.dtype), sums[-1].double()), after

    def oracle(self, parcels: Sequence[Parcel], states: Sequence[State]) -> tuple[list[Parcel], list[State]]:
        """Matrix by matrix, all workers at once."""
        layout, scale, age = parcels[0].layout, parcels[0].scale, int(states[0][AGE].max())
        tail = torch.stack([parcel.tail for parcel in parcels]).sum(0)
        if len(parcels) == 1:
            parcel, state = alone(parcels[0], states[0])
            return [parcel], [state]
        full = [owed(one, state) for one, state in zip(parcels, states, strict=True)]
        dtype, is_low = working(full[0].dtype), age >= self.start
        result, lost = torch.zeros_like(parcels[0].values), [torch.zeros_like(one) for one in full]
        for a, b in self.whole(layout) if is_low else layout.spans:
            result[a:b] = _in_order([one[a:b].to(dtype) for one in full])
        factors, matrices = [], self.matrices(layout) if is_low else []
        for one in matrices:
            own = [one.of(values).to(dtype) for values in full]
            is_turned = self.alternate and self.is_turned(states[0], one)
            known = self.known(states[0], layout, one, one.rows if is_turned else one.cols, age)
            if self.alternate:
                known = orthonormal(known)
            else:
                known, is_turned = orthonormal(_in_order([matrix @ known for matrix in own])), True
            shares = [_times_transposed(matrix, known) if is_turned else matrix @ known for matrix in own]
            factors.append(_in_order(shares))
            one.of(result).copy_(known @ factors[-1].T if is_turned else factors[-1] @ known.T)
            for matrix, share, rest in zip(own, shares, lost, strict=True):
                one.of(rest).copy_(matrix - (known @ share.T if is_turned else share @ known.T))
        factor = self.kept(layout, matrices, factors, scale) if matrices else states[0][FACTOR]
        after = [
            {
                RESIDUAL: torch.where(rest.isfinite(), rest, torch.zeros_like(rest)) / scale,
                FACTOR: factor.clone(),
                AGE: state[AGE] + 1,
            }
            for rest, state in zip(lost, states, strict=True)
        ]
        return [one.answered(result, tail) for one in parcels], after

    def requests(self, layout: Layout) -> Iterator[float]:
        """Numbers of each all-reduce, after the start; in the mean where factors take turns."""
        matrices = self.matrices(layout)
        rows, cols = (self.rank * sum(getattr(one, side) for one in matrices) for side in ("rows", "cols"))
        plain = sum(b - a for a, b in self.whole(layout)) + layout.tail
        yield plain + ((rows + cols) / 2 if self.alternate else rows)
        if matrices and not self.alternate:
            yield cols

    def _bytes(self, numbers: float, layout: Layout, topology: Topology) -> float:
        return 2 * (topology.workers - 1) / topology.workers * numbers * scale_bytes(layout.item_bytes)

    def sent_bytes(self, layout: Layout, topology: Topology) -> list[float]:
        return [self._bytes(sum(self.requests(layout)), layout, topology)] * topology.workers

    def bytes_after(self, layout: Layout, topology: Topology, pushes: int) -> list[float]:
        """Where every matrix is used in every push."""
        matrices = self.matrices(layout)
        numbers = sum(b - a for a, b in self.whole(layout)) + layout.tail
        if pushes < self.start:
            numbers = sum(b - a for a, b in layout.spans) + layout.tail
        elif self.alternate:
            numbers += self.rank * sum(one.rows if self.is_left(pushes) else one.cols for one in matrices)
        else:
            numbers = int(sum(self.requests(layout)))
        return [self._bytes(numbers, layout, topology)] * topology.workers

    def most_bytes(self, layout: Layout, topology: Topology) -> list[float]:
        whole = sum(b - a for a, b in layout.spans) + layout.tail
        longest = sum(self.requests(layout)) * (2 if self.alternate else 1)
        return [self._bytes(max(whole, longest), layout, topology)] * topology.workers

    def legs(self, layout: Layout, topology: Topology) -> list[Leg]:
        hops = 2 * (topology.workers - 1)
        sizes = [self._bytes(numbers, layout, topology) for numbers in self.requests(layout)]
        return [Leg("neighbour", size, hops, "AllReduce") for size in sizes] if hops else []


def _in_order(summands: Sequence[Tensor]) -> Tensor:
    total = summands[0]
    for one in summands[1:]:
        total = total + one
    return total


@advises("PowerSGD", "gradients of matrices at a low rank", "methods/low_rank.md")
def _advice(situation: Situation) -> Advice:
    return planned(situation, "rank 4", "--exchange 'low_rank=*'", {"*": "low_rank"})
