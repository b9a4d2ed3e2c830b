"""Requests under names, over scopes and channels; joined where they leave together, and compared between ranks.

A scope is the ranks that a request concerns. Nodes of one rank open no groups: a node is then this rank alone, a rail
is the whole world. Along an axis that nobody has opened a rank is alone.

Messages of one sender, receiver and route arrive in order. Gloo needs (torch 2.13) that a receive is posted before it
is needed, and that a sent tensor is not changed before its wait. A send is waited for only when the receive is certain
to have been posted, and nothing is ever polled.

Several all-to-alls that leave at the same moment travel as one (`coalesced`): a message costs a processor as much as
many kilobytes do. The price is a copy of the payload on either side. Source: Parallax (EuroSys 2019) fuses small dense
gradients so; here the rows of several tables.

A job whose ranks ask for different things hangs, mixes up answers, or is aborted by the backend without a helpful word.
With `check_order` every request is compared before it is made (design law 8): the same requests in the same order,
splits that add up. Numbers are compared; words only travel when those differ. A note goes ahead of every message: what
it is, which in its row, its dtype and shape. The receiver makes room only when the note says what it expects, since a
message of another size would bring the connection down.

`shared_wait` lets several threads have one answer, since a second wait for one of gloo's receives never ends.
"""

import math
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from armillary.plans.parcel import RankInfo
from armillary.plans.requests import AllToAll, Message, Request, Scope, Send

__all__ = [
    "AskedRequest",
    "Channel",
    "Groups",
    "Messages",
    "OutOfOrder",
    "Pending",
    "Requests",
    "Stretch",
    "Stretches",
    "asked",
    "can_coalesce",
    "coalesced",
    "disagreement",
    "group_of",
    "in_numbers",
    "is_doubtful",
    "named",
    "parted",
    "place_in",
    "shared_wait",
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


def shared_wait(wait: Callable[[], Any], waiting: Callable[[], AbstractContextManager[None]]) -> Callable[[], Any]:
    """waiting: entered by who comes while another waits."""
    lock, found, errors = threading.Lock(), list[Any](), list[BaseException]()

    def enter() -> None:
        if found or errors:
            return
        try:
            found.append(wait())
        except BaseException as error:  # raised for everyone who waits
            errors.append(error)

    def answer() -> Any:
        if not lock.acquire(blocking=False):
            with waiting():
                lock.acquire()
        try:
            enter()
        finally:
            lock.release()
        if errors:
            raise errors[0]
        return found[0]

    return answer


NOTE_BYTES = 256


class OutOfOrder(Exception):
    """Two ranks mean different messages; it names both ranks and both messages."""


@dataclass(frozen=True, eq=False)
class _Noted:
    """A message on its way, and the note ahead of it, which is read late."""

    work: Any
    note_work: Any
    note: Tensor

    def wait(self) -> None:
        self.note_work.wait()
        self.work.wait()


@dataclass(eq=False)
class _Expected:
    """A receive whose note is awaited. start: makes room for the message. row: of those of its peer and route."""

    want: str
    peer: int
    rank: int
    note_work: Any
    note: Tensor
    start: Callable[[], Any]
    row: "deque[_Expected]"
    work: Any = None

    def wait(self) -> None:
        """
        Raises:
            OutOfOrder: the peer sends something else.
        """
        while self.work is None:
            self.row.popleft().compare()
        self.work.wait()

    def compare(self) -> None:
        self.note_work.wait()
        sent = bytes(self.note.tolist()).rstrip(b"\0").decode(errors="replace")
        if sent != self.want:
            raise OutOfOrder(
                f"messages out of order: rank {self.peer} sends {sent}, rank {self.rank} wants {self.want} from it"
            )
        self.work = self.start()


class Messages:
    """
    Args:
        lane: of a tensor and whether it goes to a higher rank, the group that carries it.
    """

    def __init__(self, rank: int, lane: Callable[[Tensor, bool], Any], check_order: bool) -> None:
        self._rank, self._lane, self._is_checked = rank, lane, check_order
        self._sent: dict[tuple[int, str], int] = defaultdict(int)  # by peer and route
        self._rows: dict[tuple[int, str], deque[_Expected]] = defaultdict(deque)
        self._wanted: dict[tuple[int, str], int] = defaultdict(int)

    def start(self, message: Message, tensor: Tensor) -> Any:
        """Of the message's contiguous tensor; a handle with `wait`."""
        # Routes of their own are told apart by tags, which gloo alone heeds; the odd ones are those of notes.
        peer, tag = message.peer, zlib.crc32(message.route.encode()) // 4 * 2 if message.route else 0
        is_up = (self._rank < peer) == isinstance(message, Send)
        lane = self._lane(tensor, is_up)
        carry = lane.send if isinstance(message, Send) else lane.recv
        start = partial(carry, [tensor], peer, tag)
        if not self._is_checked:
            return start()
        key = peer, message.route
        if isinstance(message, Send):
            self._sent[key] += 1
            note = _note(_text(self._sent[key], message, tensor))
            note_work = self._lane(note, is_up).send([note], peer, tag + 1)
            return _Noted(start(), note_work, note)
        self._wanted[key] += 1
        want, note, row = _text(self._wanted[key], message, tensor), _note(""), self._rows[key]
        note_work = self._lane(note, is_up).recv([note], peer, tag + 1)
        row.append(_Expected(want, peer, self._rank, note_work, note, start, row))
        return row[-1]


def _text(number: int, message: Message, tensor: Tensor) -> str:
    which = f" ({message.at})" if message.at else ""
    text = f"#{number} {message.what}{which}, {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return text.encode()[:NOTE_BYTES].decode(errors="ignore")


def _note(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode().ljust(NOTE_BYTES, b"\0")), dtype=torch.uint8)


