"""The transport's messages and requests, with what they sent and how long this process waited for them, by label."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from armillary.facts.collectives import Message, Request, sent_bytes
from armillary.runtime.channel import Pending
from armillary.runtime.transport import Transport

__all__ = ["CountedChannel"]


@dataclass(eq=False)
class CountedChannel:
    """sent: bytes of the tensors, without the network's headers, counted when they set out. waited: seconds that are
    not hidden behind compute."""

    transport: Transport
    sent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waited: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def post(self, message: Message) -> Pending:
        place = self.transport.place
        self.sent[message.what] += sent_bytes(message, place.workers, place.rank)
        return _Timed(self.transport.post(message), self, message.what)

    def start(self, request: Request, label: str) -> Callable[[], Any]:
        place = self.transport.place_in(request)
        self.sent[label] += sent_bytes(request, place.workers, place.rank)
        wait = self.transport.start(request, label)

        def timed() -> Any:
            began = time.perf_counter()
            answer = wait()
            self.waited[label] += time.perf_counter() - began
            return answer

        return timed

    def take(self) -> dict[str, tuple[float, float]]:
        """By label, bytes and seconds since the last call."""
        labels = dict.fromkeys((*self.sent, *self.waited))
        taken = {label: (self.sent[label], self.waited[label]) for label in labels}
        self.sent.clear()
        self.waited.clear()
        return taken


@dataclass(eq=False)
class _Timed:
    pending: Pending
    channel: CountedChannel = field(repr=False)
    label: str = ""

    def wait(self) -> object:
        began = time.perf_counter()
        answer = self.pending.wait()
        self.channel.waited[self.label] += time.perf_counter() - began
        return answer
