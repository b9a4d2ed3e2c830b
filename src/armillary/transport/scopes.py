"""Requests under names, over scopes and channels, and joined into one message where they leave together.

A scope is the ranks that a request concerns. Nodes of one rank open no groups: a node is then this rank alone, a rail
is the whole world. Along an axis that nobody has opened a rank is alone.

Messages of one sender, receiver and route arrive in order. Gloo needs (torch 2.13) that a receive is posted before it
is needed, and that a sent tensor is not changed before its wait. A send is waited for only when the receive is certain
to have been posted, and nothing is ever polled.

Several all-to-alls that leave at the same moment travel as one (`coalesced`): a message costs a processor as much as
many kilobytes do. The price is a copy of the payload on either side. Source: Parallax (EuroSys 2019) fuses small dense
gradients so; here the rows of several tables.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from armillary.exchanges.parcel import RankInfo
from armillary.plans.requests import AllToAll, Message, Request, Scope

__all__ = [
    "Channel",
    "Groups",
    "Pending",
    "Requests",
    "Stretch",
    "Stretches",
    "can_coalesce",
    "coalesced",
    "group_of",
    "named",
    "parted",
    "place_in",
]

Groups = Mapping[tuple[Scope, str], tuple[Any, RankInfo]]  # by scope and device


def group_of(groups: Groups, scope: Scope, tensor: Tensor) -> Any:
    """Tensors of a device without a group of its own travel by the host's."""
    if scope == "rail" and ("rail", "cpu") not in groups:
        scope = "world"
    device = tensor.device.type if (scope, tensor.device.type) in groups else "cpu"
    return groups[scope, device][0]


def place_in(groups: Groups, request: Request) -> RankInfo:
    """This rank's, among those that the request concerns."""
    if (request.scope, "cpu") not in groups:
        return groups["world", "cpu"][1] if request.scope == "rail" else RankInfo(0, 1)
    return groups[request.scope, "cpu"][1]


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Returns when the message has arrived (receive) or the tensor may be changed again (send)."""


class Channel(Protocol):
    """This process's connection to its peers."""

    def post(self, message: Message) -> Pending:
        """Starts to send a contiguous tensor, or to receive into one of the right shape and dtype."""


class Requests(Protocol):
    """This process's connection to all of its peers."""

    def start(self, request: Request, label: str) -> Callable[[], Any]:
        """Sends a request on its way; what is returned waits for the answer."""


class Stretch(NamedTuple):
    """What was done without a wait, and then how long an answer of that label was waited for; none at the end."""

    own_seconds: float
    label: str = ""
    waited_seconds: float = 0.0


class Stretches:
    """Off until `begin`, off again after `end`. Waits of other threads hold nobody up."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._answered = 0.0
        self._found: list[Stretch] = []

    def begin(self) -> None:
        self._thread, self._answered, self._found = threading.get_ident(), time.perf_counter(), []

    def end(self) -> None:
        self._thread = None

    def take(self) -> tuple[Stretch, ...]:
        """Those since `begin` or the last `take`; the last one ends now."""
        now = time.perf_counter()
        taken = (*self._found, Stretch(now - self._answered))
        self._answered, self._found = now, []
        return taken

    @contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """Around a wait for an answer."""
        asked = time.perf_counter()
        yield
        if self._thread == threading.get_ident():
            now = time.perf_counter()
            self._found.append(Stretch(asked - self._answered, label, now - asked))
            self._answered = now


def can_coalesce(requests: Sequence[Request]) -> bool:
    """Whether these are all-to-alls among the same ranks and on one device, and more than one."""
    kinds = {(type(request), request.scope, request.tensor.device) for request in requests}
    return len(requests) > 1 and len(kinds) == 1 and isinstance(requests[0], AllToAll)


def coalesced(requests: Sequence[AllToAll]) -> AllToAll:
    """One request, in which the pieces for each rank stand one after another in the order of the requests."""
    sent, received = _sizes(requests, "send"), _sizes(requests, "receive")
    pieces = [_bytes_of(one.tensor).split_with_sizes(sizes) for one, sizes in zip(requests, sent, strict=True)]
    together = [piece for of_a_rank in zip(*pieces, strict=True) for piece in of_a_rank]
    send, receive = (tuple(map(sum, zip(*lists, strict=True))) for lists in (sent, received))
    return AllToAll(torch.cat(together), send, receive, requests[0].scope)


def parted(requests: Sequence[AllToAll], answer: Tensor) -> list[Tensor]:
    """What each of the requests would have been answered alone.

    Args:
        answer: (bytes,) uint8, that to `coalesced` of the same requests.
    """
    received = _sizes(requests, "receive")
    pieces = answer.split_with_sizes([size for of_a_rank in zip(*received, strict=True) for size in of_a_rank])
    found = []
    for number, one in enumerate(requests):
        mine = torch.cat(pieces[number :: len(requests)])  # a tensor of its own: views of a type want aligned bytes
        found.append(mine.view(one.tensor.dtype).view(sum(one.receive), *one.tensor.shape[1:]))
    return found


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _sizes(requests: Sequence[AllToAll], side: str) -> list[list[int]]:
    """Of every request, the bytes for or from each rank."""
    found = []
    for one in requests:
        row_bytes = one.tensor.element_size() * math.prod(one.tensor.shape[1:])
        found.append([count * row_bytes for count in getattr(one, side)])
    return found


def named(what: str) -> AbstractContextManager[Any]:
    """Around what a profiler is to show."""
    is_watched = torch._C._autograd._profiler_enabled()
    return torch.profiler.record_function(f"armillary::{what}") if is_watched else nullcontext()
