"""What both ends of an edge hold of samples that crossed it: the value that arrived last, to which a change is added.

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
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from armillary.codecs.codec import Codec, Draw
from armillary.codecs.tiles import as_bytes, from_bytes
from armillary.runtime.agreement import checksum
from armillary.schedules.edge import IN_MEMORY_BYTES

__all__ = ["SampleMemory"]

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
