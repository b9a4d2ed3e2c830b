"""The owner on a rank: a thread that answers pulls and steps with pushes, in the order in which they come.

A pull of a worker that is more than `bound` steps ahead of the slowest waits here until the others have come. What was
done is logged when it is done, so the log's order is that of the values. A worker that steps aside (it saves, evaluates
or ends) is waited for by nobody.

Source: Parallax (Kim et al., 2019), asynchronous training; the bound is that of stale synchronous parallel (Ho et al.,
2013). Departure: the bound is each owner's own, on the updates that it made.
"""

import threading
from collections import Counter

import torch

from armillary.owners.bodies import joined, unpacked
from armillary.owners.shares import GroupOptions, OwnedPart
from armillary.plans.update_log import Event, Kind, UpdateLog, too_far_ahead
from armillary.transport.mailbox import LAST, OwnerLetter, OwnerMailbox

__all__ = ["DEAL", "Owner"]

DEAL = len(Kind)  # a letter that asks for the number of the next batch; no event of the log


class Owner:
    """
    Args:
        part: what it owns.
        bound: how many steps ahead of the slowest a worker may begin one; None: any.

    Args of note:
        error: that ended its thread. sent: bytes of its answers over links, by parameter.
    """

    def __init__(self, part: OwnedPart, workers: int, bound: int | None, post: OwnerMailbox) -> None:
        self.part, self.bound, self.post = part, bound, post
        self.log = UpdateLog()
        self.sent = Counter(dict.fromkeys([*part.whole, *part.tables], 0))  # the other thread reads it
        self.error: BaseException | None = None
        self._updates = dict.fromkeys(range(workers), 0)
        self._present = set(range(workers))
        self._options: dict[int, GroupOptions] = {}
        self._late: list[OwnerLetter] = []
        self._dealt = Counter[int]()  # batches, by epoch
        self._asides = dict.fromkeys(range(workers), 0)  # how often each worker stepped aside
        self._heard = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="armillary-owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> None:
        """After the last letters."""
        self._thread.join(seconds)

    def wait_aside(self, times: int, seconds: float) -> None:
        """Until every worker has stepped aside so often: all that they sent before has been done then.

        Raises:
            RuntimeError: one has not, in so many seconds; or the thread has ended with an error.
        """
        with self._heard:
            self._heard.wait_for(lambda: self.error is not None or min(self._asides.values()) >= times, seconds)
        self.refuse_failed()
        if late := [worker for worker, count in self._asides.items() if count < times]:
            raise RuntimeError(f"timed out: no word of rank {', '.join(map(str, late))} that it has come")

    def refuse_failed(self) -> None:
        if self.error is not None:
            raise RuntimeError(
                f"the owner's thread ended with {type(self.error).__name__}: {self.error}"
            ) from self.error

    def _serve(self) -> None:
        try:
            while (letter := self.post.next()).numbers[0] != LAST:
                self.take(letter)
        except BaseException as error:
            with self._heard:
                self.error = error
                self._heard.notify_all()
            self.post.fail(error)

    def take(self, letter: OwnerLetter) -> None:
        """Does what a letter asks for."""
        kind, step, epoch = letter.numbers[:3]
        if kind == DEAL:
            number = torch.tensor([self._dealt[epoch]])
            self._dealt[epoch] += 1
            self.post.answer(letter.sender, number.view(torch.uint8))
        elif kind == Kind.PULL:
            self._pull(letter)
        elif kind == Kind.PUSH:
            self._push(letter, step)
        else:
            self._step_aside(letter, step)

    def _pull(self, letter: OwnerLetter) -> None:
        if self._is_early(letter):
            self.log.waited += 1
            self._late.append(letter)
        else:
            self._give(letter)

    def _is_early(self, letter: OwnerLetter) -> bool:
        ahead = {worker: self._updates[worker] for worker in self._present | {letter.sender}}
        return too_far_ahead(letter.numbers[1], ahead, self.bound)

    def _give(self, letter: OwnerLetter) -> None:
        _, step, epoch, batch, _ = letter.numbers
        self._present.add(letter.sender)
        values = self.part.read(unpacked(letter.body).parts)
        self.log.append(Event(Kind.PULL, letter.sender, step, epoch, batch))
        if self.post.answer(letter.sender, joined([*values.values()])):
            self.sent.update({name: one.nbytes for name, one in values.items()})

    def _push(self, letter: OwnerLetter, step: int) -> None:
        worker = letter.sender
        if step < self._updates[worker]:  # it came before
            return
        options, gradients = unpacked(letter.body)
        if options is not None:
            self._options[worker] = options
        self.part.step(self._options[worker], gradients)
        self.log.append(Event(Kind.PUSH, worker, *letter.numbers[1:4]))
        self._updates[worker] += 1
        self._let_in()

    def _step_aside(self, letter: OwnerLetter, step: int) -> None:
        self._present.discard(letter.sender)
        self.log.append(Event(Kind.ASIDE, letter.sender, step))
        self._let_in()
        with self._heard:
            self._asides[letter.sender] += 1
            self._heard.notify_all()

    def _let_in(self) -> None:
        """Those that no longer are too far ahead, in the order in which they came."""
        waiting, self._late = self._late, []
        for letter in waiting:
            if self._is_early(letter):
                self._late.append(letter)
            else:
                self._give(letter)