class AskedRequest(NamedTuple):
    """A request as other ranks see it. send, receive: rows for and from each rank of the scope; empty if not uneven."""

    number: int
    text: str
    send: tuple[int, ...]
    receive: tuple[int, ...]


def asked(number: int, label: str, request: Request) -> AskedRequest:
    """The `number`-th request of this rank, made for group `label`."""
    text = f"{label}: {type(request).__name__} in {request.scope}, {request.tensor.dtype}"
    if isinstance(request, AllToAll):
        return AskedRequest(number, f"{text}, rows of {tuple(request.tensor.shape[1:])}", request.send, request.receive)
    return AskedRequest(number, f"{text}, {tuple(request.tensor.shape)}", (), ())


def in_numbers(mine: AskedRequest, ranks: int) -> Tensor:
    """1 + 2 * ranks integers: a hash of what is asked, then the rows for and from each rank; zeros where it is even."""
    digest = blake2b(f"{mine.number} {mine.text}".encode(), digest_size=8).digest()
    rows = [*mine.send, *[0] * (ranks - len(mine.send)), *mine.receive, *[0] * (ranks - len(mine.receive))]
    return torch.tensor([int.from_bytes(digest, signed=True), *rows])


def is_doubtful(everyones: Tensor, scopes: Sequence[Sequence[int]]) -> bool:
    """Whether the ranks' rows of `in_numbers` do not fit together: words must say why. The same on every rank."""
    hashes, ranks = everyones[:, 0], len(everyones)
    send, receive = everyones[:, 1 : 1 + ranks], everyones[:, 1 + ranks :]
    places = [list(ones) for ones in scopes]
    is_fit = all(torch.equal(send[ones, : len(ones)], receive[ones, : len(ones)].T) for ones in places)
    return not (is_fit and bool((hashes == hashes[0]).all()))


def disagreement(everyones: Sequence[AskedRequest], scopes: Sequence[Sequence[int]], names: Sequence[int] = ()) -> str:
    """What does not fit, empty if all does.

    Args:
        everyones: one per rank that asks. scopes: places in it, of each group that the request joins. names: ranks of
            the world that these are; the same, if not said.
    """
    names = names or range(len(everyones))
    if len({(mine.number, mine.text) for mine in everyones}) > 1:
        return "; ".join(f"rank {names[place]} asks #{mine.number} {mine.text}" for place, mine in enumerate(everyones))
    if not everyones[0].send:
        return ""
    for ranks in scopes:
        for place, rank in enumerate(ranks):
            for other, peer in enumerate(ranks):
                sent, wanted = everyones[rank].send[other], everyones[peer].receive[place]
                if sent != wanted:
                    return (
                        f"rank {names[rank]} sends {sent} rows to rank {names[peer]}, which expects {wanted}, in #"
                        f"{everyones[rank].number} {everyones[rank].text}"
                    )
    return ""
