"""The bytes of letters between workers and owners: tensors one after the other, each beginning at a multiple of eight.

A pull says which rows of each table are wanted; its answer holds what the owner owns whole, then these rows. A push
holds the options of the worker's optimizer, where they are not those of its push before, and gradients.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.owners.shares import GroupOptions, Ownings, RowGradient

__all__ = ["BodyForm", "BodyReader", "Push", "joined", "pull_body", "push_body", "read_pull", "read_push", "size_of"]

ALIGNED = 8


class BodyForm(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def size_of(forms: Sequence[BodyForm]) -> int:
    """Bytes of a body."""
    return sum(form.nbytes + -form.nbytes % ALIGNED for form in forms)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A body; copies."""
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    body = torch.empty(sum(len(part) + -len(part) % ALIGNED for part in parts), dtype=torch.uint8)
    at = 0
    for part in parts:
        body[at : at + len(part)] = part
        at += len(part) + -len(part) % ALIGNED
    return body


class BodyReader:
    """Takes a body apart, in its order."""

    def __init__(self, body: Tensor) -> None:
        self._body, self._at = body, 0

    def take(self, form: BodyForm) -> Tensor:
        """A view."""
        part = self._body[self._at : self._at + form.nbytes]
        self._at += form.nbytes + -form.nbytes % ALIGNED
        return part.view(form.dtype).view(form.shape)


def pull_body(rows: Mapping[str, Tensor]) -> Tensor:
    """rows: of the owner's part of every table, int64."""
    counts = torch.tensor([len(one) for one in rows.values()], dtype=torch.int64)
    return joined([counts, *rows.values()])


def read_pull(body: Tensor, ownings: Ownings) -> dict[str, Tensor]:
    """By table."""
    reading = BodyReader(body)
    counts = reading.take(BodyForm((len(ownings.tables),), torch.int64)).tolist()
    return {
        name: reading.take(BodyForm((count,), torch.int64)) for name, count in zip(ownings.tables, counts, strict=True)
    }


class Push(NamedTuple):
    """options: None where they are those of the same worker's push before. dense, rows: what has a gradient."""

    options: GroupOptions | None
    dense: dict[str, Tensor]
    rows: dict[str, RowGradient]


def push_body(push: Push, owner: int, ownings: Ownings) -> Tensor:
    said = b"" if push.options is None else pickle.dumps(push.options)
    flags = [int(name in push.dense) for name in ownings.dense[owner]]
    counts = [len(push.rows[name].rows) if name in push.rows else 0 for name in ownings.tables]
    numbers = torch.tensor([len(said), *flags, *counts], dtype=torch.int64)
    options = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else torch.empty(0, dtype=torch.uint8)
    dense = [push.dense[name] for name in ownings.dense[owner] if name in push.dense]
    rows = [one for name in ownings.tables if name in push.rows for one in push.rows[name]]
    return joined([numbers, options, *dense, *rows])


def read_push(body: Tensor, owner: int, ownings: Ownings, forms: Mapping[str, BodyForm]) -> Push:
    """forms: of all parameters, whole."""
    reading, names = BodyReader(body), ownings.dense[owner]
    length, *rest = reading.take(BodyForm((1 + len(names) + len(ownings.tables),), torch.int64)).tolist()
    said = bytes(reading.take(BodyForm((length,), torch.uint8)).numpy())
    flags, counts = rest[: len(names)], rest[len(names) :]
    dense = {name: reading.take(forms[name]) for name, has_one in zip(names, flags, strict=True) if has_one}
    rows = dict[str, RowGradient]()
    for name, count in zip(ownings.tables, counts, strict=True):
        if count:
            mine, (shape, dtype) = reading.take(BodyForm((count,), torch.int64)), forms[name]
            rows[name] = RowGradient(mine, reading.take(BodyForm((count, *shape[1:]), dtype)))
    return Push(pickle.loads(said) if said else None, dense, rows)
