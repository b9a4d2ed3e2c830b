"""Messages and requests, as schedules want them: started now, waited for later.

What an implementation promises: messages of one sender, receiver and route arrive in order. What its users promise,
because gloo needs it (torch 2.13): a receive is posted before it is needed, a sent tensor is not changed before its
wait, a send is waited for only when the receive is certain to have been posted, and nothing is ever polled.
"""

from collections.abc import Callable
from typing import Any, Protocol

from armillary.facts.collectives import Message, Request

__all__ = ["Channel", "Pending", "Requests"]


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Returns when the message has arrived (receive) or the tensor may be changed again (send)."""


class Channel(Protocol):
    """This process's connection to its peers."""

    def post(self, message: Message) -> Pending:
        """Starts to send a contiguous tensor, or to receive into one of the right shape and dtype."""


class Requests(Protocol):
    """This process's connection to all of its peers."""

    def start(self, request: Request, label: str) -> Callable[[], Any]:
        """Sends a request on its way; what is returned waits for the answer."""
