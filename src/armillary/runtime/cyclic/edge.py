"""Nests of tensors from one process to another, always of the same form.

The first message brings its form along (structure, shapes, dtypes, which tensors ask for a gradient, constants), so no
shape is declared anywhere; after that only numbers travel, into buffers posted beforehand. A message of another form is
refused on the sending side.
"""

import pickle
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from armillary.runtime.channel import Channel, Pending

__all__ = ["NORM_TAG", "Incoming", "Outgoing"]

NORM_TAG = 2  # of what `norm_chain.py` sends between the same two processes
_LENGTH, _FORM, _LEAVES = 0, 1, 3  # tags; leaf i has tag _LEAVES + i


class _TensorForm(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    asks: bool  # for a gradient


class _Form(NamedTuple):
    leaves: tuple[Any, ...]  # a _TensorForm, or the constant itself
    nest: Any  # the structure, with the number of the leaf in each leaf's place


class Outgoing:
    """Sends to one peer; holds every tensor until the peer has it.

    Args:
        stage: that the peer runs, where its rank is not its stage.
    """

    def __init__(self, channel: Channel, peer: int, stage: int | None = None) -> None:
        self._channel, self._peer = channel, peer
        self._stage = peer if stage is None else stage
        self._form: _Form | None = None
        self._under_way: deque[list[tuple[Pending, Tensor]]] = deque()

    def send(self, leaves: list[Any], spec: TreeSpec) -> None:
        """
        Raises:
            RuntimeError: the form differs from the first message's.
        """
        form = _Form(tuple(_form(leaf) for leaf in leaves), tree_unflatten(range(len(leaves)), spec))
        message: list[tuple[Pending, Tensor]] = []
        if self._form is None:
            self._form = form
            packed = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
            message += [self._start(torch.tensor([packed.numel()]), _LENGTH), self._start(packed, _FORM)]
        if form != self._form:
            raise RuntimeError(
                f"pipeline: what goes to stage {self._stage} changed from {self._form.leaves} to {form.leaves}; "
                f"want micro-batches of one shape and dtype (drop the last incomplete batch, or pad it; enter autocast "
                f"around every step alike, or around none)"
            )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        message += [self._start(tensor.detach(), _LEAVES + place) for place, tensor in enumerate(tensors)]
        self._under_way.append(message)

    def wait(self, keep: int = 0) -> None:
        """Waits for the oldest messages until at most `keep` are under way."""
        while len(self._under_way) > keep:
            for pending, _ in self._under_way.popleft():
                pending.wait()

    def _start(self, tensor: Tensor, tag: int) -> tuple[Pending, Tensor]:
        whole = tensor.contiguous()
        return self._channel.send(whole, self._peer, tag), whole


class Incoming:
    """Receives from one peer, on `device`: `post` as early as a message is certain, `take` when it is needed."""

    def __init__(self, channel: Channel, peer: int, device: torch.device) -> None:
        self._channel, self._peer, self._device = channel, peer, device
        self._form: _Form | None = None
        self._length: tuple[Pending, Tensor] | None = None
        self._expected = 0  # posted while the form was still unknown
        self._posted: deque[list[tuple[Pending, Tensor]]] = deque()

    def post(self) -> None:
        """One more message will come."""
        if self._form is not None:
            self._posted.append(self._post_leaves(self._form))
            return
        self._expected += 1
        if self._length is None:
            self._length = self._start(torch.empty(1, dtype=torch.int64), _LENGTH)

    def take(self) -> tuple[list[Any], TreeSpec]:
        """The leaves of the oldest message posted; tensors that asked for a gradient on the other side ask here."""
        form = self._form or self._learn_form()
        tensors = []
        for pending, tensor in self._posted.popleft():
            pending.wait()
            tensors.append(tensor)
        arrived = iter(tensors)
        leaves = [
            next(arrived).requires_grad_(leaf.asks) if isinstance(leaf, _TensorForm) else leaf for leaf in form.leaves
        ]
        return leaves, tree_flatten(form.nest)[1]

    def _learn_form(self) -> _Form:
        assert self._length is not None, "take before post"
        pending, length = self._length
        pending.wait()
        pending, packed = self._start(torch.empty(int(length), dtype=torch.uint8), _FORM)
        pending.wait()
        form: _Form = pickle.loads(packed.numpy().tobytes())
        self._form = form
        self._posted.extend(self._post_leaves(form) for _ in range(self._expected))
        return form

    def _post_leaves(self, form: _Form) -> list[tuple[Pending, Tensor]]:
        tensors = [leaf for leaf in form.leaves if isinstance(leaf, _TensorForm)]
        return [
            self._start(torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device), _LEAVES + place)
            for place, leaf in enumerate(tensors)
        ]

    def _start(self, into: Tensor, tag: int) -> tuple[Pending, Tensor]:
        return self._channel.receive(into, self._peer, tag), into


def _form(leaf: Any) -> Any:
    return _TensorForm(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
