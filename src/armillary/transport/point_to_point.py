"""Nests of tensors between this process and its peers, in the one order that sender and receiver agree on.

What is to come is said beforehand (`expect`, in the order of the sends), so that room is made early and a message can
move while this process computes. The first message of an edge brings its form along, as JSON, so that what arrives is
data and is never executed. After that only numbers travel, and one of another form is refused on the sending side.

How the tensors of a message are written is said with it (`Writing`). Where the data decide how long that is, the
lengths go ahead. Nothing can be expected of a peer behind a message whose form or lengths are not known yet.
"""

import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from armillary.plans.requests import Message, Receive, Request, Send, sent_bytes
from armillary.schedules.instructions import StageMessage
from armillary.transport.requests import Channel, Pending
from armillary.transport.transport import Transport

__all__ = ["AS_IT_IS", "CountedChannel", "Form", "Mailbox", "Room", "TensorForm", "Writing", "form_of"]

CONSTANTS = (bool, int, float, str, type(None))


class TensorForm(NamedTuple):
    """asks: for a gradient. is_coded: whether a codec of the edge writes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    asks: bool
    is_coded: bool = False


@dataclass(frozen=True)
class Form:
    """leaves: a `TensorForm`, or the constant itself."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @property
    def tensors(self) -> list[TensorForm]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def to_json(self) -> str:
        """
        Raises:
            TypeError: a leaf or a container that JSON cannot say; the message says what can.
        """
        leaves = [
            {
                "shape": leaf.shape,
                "dtype": str(leaf.dtype).removeprefix("torch."),
                "asks": leaf.asks,
                **({"coded": True} if leaf.is_coded else {}),
            }
            if isinstance(leaf, TensorForm)
            else {"is": _constant(leaf)}
            for leaf in self.leaves
        ]
        return json.dumps({"leaves": leaves, **_structure(self.spec)})

    @classmethod
    def from_json(cls, text: str) -> "Form":
        fields = json.loads(text)
        leaves = tuple(
            leaf["is"]
            if "is" in leaf
            else TensorForm(tuple(leaf["shape"]), getattr(torch, leaf["dtype"]), leaf["asks"], leaf.get("coded", False))
            for leaf in fields["leaves"]
        )
        if "spec" in fields:
            return cls(leaves, treespec_loads(fields["spec"]))
        return cls(leaves, tree_flatten(_built(fields["nest"]))[1])


