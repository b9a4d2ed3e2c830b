"""Nests of tensors between this process and its peers, in the one order that sender and receiver agree on.

What is to come is said beforehand (`expect`, in the order of the sends), so that room is made early and a message can
move while this process computes. The first letter of an edge brings its form along; after that only numbers travel. One
of another form is refused on the sending side.

Nothing can be expected of a peer behind a letter whose form is not known yet: the receives of its tensors come first.
"""

from collections import defaultdict, deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from armillary.facts.collectives import Receive, Send
from armillary.runtime.channel import Channel, Pending
from armillary.runtime.form import Form, TensorForm, form_of
from armillary.schedules.instruction import Letter

__all__ = ["Mailbox"]

LENGTH, FORM = "length of the form of ", "form of "  # what goes ahead of an edge's first letter

Parts = list[tuple[Pending, Tensor]]


class _Line(NamedTuple):
    """A peer, and the route where routes are apart."""

    peer: int
    route: str


class Mailbox:
    """
    Args:
        device: on which letters arrive.
        one_queue: whether messages to a peer wait for those of the peer that are expected before them.
        is_lowered: whether `expect` is called in the order of the sends, over all that comes from a peer; if not, it is
            for each edge.
    """

    def __init__(
        self, channel: Channel, device: torch.device, one_queue: bool = False, is_lowered: bool = True
    ) -> None:
        self._channel, self._device = channel, device
        self._one_queue, self._is_lowered = one_queue, is_lowered
        self._sent_forms: dict[tuple[int, str], Form] = {}  # by peer and edge
        self._forms: dict[tuple[int, str], Form] = {}
        self._expected: dict[_Line, deque[Letter]] = defaultdict(deque)  # for which no room is made yet
        self._lengths: dict[_Line, tuple[Pending, Tensor]] = {}  # of the form of the first of them
        self._line_of: dict[Letter, _Line] = {}  # of all that is to come
        self._posted: dict[Letter, Parts] = {}
        self._under_way: dict[Letter, Parts] = {}

    def send(self, letter: Letter, peer: int, leaves: list[Any], spec: TreeSpec) -> None:
        """Starts a letter; holds its tensors until `over`.

        Raises:
            RuntimeError: its form differs from that of the edge's first. TypeError: a form that text cannot say.
        """
        line, edge = self._line(letter, peer), (peer, letter.edge)
        while self._one_queue and self._expected[line]:
            self._learn(line)
        form, message = form_of(leaves, spec), list[tuple[Pending, Tensor]]()
        if edge not in self._sent_forms:
            text = torch.frombuffer(bytearray(form.to_json().encode()), dtype=torch.uint8)
            message += [
                self._start(letter, line, torch.tensor([text.numel()], dtype=torch.int32), LENGTH),
                self._start(letter, line, text, FORM),
            ]
            self._sent_forms[edge] = form
        if form != self._sent_forms[edge]:
            raise RuntimeError(
                f"stages: {letter.edge} for rank {peer} changed from {self._sent_forms[edge].leaves} to {form.leaves}; "
                f"want micro-batches of one shape and dtype (drop the last incomplete batch, or pad it; enter autocast "
                f"around every step alike, or around none)"
            )
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        self._under_way[letter] = message + [self._start(letter, line, tensor) for tensor in tensors]

    def over(self, letter: Letter) -> None:
        """Waits until the peer has a letter, and lets go of its tensors."""
        for pending, _ in self._under_way.pop(letter):
            pending.wait()

    def all_over(self) -> None:
        """The same for everything sent so far."""
        for letter in list(self._under_way):
            self.over(letter)

    def expect(self, letter: Letter, peer: int) -> None:
        """Makes room for the next letter that the peer sends."""
        line = self._line(letter, peer)
        self._line_of[letter] = line
        self._expected[line].append(letter)
        self._post(line)

    def take(self, letter: Letter) -> tuple[list[Any], TreeSpec]:
        """Waits for an expected letter. Tensors that asked for a gradient on the other side ask here."""
        line = self._line_of.pop(letter)
        while letter not in self._posted:
            self._learn(line)
        tensors = []
        for pending, tensor in self._posted.pop(letter):
            pending.wait()
            tensors.append(tensor)
        form, arrived = self._forms[line.peer, letter.edge], iter(tensors)
        leaves = [
            next(arrived).requires_grad_(leaf.asks) if isinstance(leaf, TensorForm) else leaf for leaf in form.leaves
        ]
        return leaves, form.spec

    def _line(self, letter: Letter, peer: int) -> _Line:
        return _Line(peer, "" if self._is_lowered else letter.edge)

    def _post(self, line: _Line) -> None:
        """Makes room for what is expected, as far as forms are known."""
        expected = self._expected[line]
        while expected and (line.peer, expected[0].edge) in self._forms:
            letter = expected.popleft()
            room = [
                torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device)
                for leaf in self._forms[line.peer, letter.edge].tensors
            ]
            self._posted[letter] = [self._receive(letter, line, part) for part in room]
        if expected and line not in self._lengths:
            self._lengths[line] = self._receive(expected[0], line, torch.empty(1, dtype=torch.int32), LENGTH)

    def _learn(self, line: _Line) -> None:
        """Waits for the form of the first letter that no room is made for."""
        pending, length = self._lengths.pop(line)
        pending.wait()
        letter = self._expected[line][0]
        pending, text = self._receive(letter, line, torch.empty(int(length), dtype=torch.uint8), FORM)
        pending.wait()
        self._forms[line.peer, letter.edge] = Form.from_json(text.numpy().tobytes().decode())
        self._post(line)

    def _start(self, letter: Letter, line: _Line, tensor: Tensor, part: str = "") -> tuple[Pending, Tensor]:
        whole = tensor.contiguous()
        return self._channel.post(Send(part + letter.edge, line.peer, whole, line.route, letter.at)), whole

    def _receive(self, letter: Letter, line: _Line, into: Tensor, part: str = "") -> tuple[Pending, Tensor]:
        return self._channel.post(Receive(part + letter.edge, line.peer, into, line.route, letter.at)), into
