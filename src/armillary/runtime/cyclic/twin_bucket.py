"""A bucket of gradients, twice: one is filled and sent while the other is on its way, or in `.grad` to be applied."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from armillary.exchanges.parcel import parted
from armillary.facts.collectives import AllReduce
from armillary.runtime.channel import Requests
from armillary.runtime.hybrid.bucket import Bucket

__all__ = ["TwinBucket"]

Wait = Callable[[], Any]


@dataclass(eq=False)
class TwinBucket:
    """free: to be filled, and where the gradients being applied lie. sent: under way, if there is a `wait`."""

    label: str
    free: Bucket
    sent: Bucket
    wait: Wait | None = None
    total: Tensor | None = None  # of the step before, arrived

    def launch(self, requests: Requests, scale: float) -> None:
        """Waits for what is under way, and sends what `free` holds: the one takes the other's place."""
        self.total = None if self.wait is None else self.wait()
        self.wait = requests.start(AllReduce(self.free.seal(scale).joined()), self.label)
        self.free, self.sent = self.sent, self.free

    def show(self) -> None:
        """`.grad` of every parameter becomes the mean of the step before; None, if there is none or nobody used it."""
        if self.total is not None:
            self.free.withdraw(parted(self.total, self.free.layout))
            return
        for parameter in self.free.parameters:
            parameter.grad = None

    def show_last(self) -> None:
        """The same with what is under way."""
        if self.wait is not None:
            self.sent.withdraw(parted(self.wait(), self.sent.layout))

    def settle(self) -> None:
        """Waits for what is under way; whoever waits for it later finds it there."""
        if self.wait is not None:
            total = self.wait()
            self.wait = lambda: total

    def forget(self) -> None:
        """Nothing is under way any more."""
        self.wait = self.total = None
