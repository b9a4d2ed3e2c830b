"""Losses that one process knows, told to all: a small message a step, taken some steps later, so that nobody waits.

In a pipeline the last stage alone sees the losses of a step, mostly a step after it was handed in. It sends them as
they come; the others post a receive before each step and look at it `lag` steps later, when it has long been there. The
one that knows gives them out no sooner: a loop that stops by its losses must stop at the same step on every process.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from armillary.facts.collectives import Receive, Send
from armillary.runtime.channel import Pending
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.transport import Transport

__all__ = ["ToldLosses"]

LOSSES = "losses of a step"


class ToldLosses:
    """
    Args:
        teller: the process that knows. listeners: those that are to know, itself among them.
        lag: steps between handing a step in and looking for its losses.
    """

    def __init__(
        self, transport: Transport, teller: int, listeners: Sequence[int], micro_batches: int, lag: int
    ) -> None:
        self._transport, self._count, self._lag = transport, micro_batches, lag
        self._teller, self._peers = teller, [rank for rank in listeners if rank != teller]
        self._posted: deque[tuple[Pending, Tensor]] = deque()
        self._known: deque[StepLosses] = deque()
        self._sent: deque[tuple[Pending, Tensor]] = deque()
        self._asked = self._next = 0  # steps

    def begin_step(self) -> None:
        """Every process hands in a step next. There is room for its losses from now on."""
        self._asked += 1
        if not self._is_teller:
            room = torch.empty(self._count, dtype=torch.float64)
            self._posted.append((self._transport.post(Receive(LOSSES, self._teller, room, LOSSES)), room))

    def take(self, known: Sequence[StepLosses], everything: bool = False) -> list[StepLosses]:
        """After a call of every process: what it knows, and what was told.

        Args:
            everything: whether nothing is under way any more.
        """
        for one in known:
            if self._is_teller:
                self._tell(one)
        if everything or not self._lag:
            self.see_over()
        found = []
        while self._next < self._asked and (everything or self._asked - self._next > self._lag):
            found.append(self._known.popleft() if self._is_teller else self._heard())
            self._next += 1
        return found

    def see_over(self) -> None:
        """Waits until the others have what was told."""
        while self._sent:
            self._sent.popleft()[0].wait()

    @property
    def _is_teller(self) -> bool:
        return self._transport.place.rank == self._teller

    def _tell(self, one: StepLosses) -> None:
        numbers = torch.stack([loss.detach().double().cpu() for loss in one.losses])
        self._sent += [(self._transport.post(Send(LOSSES, peer, numbers, LOSSES)), numbers) for peer in self._peers]
        while len(self._sent) > 4 * (self._lag + 1) * self._transport.place.workers:
            self._sent.popleft()[0].wait()
        self._known.append(one)

    def _heard(self) -> StepLosses:
        pending, room = self._posted.popleft()
        pending.wait()
        return StepLosses(self._next, tuple(room.unbind()))
