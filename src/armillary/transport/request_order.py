"""Whether what the ranks ask for fits together: the same requests in the same order, splits that add up.

A job that goes wrong here hangs, mixes up answers, or is aborted by the backend without a helpful word. With
`check_order` every request is compared before it is made (design law 8). Numbers are compared; words only travel when
those differ. A note goes ahead of every message: what it is, which in its row, its dtype and shape. The receiver makes
room only when the note says what it expects, since a message of another size would bring the connection down.
"""

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.plans.requests import AllToAll, Message, Request, Send

__all__ = ["AskedRequest", "Messages", "OutOfOrder", "asked", "disagreement", "in_numbers", "is_doubtful"]

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
