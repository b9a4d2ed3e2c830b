"""The buffers of a stage that several devices share: running statistics are kept once, in micro-batch order.

What a forward writes goes on to the device of the next micro-batch, which reads it before its own forward of the stage.
Buffers that no forward writes (masks) stay where they are; one that was written goes on for good, since a later device
may only read it. Which are written is seen by their values: torch's batch norm writes running statistics without
raising their version counters (torch 2.13).
"""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from armillary.runtime.channel import Channel
from armillary.runtime.cyclic.flat_stage import FlatStage
from armillary.runtime.mailbox import Mailbox
from armillary.schedules.instruction import Letter
from armillary.schedules.shared import Sharing

__all__ = ["PassedBuffers"]


class PassedBuffers:
    """Of one stage on one device. Micro-batches are counted through all steps.

    Nothing is sent before its reader was handed in: it might never be read, and a send would be waited for in vain.
    """

    def __init__(self, module: nn.Module, sharing: Sharing, channel: Channel, rank: int) -> None:
        self._sharing, self._module, self._rank = sharing, module, rank
        self._stage = sharing.stage_of(rank)
        self._mailbox = Mailbox(channel, FlatStage(dict(module.named_parameters())).device, is_lowered=False)
        self._is_idle = len(sharing.ranks(self._stage)) == 1 or not any(True for _ in module.buffers())
        self._before: list[Tensor] = []  # copies, of before a forward
        self._written = set[int]()  # by any forward so far, of any device before this one
        self._owed: int | None = None  # the next micro-batch, which is not handed in yet

    def expect(self, number: int) -> None:
        """Makes room for what a micro-batch of this device will read; the one before it is handed in."""
        if number > 0 and not self._is_idle:
            self._mailbox.expect(self._letter(number), self._rank_of(number - 1))

    def before(self, number: int) -> None:
        """A micro-batch of this device is about to run forward."""
        if self._is_idle:
            return
        if number > 0:
            leaves, _ = self._mailbox.take(self._letter(number))
            places, tensors = leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :]
            own = list(self._module.buffers())
            for place, tensor in zip(places, tensors, strict=True):
                own[place].copy_(tensor)
            self._written |= set(places)
        self._before = [buffer.clone() for buffer in self._module.buffers()]

    def after(self, number: int, handed_in: int) -> None:
        """It has run; `handed_in` micro-batches there are, of all devices."""
        if self._is_idle:
            return
        self.wait()
        pairs = zip(self._module.buffers(), self._before, strict=True)
        self._written |= {place for place, (now, then) in enumerate(pairs) if not torch.equal(now, then)}
        self._owed = number + 1
        self.hand_in(handed_in)

    def hand_in(self, handed_in: int) -> None:
        """Sends what could not be sent yet, if its reader is handed in now."""
        if self._owed is None or self._owed >= handed_in:
            return
        number, self._owed = self._owed, None
        own, places = list(self._module.buffers()), sorted(self._written)
        parts = tree_flatten([places, [own[place].clone() for place in places]])
        self._mailbox.send(self._letter(number), self._rank_of(number), *parts)

    def wait(self) -> None:
        """Everything sent has arrived."""
        self._mailbox.all_over()

    def _letter(self, number: int) -> Letter:
        """What that micro-batch reads."""
        return Letter("buffers", *divmod(number, self._sharing.schedule.workers), self._stage)

    def _rank_of(self, number: int) -> int:
        return self._sharing.rank_of((*divmod(number, self._sharing.schedule.workers), self._stage))
