"""What a part hands to the next one: its outputs for every sample, made once, with the batches that they were made of.

They carry a hash of the part that made them. So nobody learns from outputs of weights that have moved on since.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from armillary.models.split_loss import Batch
from armillary.models.structure import take_apart

__all__ = ["HandOver", "PartBatch", "fingerprint", "handed_over"]

FORMAT = 1


class PartBatch(NamedTuple):
    """inputs: of a part, as positional arguments. batch: of the loader, which they belong to."""

    inputs: tuple[Any, ...]
    batch: Batch


@dataclass(frozen=True, eq=False)
class HandOver:
    """
    Args of note:
        values: by sample, as the part returned them.
        batches: of the loader, joined by sample.
        batch_size: of the loader's first batch.
        made_by: hash of weights and buffers of the part.
    """

    part: int
    values: Any
    batches: Batch
    batch_size: int
    made_by: str

    @property
    def samples(self) -> int:
        return _count(self.values)

    @property
    def nbytes(self) -> int:
        """Of the outputs alone."""
        return sum(leaf.nbytes for leaf in take_apart(self.values).leaves if isinstance(leaf, Tensor))

    def in_order(self) -> Iterator[PartBatch]:
        yield from self.picked(torch.arange(self.samples))

    def picked(self, order: Tensor) -> Iterator[PartBatch]:
        """`batch_size` samples at a time, in this order."""
        for chosen in order.split(self.batch_size):
            yield PartBatch((_picked(self.values, chosen),), _picked(self.batches, chosen))

    def save(self, path: str | Path) -> None:
        """One file, read by torch.load."""
        torch.save({"format": FORMAT, **vars(self)}, path)

    @classmethod
    def load(cls, path: str | Path) -> "HandOver":
        """
        Raises:
            ValueError: the file is none that `save` wrote, or holds types that torch.load does not take from files.
        """
        try:
            found = torch.load(path, weights_only=True)
            if found.pop("format") != FORMAT:
                raise ValueError("another version wrote it")
            return cls(**found)
        except Exception as error:
            raise ValueError(f"local_losses: {path} is no hand-over ({error}); save it again") from error


def handed_over(part: int, module: nn.Module, source: Iterable[PartBatch], made_by: str) -> HandOver:
    """One pass over the batches in evaluation mode. Nothing in the module is changed.

    Args:
        source: what the part reads, batch by batch.
        made_by: hash of the part.

    Raises:
        ValueError: there is no batch, or batches cannot be joined by sample.
    """
    was = {one: one.training for one in module.modules()}
    values, batches = list[Any](), list[Batch]()
    try:
        module.eval()
        with torch.no_grad():
            for given in source:
                values.append(module(*given.inputs))
                batches.append(given.batch)
    finally:
        for one, mode in was.items():
            one.training = mode
    if not values:
        raise ValueError(f"local_losses: part {part} has no outputs, as the loader gives nothing; give a loader")
    return HandOver(part, _joined(values), _joined(batches), _count(values[0]), made_by)


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes and every bit."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _count(nest: Any) -> int:
    return len(next(leaf for leaf in take_apart(nest).leaves if isinstance(leaf, Tensor)))


def _joined(nests: Sequence[Any]) -> Any:
    """
    Raises:
        ValueError: they differ in structure, or hold a tensor that is not one row a sample.
    """
    parts = [take_apart(nest) for nest in nests]
    counts = [{len(leaf) for leaf in one.leaves if isinstance(leaf, Tensor) and leaf.dim()} for one in parts]
    others = any(not (isinstance(leaf, Tensor) and leaf.dim()) for one in parts for leaf in one.leaves)
    if others or any(len(count) != 1 for count in counts) or any(one.structure != parts[0].structure for one in parts):
        raise ValueError(
            "local_losses: outputs are kept by sample, so a batch must be a nest of tensors whose first dimension is "
            "the samples, the same for all; give such batches"
        )
    columns = zip(*(one.leaves for one in parts), strict=True)
    return parts[0].structure.put_together([torch.cat(column) for column in columns])


def _picked(nest: Any, rows: Tensor) -> Any:
    leaves, structure = take_apart(nest)
    return structure.put_together([leaf[rows.to(leaf.device)] for leaf in leaves])