def form_of(leaves: list[Any], spec: TreeSpec) -> Form:
    """Of a nest taken apart."""
    return Form(
        tuple(
            TensorForm(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ),
        spec,
    )


def _constant(leaf: Any) -> Any:
    if type(leaf) not in CONSTANTS:
        raise TypeError(
            f"stages: a {type(leaf).__name__} cannot cross from one process to another; want tensors, numbers, text, "
            f"booleans or None in tuples, lists and dicts"
        )
    return leaf


def _structure(spec: TreeSpec) -> dict[str, Any]:
    """As torch writes it; torch has no words for named tuples, so these go by the name of their class."""
    try:
        return {"spec": treespec_dumps(spec)}
    except NotImplementedError:
        return {"nest": _named(tree_unflatten(range(spec.num_leaves), spec))}


def _named(nest: Any) -> Any:
    match nest:
        case int():
            return nest
        case dict():
            return {"dict": [[key, _named(part)] for key, part in nest.items()]}
        case list():
            return {"list": [_named(part) for part in nest]}
        case tuple() if hasattr(nest, "_fields"):
            kind = type(nest)
            return {"module": kind.__module__, "class": kind.__qualname__, "parts": [_named(part) for part in nest]}
        case tuple():
            return {"tuple": [_named(part) for part in nest]}
    raise TypeError(
        f"stages: a {type(nest).__name__} cannot cross from one process to another beside a named tuple; want tuples, "
        f"lists and dicts"
    )


def _built(nest: Any) -> Any:
    if isinstance(nest, int):
        return nest
    if "dict" in nest:
        return {key: _built(part) for key, part in nest["dict"]}
    if "list" in nest:
        return [_built(part) for part in nest["list"]]
    if "tuple" in nest:
        return tuple(_built(part) for part in nest["tuple"])
    kind: Any = sys.modules.get(nest["module"])
    for name in nest["class"].split("."):
        kind = getattr(kind, name, None)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise RuntimeError(
            f"stages: another process sent a named tuple {nest['module']}.{nest['class']}, which is none here; define "
            f"it at the top of a module that every process imports"
        )
    return kind(*(_built(part) for part in nest["parts"]))


@dataclass(eq=False)
class CountedChannel:
    """sent: bytes of the tensors, without the network's headers, counted when they set out. waited: seconds that are
    not hidden behind compute."""

    transport: Transport
    sent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waited: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def post(self, message: Message) -> Pending:
        place = self.transport.place
        self.sent[message.what] += sent_bytes(message, place.workers, place.rank)
        return _Timed(self.transport.post(message), self, message.what)

    def start(self, request: Request, label: str) -> Callable[[], Any]:
        place = self.transport.place_in(request)
        self.sent[label] += sent_bytes(request, place.workers, place.rank)
        wait = self.transport.start(request, label)

        def timed() -> Any:
            began = time.perf_counter()
            answer = wait()
            self.waited[label] += time.perf_counter() - began
            return answer

        return timed

    def take(self) -> dict[str, tuple[float, float]]:
        """By label, bytes and seconds since the last call."""
        labels = dict.fromkeys((*self.sent, *self.waited))
        taken = {label: (self.sent[label], self.waited[label]) for label in labels}
        self.sent.clear()
        self.waited.clear()
        return taken


@dataclass(eq=False)
class _Timed:
    pending: Pending
    channel: CountedChannel = field(repr=False)
    label: str = ""

    def wait(self) -> object:
        began = time.perf_counter()
        answer = self.pending.wait()
        self.channel.waited[self.label] += time.perf_counter() - began
        return answer


LENGTH, FORM = "length of the form of ", "form of "  # what goes ahead of an edge's first message
LENGTHS = "lengths of "  # ahead of every message that needs them

Parts = list[tuple[Pending, Tensor]]


class Room(NamedTuple):
    """What a tensor on the wire needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Writing(Protocol):
    """How the tensors of one message are written, on either side."""

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
        device: on which messages arrive.
        one_queue: whether messages to a peer wait for those of the peer that are expected before them.
    """

    def __init__(self, channel: Channel, device: torch.device, one_queue: bool = False) -> None:
        self._channel, self._device, self._one_queue = channel, device, one_queue
        self._sent_forms: dict[tuple[int, str], Form] = {}  # by peer and edge
        self._forms: dict[tuple[int, str], Form] = {}
        self._expected: dict[int, deque[StageMessage]] = defaultdict(deque)  # for which no room is made yet
        self._lengths: dict[int, tuple[Pending, Tensor]] = {}  # of the first of them: of its form, or of its tensors
        self._writing: dict[StageMessage, Writing] = {}  # of all that is to come
        self._peer_of: dict[StageMessage, int] = {}  # of all that is to come
        self._posted: dict[StageMessage, Parts] = {}
        self._under_way: dict[StageMessage, Parts] = {}

    def send(
        self, message: StageMessage, peer: int, leaves: list[Any], spec: TreeSpec, writing: Writing = AS_IT_IS
    ) -> None:
        """Starts a message; holds its tensors until `over`.

        Raises:
            RuntimeError: its form differs from that of the edge's first. TypeError: a form that text cannot say.
        """
        edge = peer, message.edge
        while self._one_queue and self._expected[peer]:
            self._learn(peer)
        form, parts = writing.form(leaves, spec), list[tuple[Pending, Tensor]]()
        if edge not in self._sent_forms:
            text = torch.frombuffer(bytearray(form.to_json().encode()), dtype=torch.uint8)
            parts += [
                self._start(message, peer, torch.tensor([text.numel()], dtype=torch.int32), LENGTH),
                self._start(message, peer, text, FORM),
            ]
            self._sent_forms[edge] = form
        if form != self._sent_forms[edge]:
            raise RuntimeError(
                f"stages: {message.edge} for rank {peer} changed from {self._sent_forms[edge].leaves} to "
                f"{form.leaves}; want micro-batches of one shape and dtype (drop the last incomplete batch, or pad it; "
                f"enter autocast around every step alike, or around none)"
            )
        written = writing.write(form, [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)])
        if varying := writing.varying(form):
            lengths = torch.tensor([written[number].numel() for number in varying])
            parts.append(self._start(message, peer, lengths, LENGTHS))
        self._under_way[message] = parts + [self._start(message, peer, tensor) for tensor in written]

    def over(self, message: StageMessage) -> None:
        """Waits until the peer has a message, and lets go of its tensors."""
        for pending, _ in self._under_way.pop(message):
            pending.wait()

    def expect(self, message: StageMessage, peer: int, writing: Writing = AS_IT_IS) -> None:
        """Makes room for the next message that the peer sends."""
        self._peer_of[message], self._writing[message] = peer, writing
        self._expected[peer].append(message)
        self._post(peer)

    def take(self, message: StageMessage) -> tuple[list[Any], TreeSpec]:
        """Waits for an expected message. Tensors that asked for a gradient on the other side ask here."""
        peer = self._peer_of.pop(message)
        while message not in self._posted:
            self._learn(peer)
        tensors = []
        for pending, tensor in self._posted.pop(message):
            pending.wait()
            tensors.append(tensor)
        form = self._forms[peer, message.edge]
        arrived = iter(self._writing.pop(message).read(form, tensors))
        leaves = [
            next(arrived).requires_grad_(leaf.asks) if isinstance(leaf, TensorForm) else leaf for leaf in form.leaves
        ]
        return leaves, form.spec

    def held(self) -> Iterator[Tensor]:
        """Room made for messages that come, and what was sent and is not over yet."""
        for parts in (*self._posted.values(), *self._under_way.values()):
            yield from (tensor for _, tensor in parts)

    def _post(self, peer: int) -> None:
        """Makes room for what is expected, as far as forms and lengths are known."""
        expected = self._expected[peer]
        while expected and peer not in self._lengths:
            message = expected[0]
            form = self._forms.get((peer, message.edge))
            if form is None:
                self._lengths[peer] = self._receive(message, peer, torch.empty(1, dtype=torch.int32), LENGTH)
            elif varying := self._writing[message].varying(form):
                lengths = torch.empty(len(varying), dtype=torch.int64)
                self._lengths[peer] = self._receive(message, peer, lengths, LENGTHS)
            else:
                self._make_room(peer, form, [])

    def _make_room(self, peer: int, form: Form, lengths: list[int]) -> None:
        """For the first of what is expected."""
        message = self._expected[peer].popleft()
        rooms = self._writing[message].room(form, lengths)
        parts = [torch.empty(room.shape, dtype=room.dtype, device=self._device) for room in rooms]
        self._posted[message] = [self._receive(message, peer, part) for part in parts]

    def _learn(self, peer: int) -> None:
        """Waits for the form or the lengths of the first message that no room is made for."""
        pending, lengths = self._lengths.pop(peer)
        pending.wait()
        message = self._expected[peer][0]
        form = self._forms.get((peer, message.edge))
        if form is None:
            pending, text = self._receive(message, peer, torch.empty(int(lengths), dtype=torch.uint8), FORM)
            pending.wait()
            self._forms[peer, message.edge] = Form.from_json(text.numpy().tobytes().decode())
        else:
            self._make_room(peer, form, lengths.tolist())
        self._post(peer)

    def _start(self, message: StageMessage, peer: int, tensor: Tensor, part: str = "") -> tuple[Pending, Tensor]:
        whole = tensor.contiguous()
        return self._channel.post(Send(part + message.edge, peer, whole, "", message.at)), whole

    def _receive(self, message: StageMessage, peer: int, into: Tensor, part: str = "") -> tuple[Pending, Tensor]:
        return self._channel.post(Receive(part + message.edge, peer, into, "", message.at)), into
