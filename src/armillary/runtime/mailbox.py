"""Nests of tensors between this process and its peers, in the one order that sender and receiver agree on.

What is to come is said beforehand (`expect`, in the order of the sends), so that room is made early and a message can
move while this process computes. The first letter of an edge brings its form along; after that only numbers travel. One
of another form is refused on the sending side.

How the tensors of a letter are written is said with it (`Writing`). Where the data decide how long that is, the lengths
go ahead. Nothing can be expected of a peer behind a letter whose form or lengths are not known yet: the receives of its
tensors come first.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from armillary.facts.collectives import Receive, Send
from armillary.runtime.channel import Channel, Pending
from armillary.runtime.form import Form, TensorForm, form_of
from armillary.schedules.instruction import Letter

__all__ = ["AS_IT_IS", "Mailbox", "Room", "Writing"]

LENGTH, FORM = "length of the form of ", "form of "  # what goes ahead of an edge's first letter
LENGTHS = "lengths of "  # ahead of every letter that needs them

Parts = list[tuple[Pending, Tensor]]


class Room(NamedTuple):
    """What a tensor on the wire needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Writing(Protocol):
    """How the tensors of one letter are written, on either side."""

    def form(self, leaves: list[Any], spec: TreeSpec) -> Form:
        """On the sending side."""

    def varying(self, form: Form) -> list[int]:
        """Which of the tensors, by number, are written in as many numbers as the data decide."""

    def write(self, form: Form, tensors: list[Tensor]) -> list[Tensor]:
        """One for each; those that vary have one dimension."""

    def room(self, form: Form, lengths: list[int]) -> list[Room]:
        """lengths: of those that vary."""

    def read(self, form: Form, written: list[Tensor]) -> list[Tensor]:
        """Undoes `write`."""


class _AsItIs:
    def form(self, leaves: list[Any], spec: TreeSpec) -> Form:
        return form_of(leaves, spec)

    def varying(self, form: Form) -> list[int]:
        return []

    def write(self, form: Form, tensors: list[Tensor]) -> list[Tensor]:
        return tensors

    def room(self, form: Form, lengths: list[int]) -> list[Room]:
        return [Room(leaf.shape, leaf.dtype) for leaf in form.tensors]

    def read(self, form: Form, written: list[Tensor]) -> list[Tensor]:
        return written


AS_IT_IS: Writing = _AsItIs()


