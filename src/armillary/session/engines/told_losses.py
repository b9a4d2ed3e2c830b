"""Losses that one process knows, told to all: a small message a step, taken some steps later, so that nobody waits.

In a pipeline the last stage alone sees the losses of a step, mostly a step after it was handed in. It sends them as
they come; the others post a receive a step and look at it `lag` steps later, when it has long been there. The one that
knows gives them out no sooner: a loop that stops by its losses must stop at the same step on every process.
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

    def take(self, known: Sequence[StepLosses], is_step: bool, everything: bool = False) -> list[StepLosses]:
        """After a call of every process: what it knows, and what was told.

        Args:
            is_step: whether that call handed in a step. everything: whether nothing is under way any more.
        """
        place = self._transport.place
        self._asked += is_step
        if place.rank == self._teller:
            for one in known:
                numbers = torch.stack([loss.detach().double().cpu() for loss in one.losses])
                posts = [self._transport.post(Send(LOSSES, peer, numbers, LOSSES)) for peer in self._peers]
                self._sent += [(post, numbers) for post in posts]
            while len(self._sent) > 4 * (self._lag + 1) * place.workers or (everything and self._sent):
                self._sent.popleft()[0].wait()
            self._known += known
        elif is_step:
            room = torch.empty(self._count, dtype=torch.float64)
            self._posted.append((self._transport.post(Receive(LOSSES, self._teller, room, LOSSES)), room))
        found = []
        while self._next < self._asked and (everything or self._asked - self._next > self._lag):
            if place.rank == self._teller:
                found.append(self._known.popleft())
                self._next += 1
                continue
            pending, room = self._posted.popleft()
            pending.wait()
            found.append(StepLosses(self._next, tuple(room.unbind())))
            self._next += 1
        return found
