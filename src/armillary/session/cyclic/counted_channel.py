"""The transport's messages and requests, with what they sent and how long this process waited for them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from armillary.facts.collectives import Message, Request, sent_bytes
from armillary.runtime.channel import Pending
from armillary.runtime.transport import Transport

__all__ = ["CountedChannel"]


@dataclass(eq=False)
class CountedChannel:
    """sent_bytes: of the tensors, without the network's headers. waited_seconds: not hidden behind compute."""

    transport: Transport
    sent_bytes: float = 0
    waited_seconds: float = 0.0

    def post(self, message: Message) -> Pending:
        place = self.transport.place
        self.sent_bytes += sent_bytes(message, place.workers, place.rank)
        return _Timed(self.transport.post(message), self)

    def start(self, request: Request, label: str) -> Callable[[], Any]:
        place = self.transport.place_in(request)
        self.sent_bytes += sent_bytes(request, place.workers, place.rank)
        wait = self.transport.start(request, label)

        def timed() -> Any:
            began = time.perf_counter()
            answer = wait()
            self.waited_seconds += time.perf_counter() - began
            return answer

        return timed

    def take(self) -> tuple[float, float]:
        """Bytes and seconds since the last call."""
        taken = self.sent_bytes, self.waited_seconds
        self.sent_bytes, self.waited_seconds = 0, 0.0
        return taken


@dataclass(eq=False)
class _Timed:
    pending: Pending
    channel: CountedChannel = field(repr=False)

    def wait(self) -> object:
        began = time.perf_counter()
        answer = self.pending.wait()
        self.channel.waited_seconds += time.perf_counter() - began
        return answer
