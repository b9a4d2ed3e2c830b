"""Letters to a rank's owner thread, in the order in which they arrive from whichever rank, and answers to the main one.

Two groups of their own: letters and answers never cross. Order is kept per pair of ranks. A receiving thread blocks in
gloo until a letter comes (to poll one would close its connection) and ends when every peer has sent its last. What a
rank sends to itself goes by a queue, since gloo carries no message from a rank to itself.
"""

import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.transport.transport import Transport

__all__ = ["LAST", "Expected", "OwnerLetter", "OwnerMailbox"]

HEADER = 6  # numbers: five of the sender's, and the bytes of the body
LAST = -1  # the first number of a peer's last letter
HEAD, BODY, ANSWER = 0, 1, 2  # tags
IDLE = timedelta(days=3650)  # a receiving thread waits as long as nobody writes
UNDER_WAY = 16  # sent messages that are not waited for
EMPTY = torch.empty(0, dtype=torch.uint8)


class OwnerLetter(NamedTuple):
    """numbers: five, the first of them >= 0. body: bytes."""

    sender: int
    numbers: Sequence[int]
    body: Tensor


class OwnerMailbox:
    """Of one rank; made by all ranks together. Letters are read by one thread, answers by the one that asks.

    Raises (`next`, `answered`):
        RuntimeError: the receiving thread met an error, or an answer did not come in time.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport, place = transport, transport.place
        self.rank, self.workers = place.rank, place.workers
        self._letters: SimpleQueue[OwnerLetter | BaseException] = SimpleQueue()
        self._own_answers: SimpleQueue[Tensor | BaseException] = SimpleQueue()
        self._sent: dict[str, deque[Any]] = {"letters": deque(), "answers": deque()}
        self._thread: threading.Thread | None = None
        self._is_given_up = False
        if self.workers > 1:
            everyone = range(self.workers)
            self._letter_group = transport.open_groups.new(everyone, timeout=IDLE)
            self._answer_group = transport.open_groups.new(everyone)
            self._thread = threading.Thread(target=self._receive, name="armillary-mailbox", daemon=True)
            self._thread.start()

    def send(self, peer: int, numbers: Sequence[int], body: Tensor = EMPTY) -> int:
        """
        Args:
            body: bytes, not to be changed by anybody afterwards.

        Returns:
            How many bytes went over a link.
        """
        if peer == self.rank:
            self._letters.put(OwnerLetter(peer, numbers, body))
            return 0
        head = torch.tensor([*numbers, body.numel()], dtype=torch.int64)
        self._post("letters", self._letter_group.send([head], peer, HEAD), head)
        if body.numel():
            self._post("letters", self._letter_group.send([body], peer, BODY), body)
        return head.nbytes + body.numel()

    def next(self) -> OwnerLetter:
        """Blocks until a letter is there."""
        found = self._letters.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def answer(self, peer: int, body: Tensor) -> int:
        """From the thread that reads letters. Returns the bytes that went over a link."""
        if peer == self.rank:
            self._own_answers.put(body)
            return 0
        self._post("answers", self._answer_group.send([body], peer, ANSWER), body)
        return body.numel()

    def expect(self, peer: int, size: int) -> "Expected":
        """Makes room for the next answer of a peer, of so many bytes."""
        if peer == self.rank:
            return Expected(self, None, EMPTY)
        into = torch.empty(size, dtype=torch.uint8)
        return Expected(self, self._answer_group.recv([into], peer, ANSWER), into)

    def fail(self, error: BaseException) -> None:
        """The thread that reads letters has ended with this error: whoever waits for its answer is told."""
        self._own_answers.put(error)

    def close(self) -> None:
        """Collective: every peer is told that this rank writes no more; returns when all have said so, and the thread
        that reads letters finds a last one of this rank."""
        for peer in range(self.workers):
            if peer != self.rank:
                self.send(peer, [LAST, 0, 0, 0, 0])
        if self._thread is not None:
            self._thread.join(self.transport.watchdog.timeouts.timeout)
        self._letters.put(OwnerLetter(self.rank, [LAST, 0, 0, 0, 0], EMPTY))
        for messages in self._sent.values():
            while messages:
                messages.popleft()[0].wait()

    def give_up(self) -> None:
        """Asks nobody, waits for nobody."""
        self._is_given_up = True  # its thread waits in gloo until the groups go, or the process ends
        self._letters.put(RuntimeError("the run was given up"))

    def _post(self, group: str, work: Any, tensor: Tensor) -> None:
        """A message is waited for late, and its tensor lives as long."""
        messages = self._sent[group]
        messages.append((work, tensor))
        while len(messages) > UNDER_WAY * self.workers:
            messages.popleft()[0].wait()

    def _receive(self) -> None:
        try:
            left = self.workers - 1
            while left:
                head = torch.empty(HEADER, dtype=torch.int64)
                coming = self._letter_group.recv_anysource([head], HEAD)
                coming.wait()
                sender = coming._source_rank()
                *numbers, size = head.tolist()
                if numbers[0] == LAST:
                    left -= 1
                    continue
                body = torch.empty(size, dtype=torch.uint8)
                if size:
                    self._letter_group.recv([body], sender, BODY).wait()
                self._letters.put(OwnerLetter(sender, numbers, body))
        except BaseException as error:
            if not self._is_given_up:
                self._letters.put(error)


class Expected:
    """An answer that will come."""

    def __init__(self, mailbox: OwnerMailbox, work: Any, into: Tensor) -> None:
        self._mailbox, self._work, self._into = mailbox, work, into

    def wait(self) -> Tensor:
        """Bytes."""
        if self._work is not None:
            self._work.wait(timedelta(seconds=self._mailbox.transport.watchdog.timeouts.timeout))
            return self._into
        try:
            found = self._mailbox._own_answers.get(timeout=self._mailbox.transport.watchdog.timeouts.timeout)
        except Empty:
            raise RuntimeError("timed out: this rank's own owner did not answer") from None
        if isinstance(found, BaseException):
            raise RuntimeError(f"this rank's owner thread ended with {type(found).__name__}: {found}") from found
        return found
