"""Channels for tests: gloo between processes, and an unkind one between threads of one process."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor


class GlooChannel:
    """The default group's isend and irecv; counts what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []  # (peer, bytes)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        self.sent.append((peer, tensor.nbytes))
        return dist.isend(tensor, peer, tag=tag)

    def receive(self, into: Tensor, peer: int, tag: int) -> Any:
        return dist.irecv(into, peer, tag=tag)


class Board:
    """Where threads leave messages: a send is over only when the receive was posted, and the tensor is read then."""

    def __init__(self, timeout_seconds: float = 20.0) -> None:
        self.timeout_seconds = timeout_seconds
        self.lines: dict[tuple[int, int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()

    def line(self, sender: int, receiver: int, tag: int) -> "queue.Queue[Any]":
        with self.lock:
            return self.lines[sender, receiver, tag]


class ThreadChannel:
    """One thread's connection to the board."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank
        self.sent: list[tuple[int, int, int]] = []  # (peer, tag, bytes)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        assert tensor.is_contiguous()
        self.sent.append((peer, tag, tensor.nbytes))
        taken = threading.Event()
        self.board.line(self.rank, peer, tag).put((tensor, taken))
        return _Handle(lambda: _sure(taken.wait(self.board.timeout_seconds), f"{self.rank} -> {peer}, tag {tag}"))

    def receive(self, into: Tensor, peer: int, tag: int) -> Any:
        line = self.board.line(peer, self.rank, tag)

        def wait() -> None:
            tensor, taken = line.get(timeout=self.board.timeout_seconds)
            assert tensor.shape == into.shape and tensor.dtype == into.dtype
            into.detach().copy_(tensor)
            taken.set()

        return _Handle(wait)


class _Handle:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


def _sure(fine: bool, what: str) -> None:
    assert fine, f"{what}: never received"


def in_threads(count: int, job: Callable[[int, ThreadChannel], Any]) -> list[Any]:
    """Runs job(rank, channel) in as many threads; their answers in rank order. The first error is raised."""
    board, answers, errors = Board(), [None] * count, []

    def run(rank: int) -> None:
        try:
            answers[rank] = job(rank, ThreadChannel(board, rank))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers
