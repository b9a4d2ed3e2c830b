"""Messages of one rank on the groups that transport gives them; in debug mode each is compared by its receiver.

With `check_order` a note goes ahead of every message: what it is, which in its row, its dtype and shape. The receiver
makes room for the message itself only when the note says what it expects, since one of another size would bring the
connection down without a word.
"""

import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.facts.collectives import Message, Send

__all__ = ["Messages", "OutOfOrder"]

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