class Mailbox:
    """
    Args:
        device: on which letters arrive.
        one_queue: whether messages to a peer wait for those of the peer that are expected before them.
    """

    def __init__(self, channel: Channel, device: torch.device, one_queue: bool = False) -> None:
        self._channel, self._device, self._one_queue = channel, device, one_queue
        self._sent_forms: dict[tuple[int, str], Form] = {}  # by peer and edge
        self._forms: dict[tuple[int, str], Form] = {}
        self._expected: dict[int, deque[Letter]] = defaultdict(deque)  # for which no room is made yet
        self._lengths: dict[int, tuple[Pending, Tensor]] = {}  # of the first of them: of its form, or of its tensors
        self._writing: dict[Letter, Writing] = {}  # of all that is to come
        self._peer_of: dict[Letter, int] = {}  # of all that is to come
        self._posted: dict[Letter, Parts] = {}
        self._under_way: dict[Letter, Parts] = {}

    def send(self, letter: Letter, peer: int, leaves: list[Any], spec: TreeSpec, writing: Writing = AS_IT_IS) -> None:
        """Starts a letter; holds its tensors until `over`.

        Raises:
            RuntimeError: its form differs from that of the edge's first. TypeError: a form that text cannot say.
        """
        edge = peer, letter.edge
        while self._one_queue and self._expected[peer]:
            self._learn(peer)
        form, message = writing.form(leaves, spec), list[tuple[Pending, Tensor]]()
        if edge not in self._sent_forms:
            text = torch.frombuffer(bytearray(form.to_json().encode()), dtype=torch.uint8)
            message += [
                self._start(letter, peer, torch.tensor([text.numel()], dtype=torch.int32), LENGTH),
                self._start(letter, peer, text, FORM),
            ]
            self._sent_forms[edge] = form
        if form != self._sent_forms[edge]:
            raise RuntimeError(
                f"stages: {letter.edge} for rank {peer} changed from {self._sent_forms[edge].leaves} to {form.leaves}; "
                f"want micro-batches of one shape and dtype (drop the last incomplete batch, or pad it; enter autocast "
                f"around every step alike, or around none)"
            )
        written = writing.write(form, [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)])
        if varying := writing.varying(form):
            lengths = torch.tensor([written[number].numel() for number in varying])
            message.append(self._start(letter, peer, lengths, LENGTHS))
        self._under_way[letter] = message + [self._start(letter, peer, tensor) for tensor in written]

    def over(self, letter: Letter) -> None:
        """Waits until the peer has a letter, and lets go of its tensors."""
        for pending, _ in self._under_way.pop(letter):
            pending.wait()

    def expect(self, letter: Letter, peer: int, writing: Writing = AS_IT_IS) -> None:
        """Makes room for the next letter that the peer sends."""
        self._peer_of[letter], self._writing[letter] = peer, writing
        self._expected[peer].append(letter)
        self._post(peer)

    def take(self, letter: Letter) -> tuple[list[Any], TreeSpec]:
        """Waits for an expected letter. Tensors that asked for a gradient on the other side ask here."""
        peer = self._peer_of.pop(letter)
        while letter not in self._posted:
            self._learn(peer)
        tensors = []
        for pending, tensor in self._posted.pop(letter):
            pending.wait()
            tensors.append(tensor)
        form = self._forms[peer, letter.edge]
        arrived = iter(self._writing.pop(letter).read(form, tensors))
        leaves = [
            next(arrived).requires_grad_(leaf.asks) if isinstance(leaf, TensorForm) else leaf for leaf in form.leaves
        ]
        return leaves, form.spec

    def held(self) -> Iterator[Tensor]:
        """Room made for letters that come, and what was sent and is not over yet."""
        for parts in (*self._posted.values(), *self._under_way.values()):
            yield from (tensor for _, tensor in parts)

    def _post(self, peer: int) -> None:
        """Makes room for what is expected, as far as forms and lengths are known."""
        expected = self._expected[peer]
        while expected and peer not in self._lengths:
            letter = expected[0]
            form = self._forms.get((peer, letter.edge))
            if form is None:
                self._lengths[peer] = self._receive(letter, peer, torch.empty(1, dtype=torch.int32), LENGTH)
            elif varying := self._writing[letter].varying(form):
                lengths = torch.empty(len(varying), dtype=torch.int64)
                self._lengths[peer] = self._receive(letter, peer, lengths, LENGTHS)
            else:
                self._make_room(peer, form, [])

    def _make_room(self, peer: int, form: Form, lengths: list[int]) -> None:
        """For the first of what is expected."""
        letter = self._expected[peer].popleft()
        rooms = self._writing[letter].room(form, lengths)
        parts = [torch.empty(room.shape, dtype=room.dtype, device=self._device) for room in rooms]
        self._posted[letter] = [self._receive(letter, peer, part) for part in parts]

    def _learn(self, peer: int) -> None:
        """Waits for the form or the lengths of the first letter that no room is made for."""
        pending, lengths = self._lengths.pop(peer)
        pending.wait()
        letter = self._expected[peer][0]
        form = self._forms.get((peer, letter.edge))
        if form is None:
            pending, text = self._receive(letter, peer, torch.empty(int(lengths), dtype=torch.uint8), FORM)
            pending.wait()
            self._forms[peer, letter.edge] = Form.from_json(text.numpy().tobytes().decode())
        else:
            self._make_room(peer, form, lengths.tolist())
        self._post(peer)

    def _start(self, letter: Letter, peer: int, tensor: Tensor, part: str = "") -> tuple[Pending, Tensor]:
        whole = tensor.contiguous()
        return self._channel.post(Send(part + letter.edge, peer, whole, "", letter.at)), whole

    def _receive(self, letter: Letter, peer: int, into: Tensor, part: str = "") -> tuple[Pending, Tensor]:
        return self._channel.post(Receive(part + letter.edge, peer, into, "", letter.at)), into
