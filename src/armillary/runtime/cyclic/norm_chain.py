"""The norm of a step on its way through stages on processes of their own: down as a sum of squares, up as the whole.

One number a message. The sum follows the step's last gradient down; stage 0 knows the whole, which goes up ahead of the
activation of the micro-batch that `schedules/messages.py` calls the carrier, so nobody waits for it alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from armillary.facts.collectives import Receive, Send
from armillary.runtime.channel import Channel, Pending

__all__ = ["NormChain"]

NORM = "norm"  # its route


class NormChain:
    """One stage's link. For every step: `add` once, then `take` once (on stage 0, `add` is enough).

    Args:
        ranks: for every stage, the process that has its gradients.
        device: of the stage's tensors, on which messages travel.
    """

    def __init__(self, channel: Channel, stage: int, ranks: Sequence[int], device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._below = ranks[stage - 1] if stage else None
        self._above = ranks[stage + 1] if stage + 1 < len(ranks) else None
        self._from_above: list[tuple[Pending, Tensor]] = []
        self._from_below: list[tuple[Pending, Tensor]] = []
        self._under_way: list[tuple[Pending, Tensor]] = []

    def begin(self) -> None:
        """Makes room for the messages of one more step."""
        if self._above is not None:
            self._from_above.append(self._post(self._above))
        if self._below is not None:
            self._from_below.append(self._post(self._below))

    def add(self, square: Tensor) -> Tensor | None:
        """Adds this stage's square to the sum of those above and hands it down; stage 0 gets the whole back."""
        if self._above is not None:
            square = self._arrived(self._from_above) + square
        if self._below is not None:
            self._send(square, self._below)
            return None
        self._pass_up(square)
        return square

    def take(self) -> Tensor:
        """The whole of the oldest step not yet taken; it is handed up."""
        square = self._arrived(self._from_below)
        self._pass_up(square)
        return square

    def wait(self) -> None:
        """Everything sent has arrived; the neighbours have taken as many steps as this stage."""
        for pending, _ in self._under_way:
            pending.wait()
        self._under_way = []

    def _pass_up(self, square: Tensor) -> None:
        if self._above is not None:
            self._send(square, self._above)

    def _send(self, square: Tensor, peer: int) -> None:
        while (
            len(self._under_way) > 3
        ):  # two steps old; receives are posted when a step begins, so nobody is waited for
            pending, _ = self._under_way.pop(0)
            pending.wait()
        sent = square.to(self._device)
        self._under_way.append((self._channel.post(Send(NORM, peer, sent, NORM)), sent))

    def _post(self, peer: int) -> tuple[Pending, Tensor]:
        room = torch.zeros((), dtype=torch.float64, device=self._device)
        return self._channel.post(Receive(NORM, peer, room, NORM)), room

    @staticmethod
    def _arrived(posted: list[tuple[Pending, Tensor]]) -> Tensor:
        pending, square = posted.pop(0)
        pending.wait()
        return square
