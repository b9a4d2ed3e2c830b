"""Coded edges between stages: messages in codes, and what both sides remember of a sample.

How the messages of a coded edge are written: numbers to codes on one side, and back on the other.

Which tensors of an activation are coded its form says (`schedules/edges.py` has the rule); those of its gradient are
the
same. Where a gradient follows its activation, both ends know the places that crossed: each keeps one bit a number,
until the gradient of that micro-batch has crossed. Where an edge remembers samples, its two ends hold what arrived
(`sample_memory.py`).

What both ends of an edge hold of samples that crossed it: the value that arrived last, to which a change is added.

A sample that is met for the first time crosses whole. Later only the code of its change crosses: both ends add what
decoding gives to what they hold, so they hold the same. The sender alone knows samples by key. It says in which slot
each goes; the oldest make room where there is none left. A code brings a checksum of what it was made against.

A code: of every sample its slot (int32: 2 * slot + 1 where it is held, 2 * slot where it is new, -1 where it is not
kept), a checksum, what is new as it is, then the code of all changes together. What is not finite is not kept.

Source: Wang et al., "Fine-tuning language models over slow networks using activation compression with guarantees",
NeurIPS 2022 (AQ-SGD). Departure: samples are known by a hash of their input, not by a number.
"""

import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from armillary.codecs.packing import as_bytes, from_bytes, packed, unpacked
from armillary.codecs.registry import Codec, Draw, at_places, guarded
from armillary.schedules.edges import IN_MEMORY_BYTES, EdgeCode, draw_of, is_codable
from armillary.schedules.instructions import StageMessage
from armillary.schedules.schedule import Cell
from armillary.transport.agreement import checksum
from armillary.transport.point_to_point import Form, Room, TensorForm, form_of

__all__ = ["CodedLetter", "Crossed", "SampleMemory"]

SLOT_BYTES, CHECKSUM_BYTES = 4, 8
NOT_KEPT = -1


