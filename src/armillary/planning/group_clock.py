"""What a rank's groups do on its clock: tables pulled and prefetched, gradients pushed, weights that meet.

Gradients leave in the plan's order, as backward makes them, and take the processor for what compute cannot hide of
them. Of a push only the first request leaves with its gradients: each of the others waits for the next launch, or for
the end of backward. Tables that prefetch do so as `tables/lookups` does, in the midst of a loop: every step carries a
part of the batch at hand, of the next and of the one after.

Departures: one request at a time on a link; what is asked for two steps early is in flight to the end of one.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from armillary.planning.activities import Activities, idle_request
from armillary.planning.clock import Clock, Request, Transfer
from armillary.planning.pricing import Case

__all__ = ["LOOK_UPS", "Flown", "GroupClock", "Push"]

LOOK_UPS = "look-ups"  # headers and the round that ends them go by this name in a measured trace too


class Flown(NamedTuple):
    """sent: when its sender did its part. is_seen: whether a side has waited for it, which is then when it landed."""

    sender: int
    sent: float
    flight: Transfer
    is_seen: bool = False

    def seen(self, now: float) -> "Flown":
        land = min(now, self.flight.land_seconds) if self.is_seen else now
        return self._replace(flight=self.flight._replace(land_seconds=land), is_seen=True)


class _Sent(NamedTuple):
    """Requests under way, and when the last of them is over. place: in the flights; -1 where nothing is asked."""

    name: str
    place: int
    done_seconds: float


_Asked = tuple[str, str, tuple[Request, ...]]  # name, action, requests


@dataclass(eq=False)
class Push:
    """One exchange of gradients under way. left: requests it has still to make after the one in flight, if any is."""

    name: str
    left: deque[Request]
    flying: _Sent | None = None


class GroupClock:
    """
    Args:
        rank: whose. does: by group. pushes: the action by which flights of gradients go.
        overlap: False makes the processor wait for every request.
        flights: of all ranks, to which come those of this one.
    """

    def __init__(
        self, rank: int, clock: Clock, does: Mapping[str, Activities], case: Case, overlap: bool, pushes: str
    ) -> None:
        self.rank, self.clock, self.does, self.case, self.overlap, self.action = (
            rank,
            clock,
            does,
            case,
            overlap,
            pushes,
        )
        self.flights: list[Flown] = []
        self.tables = sum(bool(one.pull) for one in does.values())
        self.prefetched = {name: one for name, one in reversed([*does.items()]) if one.ahead}  # as a forward reads
        self.late: dict[str, _Sent] = {}  # by table, what it still has to bring for this step
        self.ahead: dict[str, list[_Sent]] = {name: [] for name in self.prefetched}  # and for the steps to come

    def turn(self) -> None:
        """The loop gets its batch: ranks meet and say what they expect; then leave what is missing of this batch with
        the ids of the one after next, gradients of the last that could wait, and the rows of the next that stay put.
        While these are on their way, each works out what it will say next."""
        if not self.prefetched:
            return
        self._meet()
        first, *others = self.prefetched.items()
        ids: list[_Asked] = [(name, "prefetch", one.ahead[:1]) for name, one in self.prefetched.items()]
        missing, *asked = self._together([(first[0], "pull", first[1].pull), *ids], self._start)
        self.late[first[0]] = missing
        self._expect(asked)
        for name, one in others:
            self.late[name] = self._start(name, "pull", one.pull)
        for place in (3, 2):
            items = [(name, one.ahead[place : place + 1]) for name, one in self.prefetched.items()]
            self._expect(self._together([(name, "prefetch", asks) for name, asks in items if asks], self._start))
        for name, one in self.prefetched.items():
            self.clock.work(name, "predict", one.predict_seconds)

    def _expect(self, sent: Sequence[_Sent]) -> None:
        for one in sent:
            self.ahead[one.name].append(one)

    def pull(self, name: str) -> None:
        """A table's rows, before the stage that reads them."""
        if name in self.late:
            self._take(self.late.pop(name))
        else:
            self._take(self._send(LOOK_UPS, "pull", self.does[name].headers))
            self._take(self._send(name, "pull", self.does[name].pull))
        self.clock.work(name, "gather rows", self.does[name].gather_seconds)

    def launch(self, name: str, pushes: list[Push]) -> None:
        """A group's gradients are there. pushes: those that set out before it, to which it comes."""
        if not pushes and self.tables:  # before anything is pushed, every rank must have made its look-ups
            self._meet_in_backward()
        self.clock.work(name, "pack", self.does[name].pack_seconds)
        push = Push(name, deque(self.does[name].push))
        self._go_on(push)
        self._advance(pushes)
        pushes.append(push)

    def land(self, pushes: Sequence[Push]) -> None:
        """The last requests; every exchange lands, in order of launch."""
        while any(push.left for push in pushes):
            self._advance(pushes)
        for push in pushes:
            self._go_on(push)
            self.clock.work(push.name, "merge rows", self.does[push.name].merge_seconds)

    def exchange_weights(self, before: bool) -> None:
        """Before the optimizer's step or after it, while nothing else is done."""
        meeting = [(name, one.meet) for name, one in self.does.items() if one.meet and one.meets_before == before]
        for sent in self._together([(name, "meet", requests) for name, requests in meeting], self._send):
            self._take(sent)

    def end(self) -> None:
        """What is in flight for steps to come has landed."""
        for under_way in self.ahead.values():
            for sent in under_way:
                self._take(sent)

    def _meet_in_backward(self) -> None:
        masks = [(name, "prefetch", one.ahead[1:2]) for name, one in self.prefetched.items() if one.ahead[1:]]
        for name, _, _ in masks:  # the owners have the ids, and say which of these rows stay put
            self._take(self.ahead[name].pop(0))
        self._meet(masks)

    def _meet(self, along: Sequence[_Asked] = ()) -> None:
        """The round in which every rank says that it makes no look-up now, and what travels with it."""
        idle = idle_request(self.case.topology, self.tables, len(self.prefetched))
        meeting, *others = self._together([(LOOK_UPS, "pull", (idle,)), *along], self._send)
        self._take(meeting)
        self._expect(others)

    def _advance(self, pushes: Sequence[Push]) -> None:
        """Every push that has requests left makes one more, after the answer to the one before."""
        for push in pushes:
            if push.left:
                self._go_on(push)

    def _go_on(self, push: Push) -> None:
        if push.flying is not None:
            self._take(push.flying)
        push.flying = self._start(push.name, self.action, (push.left.popleft(),)) if push.left else None

    def _start(self, name: str, action: str, requests: tuple[Request, ...]) -> _Sent:
        """Sends beside compute: what compute cannot hide of its bytes takes the processor."""
        sent = self._send(name, action, requests)
        if not self.overlap:
            self.clock.wait(name, sent.done_seconds)
        else:
            shown = 1 - self.case.topology.hidden_share
            self.clock.work(name, "carry", shown * sum(request.carried_seconds for request in requests))
        return sent

    def _together(self, asked: Sequence[_Asked], send: Callable[[str, str, tuple[Request, ...]], _Sent]) -> list[_Sent]:
        """What travels as one arrives as one; where nothing overlaps, it is waited for in turn."""
        sent = []
        for one in asked:
            sent.append(send(*one))
            if not self.overlap:
                self.clock.wait(sent[-1].name, sent[-1].done_seconds)
        return [one._replace(done_seconds=sent[-1].done_seconds) for one in sent]

    def _send(self, name: str, action: str, requests: tuple[Request, ...]) -> _Sent:
        """To call a request takes the processor, however small it is, and whether or not the rank then waits for it."""
        self.clock.work(name, "call", sum(request.beside_seconds for request in requests))
        began, done = self.clock.now_seconds, self.clock.send(name, action, requests)
        if not requests:
            return _Sent(name, -1, done)
        flight = Transfer(name, action, began, done, sum(request.sent_bytes for request in requests))
        self.flights.append(Flown(self.rank, began, flight))
        return _Sent(name, len(self.flights) - 1, done)

    def _take(self, sent: _Sent) -> None:
        """Waits for it."""
        self.clock.wait(sent.name, sent.done_seconds)
        if sent.place >= 0:
            self.flights[sent.place] = self.flights[sent.place].seen(self.clock.now_seconds)
