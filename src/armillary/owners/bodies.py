"""The bytes of letters between workers and owners: tensors one after the other, each beginning at a multiple of eight.

A letter's body says itself what is in it. An answer holds tensors alone: whoever asked knows their forms, and makes
room for it before it comes.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Body", "BodyForm", "Parts", "joined", "packed", "size_of", "taken", "unpacked"]

ALIGNED = 8


class BodyForm(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def room(self) -> int:
        """Bytes up to where the next tensor begins."""
        return self.nbytes + -self.nbytes % ALIGNED


def size_of(forms: Sequence[BodyForm]) -> int:
    """Bytes of a body."""
    return sum(form.room for form in forms)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A body; copies."""
    forms, at = [BodyForm(tuple(one.shape), one.dtype) for one in tensors], 0
    body = torch.empty(size_of(forms), dtype=torch.uint8)
    for tensor, form in zip(tensors, forms, strict=True):
        body[at : at + form.nbytes] = tensor.detach().contiguous().view(-1).view(torch.uint8)
        at += form.room
    return body


def taken(body: Tensor, forms: Sequence[BodyForm]) -> list[Tensor]:
    """The tensors of a body; views."""
    found, at = list[Tensor](), 0
    for form in forms:
        found.append(body[at : at + form.nbytes].view(form.dtype).view(form.shape))
        at += form.room
    return found


Parts = Mapping[str, Sequence[Tensor]]  # by parameter


class Body(NamedTuple):
    head: Any
    parts: Parts


def packed(head: Any, parts: Parts) -> Tensor:
    """head: is pickled, with the forms of the tensors."""
    tensors = [one for each in parts.values() for one in each]
    forms = {name: [BodyForm(tuple(one.shape), one.dtype) for one in each] for name, each in parts.items()}
    said = bytearray(pickle.dumps((head, forms)))
    return joined([torch.tensor([len(said)]), torch.frombuffer(said, dtype=torch.uint8), *tensors])


def unpacked(body: Tensor) -> Body:
    length = BodyForm((1,), torch.int64)
    said = BodyForm((int(taken(body, [length])[0]),), torch.uint8)
    head, forms = pickle.loads(bytes(taken(body, [length, said])[1].numpy()))
    _, _, *tensors = taken(body, [length, said, *(form for each in forms.values() for form in each)])
    left = iter(tensors)
    return Body(head, {name: [next(left) for _ in each] for name, each in forms.items()})
