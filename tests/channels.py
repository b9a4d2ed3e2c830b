"""Channels for tests: gloo between processes, and unkind ones between threads of one process."""

import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from armillary.plans import Message, Receive, Send
from side_by_side import side_by_side


class GlooChannel:
    """The default group's isend and irecv; counts what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []  # (peer, bytes)

    def post(self, message: Message) -> Any:
        tag = zlib.crc32(message.route.encode()) // 2 if message.route else 0
        if isinstance(message, Receive):
            return dist.irecv(message.into, message.peer, tag=tag)
        self.sent.append((message.peer, message.tensor.nbytes))
        return dist.isend(message.tensor, message.peer, tag=tag)


@dataclass(eq=False)
class _Posted:
    """A message that one thread has posted. wait: fails loudly where a real job would hang.

    over: it has moved, or nobody is left who could move it.
    """

    message: Message
    board: "Board"
    over: threading.Event = field(default_factory=threading.Event)
    is_lost: bool = False

    def wait(self) -> None:
        kind = "received" if isinstance(self.message, Send) else "sent"
        self.board.begin_wait(self)
        is_over = self.over.wait(self.board.timeout_seconds)
        assert is_over and not self.is_lost, f"{self.message.what}, {self.message.at}: never {kind}"


class Board:
    """Where threads meet: a message moves, and its tensor is read, when both sides have posted it.

    By gloo's rule the n-th send of a direction and route meets its n-th receive. By NCCL's, a thread works off its
    sends and receives with one peer in one queue: a message moves only when it heads the queues of both.

    Args:
        playing: threads that post. When all that are left wait, none of them waits longer: a hang takes no time.
    """

    def __init__(self, rule: str = "gloo", timeout_seconds: float = 20.0, playing: int = 0) -> None:
        self.rule, self.timeout_seconds, self.playing = rule, timeout_seconds, playing
        self.waited = set[_Posted]()
        self.queues: dict[Hashable, deque[_Posted]] = defaultdict(deque)
        self.lock = threading.Lock()

    def post(self, rank: int, message: Message) -> _Posted:
        posted = _Posted(message, self)
        is_send = isinstance(message, Send)
        with self.lock:
            mine = self.queues[self._row(rank, message.peer, is_send, message.route)]
            theirs = self.queues[self._row(message.peer, rank, not is_send, message.route)]
            mine.append(posted)
            while mine and theirs and isinstance(mine[0].message, Send) != isinstance(theirs[0].message, Send):
                pair = mine.popleft(), theirs.popleft()
                _move(*pair)
                self.waited.difference_update(pair)
        return posted

    def begin_wait(self, posted: _Posted) -> None:
        with self.lock:
            if not posted.over.is_set():
                self.waited.add(posted)
                self._end_if_stuck()

    def leave(self) -> None:
        """A thread posts no more."""
        with self.lock:
            self.playing -= 1
            self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        if len(self.waited) == self.playing:
            for one in self.waited:
                one.is_lost = True
                one.over.set()
            self.waited.clear()

    def _row(self, rank: int, peer: int, is_send: bool, route: str) -> Hashable:
        return (rank, peer) if self.rule == "nccl" else (rank, peer, is_send, route)


def _move(one: _Posted, other: _Posted) -> None:
    sent, room = (one.message, other.message) if isinstance(one.message, Send) else (other.message, one.message)
    assert isinstance(sent, Send) and isinstance(room, Receive)
    assert (sent.what, sent.at) == (room.what, room.at), f"{sent.what}, {sent.at} meets {room.what}, {room.at}"
    assert sent.tensor.shape == room.into.shape and sent.tensor.dtype == room.into.dtype
    room.into.detach().copy_(sent.tensor)
    one.over.set()
    other.over.set()


class ThreadChannel:
    """One thread's connection to the board."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank
        self.sent: list[tuple[int, str, int]] = []  # (peer, what, bytes)

    def post(self, message: Message) -> _Posted:
        if isinstance(message, Send):
            assert message.tensor.is_contiguous()
            self.sent.append((message.peer, message.what, message.tensor.nbytes))
        return self.board.post(self.rank, message)


def in_threads(count: int, job: Callable[[int, ThreadChannel], Any], rule: str = "gloo") -> list[Any]:
    """Runs job(rank, channel) in as many threads; their answers in rank order. The first error is raised."""
    board = Board(rule, playing=count)
    return side_by_side(count, lambda rank: job(rank, ThreadChannel(board, rank)), board.leave)
