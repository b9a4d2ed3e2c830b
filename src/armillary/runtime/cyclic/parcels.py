"""Lists of tensors whose form both sides know, on their way between processes: posted, taken, sent, waited for later.

A line is a peer and what comes from there; what goes by one line arrives in order. A receive is posted as early as it
is certain, or at the latest when it is taken. A send keeps its tensors until the receiver needed them by the schedule's
clock, and is waited for only then: see Note [Nothing can hang] in `courier.py`.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from armillary.facts.collectives import Receive, Send
from armillary.runtime.channel import Channel, Pending

__all__ = ["ParcelRoute", "Parcels"]


class ParcelRoute(NamedTuple):
    """One way from or to one process."""

    peer: int
    what: str


class Parcels:
    """Of one process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._posted: dict[ParcelRoute, deque[list[tuple[Pending, Tensor]]]] = defaultdict(deque)
        self._under_way: list[tuple[int, list[tuple[Pending, Tensor]]]] = []  # (tick after which to wait, message)

    def post(self, line: ParcelRoute, room: list[Tensor]) -> None:
        """Makes room for one more message."""
        self._posted[line].append(
            [(self._channel.post(Receive(line.what, line.peer, part, line.what)), part) for part in room]
        )

    def posted(self, line: ParcelRoute) -> int:
        """Messages posted and not yet taken."""
        return len(self._posted[line])

    def take(self, line: ParcelRoute, room: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The oldest message of a line; `room` makes room for it if nobody has."""
        if not self._posted[line]:
            self.post(line, room())
        parts = []
        for pending, part in self._posted[line].popleft():
            pending.wait()
            parts.append(part)
        return parts

    def send(self, line: ParcelRoute, parts: list[Tensor], over: int) -> None:
        """Sends contiguous tensors that nobody will change; `over`: the tick after which they may be waited for."""
        started = [(self._channel.post(Send(line.what, line.peer, part, line.what)), part) for part in parts]
        self._under_way.append((over, started))

    def reap(self, tick: int | None) -> None:
        """Waits for the sends that are over before `tick`, or for all."""
        later = []
        for over, started in self._under_way:
            if tick is not None and over >= tick:
                later.append((over, started))
                continue
            for pending, _ in started:
                pending.wait()
        self._under_way = later
