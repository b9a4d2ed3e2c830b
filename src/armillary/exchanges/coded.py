"""Gradients by any codec of a fixed length: coded, summed in the order of ranks, and what was left out is sent later.

wire "gathered": everybody gets everybody's code, and adds up what they mean. "scattered": the codes are cut between
tiles, an owner a piece; each owner adds up its piece and codes the sum again for all. The second sends 2 (N - 1) / N
codes instead of N - 1, and pays where a sum is coded in as few bytes as a summand. A bucket that has no tile for every
owner is gathered anyhow: one message instead of two. The tail travels raw with the first message.

Source: error feedback as in 1-bit SGD (Seide et al., 2014) and DoubleSqueeze (Tang et al., 2019). Departure: what an
owner's second coding leaves out goes to the owner's own residual: half the state, and it can be dealt to other workers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from armillary.codecs.registry import CODECS, Codec, Draw, Options, build_codec
from armillary.codecs.registry import CodecEntry as CodecEntry
from armillary.exchanges.dense import DenseExchange, Leg, Mechanisms, PushResult
from armillary.exchanges.error_feedback import RESIDUAL, alone, kept_back, nothing_owed, owed, was_owed
from armillary.exchanges.exchange import DENSE, ExchangeEntry
from armillary.plans.parcel import Layout, Parcel, RankInfo, Span, State, gaps_of, without_gaps
from armillary.plans.profile import ParameterFact
from armillary.plans.requests import AllGather, AllToAll, Program
from armillary.plans.topology import Topology

__all__ = ["coded", "cut", "why_not_numbers"]

WIRES = ("gathered", "scattered")
SMALL = "buckets of less than a tile a worker are gathered"
TAIL_BYTES = 8  # of a number of the tail
ROUNDS = "rounds"  # pushes so far, by parameter: what lots are drawn with
MANY = 4096  # tiles: what few tiles add to a code is no matter of the dtype


def coded(codec: Codec, wire: str = "", feedback: bool = True) -> DenseExchange:
    """
    Args:
        wire: "gathered" or "scattered"; empty: scattered where there are more than two workers and sums are coded in
            as few bytes as summands. In both cases only where there is a tile for every worker.
        feedback: whether what a code leaves out is sent later; else it is lost.

    Raises:
        ValueError: another wire, or a codec whose codes have no fixed length, or cannot be cut.
    """
    if wire and wire not in WIRES:
        raise ValueError(f"exchange: wire {wire!r} is none of {', '.join(WIRES)}")
    if not codec.is_fixed or codec.align < 1:
        misfit = " and ".join(["is_fixed=False"] * (not codec.is_fixed) + ["align=0"] * (codec.align < 1))
        raise ValueError(
            f"exchange: the codec says {misfit}; an exchange wants codes of a fixed length, cut between tiles: "
            "is_fixed=True and align=1 or more. Else register it by @codec(..., carries=False), for edges alone"
        )
    if not isinstance(feedback, bool):
        raise ValueError(f"exchange: want feedback True or False, got {feedback!r}")
    way = _Way(codec, wire, feedback)
    said = (codec.says, SMALL if wire == "scattered" else "", "" if feedback else "what is left out is lost")
    return DenseExchange(
        way.push, 2 if way.may_scatter(3) else 1, way.sent_bytes, way.legs, way.oracle, way.begin,
        resharding={RESIDUAL: "sum", ROUNDS: "same"}, work=way.work, align=codec.align,
        counts={ROUNDS: lambda shape: 1}, refuses=way.refuses,
        says="; ".join(filter(None, said)), mechanisms=way.mechanisms, density=lambda layout, state: codec.keeps,
    )  # fmt: skip


@dataclass(frozen=True)
class _Way:
    """How numbers are coded, and who gets the codes."""

    codec: Codec
    wire: str
    feedback: bool

    def may_scatter(self, workers: int) -> bool:
        return self.wire == "scattered" or (not self.wire and self.codec.adds_up and workers > 2)

    def is_scattered(self, layout: Layout, workers: int) -> bool:
        return self.may_scatter(workers) and layout.numel >= workers * self.codec.align

    def cut(self, layout: Layout, workers: int) -> list[Span]:
        """What is coded by itself: everything, or every owner's piece, cut between tiles."""
        if not self.is_scattered(layout, workers):
            return [(0, layout.numel)]
        tiles = layout.numel // self.codec.align
        begins = [tiles * rank // workers * self.codec.align for rank in range(workers)]
        return list(pairwise([*begins, layout.numel]))

    def mechanisms(self, layout: Layout, workers: int) -> Mechanisms:
        found: Mechanisms = {"exchanges coded": lambda pushed: int(pushed.workers > 1)}
        if self.is_scattered(layout, workers):
            found = {**found, "sums coded again": lambda pushed: int(pushed.workers > 1)}
        return {**found, "residuals sent": was_owed} if self.feedback else found

    def draw(self, state: State, piece: int) -> Draw:
        """The same on all ranks, another in every round and for every piece."""
        drawn = self.codec.draws
        return torch.Generator().manual_seed(int(state[ROUNDS].max()) * 8191 + piece) if drawn else None

    def encoded(self, values: Tensor, state: State, piece: int) -> Tensor:
        if not len(values):
            return values.new_empty(0, dtype=torch.uint8)
        return self.codec.encode(values, self.draw(state, piece))

    def refuse_other_lengths(self, codes: Sequence[Tensor], numbers: Sequence[int], like: Tensor) -> None:
        """codes: of the ranks, in their order; of so many numbers each."""
        for rank, (code, n) in enumerate(zip(codes, numbers, strict=True)):
            want = self.codec.coded_bytes(n, like.itemsize) if n else 0
            if len(code) != want:
                raise ValueError(
                    f"exchange: the code of rank {rank} has {len(code)} bytes, where {want} are wanted for {n} "
                    "numbers; start all ranks with one version and one plan"
                )

    def decoded(self, codes: Sequence[Tensor], spans: Sequence[Span], like: Tensor) -> Iterator[tuple[Span, Tensor]]:
        """What each code means, and where; one after another, so that it is used while a cache holds it."""
        for code, (a, b) in zip(codes, spans, strict=True):
            if b > a:
                yield (a, b), self.codec.decode(code, b - a, like)

    def meant(self, values: Tensor, spans: Sequence[Span], state: State) -> Tensor:
        """The same as decoding the codes, without bytes."""
        pieces = [(values[a:b], self.draw(state, n)) for n, (a, b) in enumerate(spans) if b > a]
        return torch.cat([values[:0], *(self.codec.meaning(*piece) for piece in pieces)])

    def begin(self, layout: Layout, place: RankInfo, values: Tensor) -> State:
        found = {RESIDUAL: nothing_owed(values)} if self.feedback else {}
        return found | ({ROUNDS: torch.zeros(len(layout.names), dtype=torch.float64)} if self.codec.draws else {})

    def after(self, state: State, residual: Tensor) -> State:
        """The next state."""
        found = {RESIDUAL: residual} if self.feedback else {}
        return found | ({ROUNDS: state[ROUNDS] + 1} if self.codec.draws else {})

    def push(self, parcel: Parcel, state: State, place: RankInfo) -> Program[PushResult]:
        if place.workers == 1:
            return alone(parcel, state)
        full, spans = owed(parcel, state), self.cut(parcel.layout, place.workers)
        sent = full.to(parcel.values.dtype)
        codes = [self.encoded(sent[a:b], state, piece) for piece, (a, b) in enumerate(spans)]
        tail = parcel.tail.view(torch.uint8).to(full.device)
        message = torch.cat([part for code in codes for part in (tail, code)])  # a copy: codes may be views of numbers
        for (a, b), gone in self.decoded(codes, spans, sent) if self.feedback else ():
            full[a:b].sub_(gone)  # what is left out stays
        if not self.is_scattered(parcel.layout, place.workers):
            everyones = yield AllGather(message)
            total, tails = self.added(list(everyones), len(full), parcel)
            return parcel.answered(total, tails), self.after(state, kept_back(parcel, full) if self.feedback else full)
        own = slice(*spans[place.rank])
        send = tuple(len(tail) + len(code) for code in codes)
        receive = (send[place.rank],) * place.workers
        arrived = yield AllToAll(message, send, receive)
        total, tails = self.added(cut(arrived, receive), own.stop - own.start, parcel)
        total = without_gaps(total, gaps_of(parcel.layout), own.start)
        again, lengths = self.encoded(total, state, place.rank), tuple(len(code) for code in codes)
        answer = yield AllToAll(again.repeat(place.workers), (len(again),) * place.workers, lengths)
        result = parcel.room()
        for (a, b), found in self.decoded(cut(answer, lengths), spans, sent):
            result[a:b] = found
        if self.feedback:
            full[own].add_(total.to(full.dtype) - result[own])
        return parcel.answered(result, tails), self.after(state, kept_back(parcel, full) if self.feedback else full)

    def added(self, messages: Sequence[Tensor], n: int, parcel: Parcel) -> tuple[Tensor, Tensor]:
        """What the messages mean, added up in the order of ranks: values, and tails."""
        at, total = TAIL_BYTES * parcel.layout.tail, parcel.values[:0]
        self.refuse_other_lengths([message[at:] for message in messages], [n] * len(messages), parcel.values)
        tails = torch.stack([message[:at] for message in messages]).view(torch.float64).sum(0)
        for place, message in enumerate(messages if n else ()):
            found = self.codec.decode(message[at:], n, parcel.values)
            total = total.add_(found) if place else found
        return total, tails

    def oracle(self, parcels: Sequence[Parcel], states: Sequence[State]) -> tuple[list[Parcel], list[State]]:
        layout, workers = parcels[0].layout, len(parcels)
        tail = torch.stack([parcel.tail for parcel in parcels]).sum(0)
        if workers == 1:
            parcel, state = alone(parcels[0], states[0])
            return [parcel], [state]
        spans, is_real = self.cut(layout, workers), torch.zeros(layout.numel, dtype=torch.bool)
        for a, b in layout.spans:
            is_real[a:b] = True
        full = [owed(one, state) for one, state in zip(parcels, states, strict=True)]
        dtype = parcels[0].values.dtype
        sent = [self.meant(one.to(dtype), spans, state) for one, state in zip(full, states, strict=True)]
        total = sent[0]
        for one in sent[1:]:
            total = total + one
        lost, out = [one - gone for one, gone in zip(full, sent, strict=True)], total
        if self.is_scattered(layout, workers):
            total = torch.where(is_real, total, torch.zeros_like(total))
            out = self.meant(total, spans, states[0])
            for worker, (a, b) in enumerate(spans):
                lost[worker][a:b] += (total.to(full[0].dtype) - out)[a:b]
        sound = [is_real & one.isfinite() for one in lost]
        kept = [torch.where(*one, torch.zeros(())) / parcels[0].scale for one in zip(sound, lost, strict=True)]
        return [one.answered(out, tail) for one in parcels], list(map(self.after, states, kept))

    def lengths(self, layout: Layout, workers: int) -> list[int]:
        """Bytes of the codes."""
        spans = self.cut(layout, workers)
        return [self.codec.coded_bytes(b - a, layout.item_bytes) if b > a else 0 for a, b in spans]

    def legs(self, layout: Layout, topology: Topology) -> list[Leg]:
        others, tail = topology.workers - 1, TAIL_BYTES * layout.tail
        if not others:
            return []
        sizes = self.lengths(layout, topology.workers)
        if not self.is_scattered(layout, topology.workers):
            return [Leg("everyone", float(others * (sizes[0] + tail)), others, "AllGather")]
        hottest = float(max(max(sum(sizes) - size, others * size) for size in sizes))
        return [Leg("everyone", hottest + others * tail, 1), Leg("everyone", hottest, 1)]

    def sent_bytes(self, layout: Layout, topology: Topology) -> list[float]:
        others, tail = topology.workers - 1, TAIL_BYTES * layout.tail
        sizes = self.lengths(layout, topology.workers)
        if not self.is_scattered(layout, topology.workers):
            return [float(others * (sizes[0] + tail))] * topology.workers
        return [float(sum(sizes) - size + others * (tail + size)) for size in sizes]

    def work(self, layout: Layout, topology: Topology) -> float:
        """Own numbers are coded once and decoded once; what arrives is decoded and added, and a sum coded again."""
        summed = 2 if self.is_scattered(layout, topology.workers) else topology.workers
        return layout.numel * (self.codec.work * (1 + summed) / 2 + 3 * summed) * (topology.workers > 1)

    def refuses(self, layout: Layout) -> str:
        n = self.codec.align * MANY
        said = why_not_numbers(layout)
        if not said and self.codec.coded_bytes(n, layout.item_bytes) >= n * layout.item_bytes:
            said = f"its code is as long as the numbers, which are {layout.dtype} already"
        return said


def cut(codes: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """
    Raises:
        ValueError: they are not so long together.
    """
    if len(codes) != sum(lengths):
        raise ValueError(
            f"exchange: the ranks' codes have {len(codes)} bytes, where {sum(lengths)} were announced; start all ranks "
            "with one version and one plan"
        )
    return codes.split_with_sizes(list(lengths))


def why_not_numbers(layout: Layout) -> str:
    """Why a codec cannot code these; empty where it can."""
    is_real = getattr(torch, layout.dtype).is_floating_point
    return "" if is_real else f"codecs are for real floating numbers, {', '.join(layout.names)} holds {layout.dtype}"


def _factory(name: str, entry: CodecEntry) -> Callable[..., DenseExchange]:
    def make(wire: str = "", feedback: bool = True, **options: Any) -> DenseExchange:
        return coded(build_codec(name, **options), wire, feedback)

    own, more = signature(make), signature(entry.make)
    ours = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    both = sorted((*more.parameters.values(), *ours), key=lambda one: one.default is not one.empty)
    make.__signature__ = own.replace(parameters=both)  # type: ignore[attr-defined]
    return make


def _offers(entry: CodecEntry) -> Callable[[ParameterFact, Topology], Sequence[Options]]:
    return lambda fact, topology: entry.offers


def _entry_of(name: str, entry: CodecEntry) -> ExchangeEntry | None:
    """A codec's name, used as an exchange, means this one with it."""
    if not entry.carries:
        return None
    first = entry.examples[0]
    examples = (*({**first, "wire": wire} for wire in WIRES), {**first, "feedback": False})
    return ExchangeEntry(_factory(name, entry), examples, _offers(entry), "", ("lossy",), entry.costs, entry.mildness)


DENSE.follow(CODECS, _entry_of)
