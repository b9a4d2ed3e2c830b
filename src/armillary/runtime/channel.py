"""Point-to-point messages, as the schedules' runtimes want them: started now, waited for later.

What an implementation promises: messages with the same sender, receiver and tag arrive in order. What its users
promise, because gloo needs it (torch 2.13): a receive is posted before it is needed, a sent tensor is not changed
before its wait, a send is waited for only when the receive is certain to have been posted, and nothing is ever polled.
"""

from typing import Protocol

from torch import Tensor

__all__ = ["Channel", "Pending"]


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Returns when the message has arrived (receive) or the tensor may be changed again (send)."""


class Channel(Protocol):
    """This process's connection to its peers."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Starts to send a contiguous tensor."""

    def receive(self, into: Tensor, peer: int, tag: int) -> Pending:
        """Starts to receive into a contiguous tensor of the right shape and dtype."""
