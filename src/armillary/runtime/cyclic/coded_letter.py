"""How the letters of a coded edge are written: numbers to codes on one side, and back on the other.

Which tensors of an activation are coded its form says (`schedules/edge.py` has the rule); those of its gradient are the
same. Where a gradient follows its activation, both ends know the places that crossed: each keeps one bit a number,
until the gradient of that micro-batch has crossed. Where an edge remembers samples, its two ends hold what arrived
(`sample_memory.py`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from armillary.codecs.codec import Codec
from armillary.codecs.edges import at_places, guarded
from armillary.codecs.tiles import packed, unpacked
from armillary.runtime.cyclic.sample_memory import SampleMemory
from armillary.runtime.form import Form, TensorForm, form_of
from armillary.runtime.mailbox import Room
from armillary.schedules.edge import EdgeCode, draw_of, is_codable
from armillary.schedules.instruction import Letter
from armillary.schedules.schedule import Cell

__all__ = ["CodedLetter", "Crossed"]

BACK = "activation gradient"


@dataclass(frozen=True, eq=False)
class Crossed:
    """What a process knows of the coded activations that crossed its edges.

    Args of note:
        seed: of the run. stages: of the schedule.
        first: number of this replica's first micro-batch among those of all.
        marks: by stage that made it, which leaves of an activation are coded.
        kept: by the place that made it and the leaf, where it is not zero, in bits.
        counted: tensors that this process sent, see `TrainSpec`.
        samples: keys of a micro-batch's samples, by step and micro-batch, until it has left by all edges that remember.
        memories: by the stage that made it, the leaf, and whether it is the sending side.
    """

    seed: int
    first: int
    stages: int
    counted: Counter[tuple[str, int, bool]] = field(default_factory=Counter)
    marks: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    kept: dict[Cell, dict[int, Tensor]] = field(default_factory=dict)
    samples: dict[tuple[int, int], tuple[bytes, ...]] = field(default_factory=dict)
    memories: dict[tuple[int, int, bool], SampleMemory] = field(default_factory=dict)


class _Leaf(NamedTuple):
    """A tensor of a letter: its number among the leaves, what its form says, whether it is coded in this step."""

    number: int
    form: TensorForm
    is_coded: bool

    @property
    def elements(self) -> int:
        return torch.Size(self.form.shape).numel()


@dataclass(frozen=True, eq=False)
class CodedLetter:
    """
    Args:
        passed_on: leaves that another stage made; known where the letter is sent.
    """

    code: EdgeCode
    letter: Letter
    crossed: Crossed
    passed_on: frozenset[int] = frozenset()

    def form(self, leaves: list[Any], spec: TreeSpec) -> Form:
        """The same in all steps: it says what is coded once the warm-up is over."""
        marks = tuple(
            leaf.requires_grad and is_codable(leaf) and number not in self.passed_on
            if isinstance(leaf, Tensor)
            else False
            for number, leaf in enumerate(leaves)
        )
        if self._is_back:
            marks = self.crossed.marks[self._edge]
        marked = [
            leaf._replace(is_coded=mark) if isinstance(leaf, TensorForm) else leaf
            for leaf, mark in zip(form_of(leaves, spec).leaves, marks, strict=True)
        ]
        return Form(tuple(marked), spec)

    def varying(self, form: Form) -> list[int]:
        found = [] if self.code.is_fixed else self._leaves(form)
        return [place for place, leaf in enumerate(found) if leaf.is_coded]

    def write(self, form: Form, tensors: list[Tensor]) -> list[Tensor]:
        leaves = self._leaves(form)
        written = [
            self._encoded(leaf, tensor) if leaf.is_coded else tensor
            for leaf, tensor in zip(leaves, tensors, strict=True)
        ]
        pairs = [pair for pair in zip(leaves, written, strict=True) if pair[0].form.is_coded]
        sent = Counter(self._is_in_code(*pair) for pair in pairs)
        for is_coded, count in sent.items():
            self.crossed.counted[self.letter.what, self.letter.stage, is_coded] += count
        self._note(form, self._arrived(form, written) if self.code.leads else tensors)
        return written

    def room(self, form: Form, lengths: list[int]) -> list[Room]:
        known = iter(lengths)
        return [self._room(leaf, known) for leaf in self._leaves(form)]

    def read(self, form: Form, written: list[Tensor]) -> list[Tensor]:
        arrived = self._arrived(form, written)
        self._note(form, arrived)
        return arrived

    @property
    def _is_back(self) -> bool:
        return self.letter.what == BACK

    @property
    def _edge(self) -> int:
        """The stage below it."""
        return self.letter.stage - self._is_back

    @property
    def _made(self) -> Cell:
        """Where the activation was made."""
        return self.letter.step, self.letter.micro_batch, self._edge

    def _leaves(self, form: Form) -> list[_Leaf]:
        is_on = self.letter.step >= self.code.warm_up
        found = [(number, leaf) for number, leaf in enumerate(form.leaves) if isinstance(leaf, TensorForm)]
        return [_Leaf(number, leaf, leaf.is_coded and is_on) for number, leaf in found]

    def _codec(self, leaf: _Leaf) -> Codec:
        if not self.code.follows:
            return self.code.codec
        kept = self.crossed.kept[self._made][leaf.number]
        return guarded(at_places(unpacked(kept, leaf.elements, 1).bool()))

    def _draw(self, leaf: _Leaf) -> torch.Generator | None:
        step, micro_batch, stage = self.letter.step, self.crossed.first + self.letter.micro_batch, self.letter.stage
        place, stages = (step, micro_batch, stage), self.crossed.stages
        return draw_of(self.code.codec, self.crossed.seed, place, leaf.number, stages, self._is_back)

    def _room(self, leaf: _Leaf, lengths: Iterator[int]) -> Room:
        if not leaf.is_coded:
            return Room(leaf.form.shape, leaf.form.dtype)
        fixed = self.code.codec.coded_bytes(leaf.elements, leaf.form.dtype.itemsize) if self.code.is_fixed else None
        return Room((next(lengths) if fixed is None else fixed,), torch.uint8)

    def _arrived(self, form: Form, written: list[Tensor]) -> list[Tensor]:
        return [self._decoded(leaf, one) if leaf.is_coded else one for leaf, one in zip(self._leaves(form), written)]

    def _encoded(self, leaf: _Leaf, tensor: Tensor) -> Tensor:
        if not self.code.cache_bytes:
            return self._codec(leaf).encode(tensor.reshape(-1), self._draw(leaf))
        keys = self.crossed.samples[self.letter.step, self.letter.micro_batch]
        return self._memory(leaf, is_sending=True).write(tensor, keys, self.code.codec, self._draw(leaf))

    def _is_in_code(self, leaf: _Leaf, written: Tensor) -> bool:
        """Whether something of it was coded: samples that are new cross whole."""
        if not (leaf.is_coded and self.code.cache_bytes):
            return leaf.is_coded
        return self._memory(leaf, is_sending=True).met(written, leaf.form.shape[0]) > 0

    def _memory(self, leaf: _Leaf, is_sending: bool) -> SampleMemory:
        place = (self.letter.stage, leaf.number, is_sending)
        if place not in self.crossed.memories:
            self.crossed.memories[place] = SampleMemory(f"edge of stage {self.letter.stage}", self.code.cache_bytes)
        return self.crossed.memories[place]

    def _decoded(self, leaf: _Leaf, code: Tensor) -> Tensor:
        like = torch.empty(0, dtype=leaf.form.dtype, device=code.device)
        if self.code.cache_bytes:
            return self._memory(leaf, is_sending=False).read(code, leaf.form.shape, like, self.code.codec)
        return self._codec(leaf).decode(code, leaf.elements, like).view(leaf.form.shape)

    def _note(self, form: Form, arrived: list[Tensor]) -> None:
        """What both sides must know of it when its gradient crosses; or that it has."""
        if self._is_back:
            self.crossed.kept.pop(self._made, None)
            return
        self.crossed.marks[self._edge] = tuple(isinstance(leaf, TensorForm) and leaf.is_coded for leaf in form.leaves)
        if self.code.leads:
            self.crossed.kept[self._made] = {
                leaf.number: packed((one != 0).view(-1).to(torch.uint8), 1)
                for leaf, one in zip(self._leaves(form), arrived, strict=True)
                if leaf.is_coded
            }