@dataclass(eq=False)
class SampleMemory:
    """Of one tensor of one edge, on one side of it.

    Args:
        name: of the edge, for errors. nbytes: that samples may take; the oldest go where there are more.
    """

    name: str
    nbytes: int
    slots: dict[bytes, int] = field(default_factory=dict)  # by key, the oldest first; on the sending side
    free: list[int] = field(default_factory=list)
    held: Tensor | None = None  # (slots, *sample)
    watches_for_strangers: bool = True  # until a sample is met again, or it is said that none was

    def write(self, values: Tensor, keys: Sequence[bytes], codec: Codec, draw: Draw) -> Tensor:
        """(samples, ...) -> the code.

        Raises:
            RuntimeError: of another number of samples than keys.
        """
        if len(values) != len(keys):
            raise RuntimeError(
                f"{self.name}: a tensor {tuple(values.shape)} and {len(keys)} samples in the micro-batch; an edge that "
                f"remembers samples wants them along the first dimension; take the edge's codec without memory"
            )
        held = self._room(values)
        known = [number for number, key in enumerate(keys) if key in self.slots]
        self.watches_for_strangers = self.watches_for_strangers and not known
        is_finite = values.reshape(len(values), -1).isfinite().all(1).tolist()
        slots = self._slots(keys, is_finite, len(held))
        old = held[[slots[number] for number in known]]
        changes = values[known] - old
        new = sorted({*range(len(keys))} - {*known})
        words = [slot if slot == NOT_KEPT else 2 * slot for slot in slots]
        for number in known:
            words[number] += 1
        code = [
            as_bytes(torch.tensor(words, dtype=torch.int32)),
            as_bytes(torch.tensor([checksum(old)], dtype=torch.int64)),
            as_bytes(values[new].reshape(-1)).cpu(),
        ]
        if known:
            code.append(codec.encode(changes.reshape(-1), draw).cpu())
        whole = torch.cat(code).to(values.device)
        self.read(whole, values.shape, values.new_empty(0), codec)
        return whole

    def read(self, code: Tensor, shape: Sequence[int], like: Tensor, codec: Codec) -> Tensor:
        """The values that arrive; they are held from now on, on whichever side this is called.

        Raises:
            RuntimeError: this side holds something else than what the code was made against.
        """
        samples, size = shape[0], torch.Size(shape[1:]).numel()
        head = samples * SLOT_BYTES
        words = from_bytes(code[:head].cpu(), torch.int32).tolist()
        known = [number for number, word in enumerate(words) if word >= 0 and word % 2]
        new = [number for number, word in enumerate(words) if word < 0 or not word % 2]
        values = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
        held = self._room(values)
        old = held[[words[number] // 2 for number in known]]
        if checksum(old) != int(from_bytes(code[head : head + CHECKSUM_BYTES].cpu(), torch.int64)):
            raise RuntimeError(
                f"{self.name}: its two ends no longer hold the same of the samples in this micro-batch; begin again "
                f"from a checkpoint, whose next epoch sends every sample whole"
            )
        begin = head + CHECKSUM_BYTES
        end = begin + len(new) * size * like.itemsize
        values[new] = from_bytes(code[begin:end], like.dtype).view(len(new), *shape[1:])
        if known:
            values[known] = old + codec.decode(code[end:], len(known) * size, like).view(len(known), *shape[1:])
        is_finite = values.reshape(samples, -1).isfinite().all(1).tolist()
        last = {words[number] // 2: number for number in range(samples) if words[number] >= 0 and is_finite[number]}
        held[[*last]] = values[[*last.values()]]
        return values

    def met(self, code: Tensor, samples: int) -> int:
        """How many samples of a code were held before."""
        words = from_bytes(code[: samples * SLOT_BYTES].cpu(), torch.int32)
        return int(((words >= 0) & (words % 2 == 1)).sum())

    def _slots(self, keys: Sequence[bytes], is_finite: Sequence[bool], capacity: int) -> list[int]:
        """By sample."""
        wanted = {*keys}
        for key, fine in zip(keys, is_finite, strict=True):
            if key in self.slots or not fine:
                continue
            if not self.free:
                oldest = next((one for one in self.slots if one not in wanted), None)
                if len(self.slots) < capacity:
                    self.free.append(len(self.slots))
                elif oldest is not None:
                    self._warn_of_strangers(capacity)
                    self.free.append(self.slots.pop(oldest))
            if self.free:
                self.slots[key] = self.free.pop()
        return [self.slots.get(key, NOT_KEPT) for key in keys]

    def _warn_of_strangers(self, capacity: int) -> None:
        if self.watches_for_strangers:
            self.watches_for_strangers = False
            warnings.warn(
                f"{self.name}: {capacity} samples have crossed, and none was met again before the first had to go, so "
                f"all are sent whole. It remembers samples that come back unchanged in every epoch: raise cache_mb, or "
                f"leave random augmentation to the first stage",
                stacklevel=2,
            )

    def _room(self, values: Tensor) -> Tensor:
        if self.held is None:
            one = max(1, values[:1].numel() * values.itemsize)
            shape = (max(1, self.nbytes // one), *values.shape[1:])
            if self.nbytes <= IN_MEMORY_BYTES:
                self.held = torch.empty(shape, dtype=values.dtype, device=values.device)
            else:
                with tempfile.NamedTemporaryFile() as file:  # its name goes now, its room with the tensor
                    numel = torch.Size(shape).numel()
                    flat = torch.from_file(file.name, shared=True, size=numel, dtype=values.dtype)
                self.held = flat.view(shape)
        return self.held


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
    """A tensor of a message: its number among the leaves, what its form says, whether it is coded in this step."""

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
        passed_on: leaves that another stage made; known where the message is sent.
    """

    code: EdgeCode
    message: StageMessage
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
            self.crossed.counted[self.message.what, self.message.stage, is_coded] += count
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
        return self.message.what == BACK

    @property
    def _edge(self) -> int:
        """The stage below it."""
        return self.message.stage - self._is_back

    @property
    def _made(self) -> Cell:
        """Where the activation was made."""
        return self.message.step, self.message.micro_batch, self._edge

    def _leaves(self, form: Form) -> list[_Leaf]:
        is_on = self.message.step >= self.code.warm_up
        found = [(number, leaf) for number, leaf in enumerate(form.leaves) if isinstance(leaf, TensorForm)]
        return [_Leaf(number, leaf, leaf.is_coded and is_on) for number, leaf in found]

    def _codec(self, leaf: _Leaf) -> Codec:
        if not self.code.follows:
            return self.code.codec
        kept = self.crossed.kept[self._made][leaf.number]
        return guarded(at_places(unpacked(kept, leaf.elements, 1).bool()))

    def _draw(self, leaf: _Leaf) -> torch.Generator | None:
        step, micro_batch, stage = self.message.step, self.crossed.first + self.message.micro_batch, self.message.stage
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
        keys = self.crossed.samples[self.message.step, self.message.micro_batch]
        return self._memory(leaf, is_sending=True).write(tensor, keys, self.code.codec, self._draw(leaf))

    def _is_in_code(self, leaf: _Leaf, written: Tensor) -> bool:
        """Whether something of it was coded: samples that are new cross whole."""
        if not (leaf.is_coded and self.code.cache_bytes):
            return leaf.is_coded
        return self._memory(leaf, is_sending=True).met(written, leaf.form.shape[0]) > 0

    def _memory(self, leaf: _Leaf, is_sending: bool) -> SampleMemory:
        place = (self.message.stage, leaf.number, is_sending)
        if place not in self.crossed.memories:
            self.crossed.memories[place] = SampleMemory(f"edge of stage {self.message.stage}", self.code.cache_bytes)
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
