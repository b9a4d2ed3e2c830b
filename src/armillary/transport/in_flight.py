"""A program of requests under way: what was asked is waited for late, and what follows is asked when all ranks do.

Programs are interleaved (several groups of a plan, several look-ups), so each is advanced one request at a time, at
moments that are the same on every rank (design law 8).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from armillary.plans.requests import Labelled, Program, Request
from armillary.transport.requests import Requests
from armillary.transport.transport import Transport, Wait

__all__ = ["InFlight", "LaunchQueue", "Leaving", "see_through", "start_coalesced"]


@dataclass(eq=False)
class InFlight:
    """A program under way. left: requests it has still to make after the one in flight."""

    program: Program[Any]
    label: str
    left: int
    wait: Wait | None = None
    result: Any = None

    def ask(self) -> Request | None:
        """Waits for what was asked last, if anything; the next request, or None and the result at the end."""
        answer = None
        if self.wait is not None:
            self.left, answer = max(0, self.left - 1), self.wait()
        self.wait = None
        try:
            return self.program.send(answer)
        except StopIteration as stop:
            self.result, self.left = stop.value, 0  # it may end early, where nothing has to cross
            return None

    def begin(self, requests: Requests) -> None:
        """Makes the first request."""
        self._go_on(requests)

    def advance(self, requests: Requests) -> None:
        """Waits for the answer and makes the next request, if there is one to make."""
        if self.left > 0 and self.wait is not None:
            self._go_on(requests)

    def finish(self, requests: Requests) -> Any:
        while self.wait is not None:
            self._go_on(requests)
        return self.result

    def _go_on(self, requests: Requests) -> None:
        request = self.ask()
        self.wait = None if request is None else requests.start(request, self.label)


def start_coalesced(flights: Sequence[InFlight], transport: Transport) -> None:
    """Each of these makes its first or next request; those that can be joined travel as one (see `requests.py`)."""
    if not flights:
        return
    asked = [(flight, request) for flight in flights if (request := flight.ask()) is not None]
    waits = transport.start_together([Labelled(request, flight.label) for flight, request in asked])
    for (flight, _), wait in zip(asked, waits, strict=True):
        flight.wait = wait


def see_through(flights: Sequence[InFlight], requests: Requests) -> None:
    """Makes the last requests of all of them, which are then only waited for."""
    while any(flight.left > 0 for flight in flights):
        for flight in flights:
            flight.advance(requests)


class Leaving(NamedTuple):
    """requests: that the program makes in all."""

    program: Program[Any]
    requests: int


@dataclass(eq=False)
class LaunchQueue:
    """Units leave in their order, the same on every rank, whichever is ready first. As one leaves, every earlier one
    that has still requests to make makes its next, so that a link has something to carry while an answer is waited for.

    units: with the name of their requests.
    """

    requests: Requests
    units: Sequence[Any]
    flights: list[InFlight] = field(default_factory=list)  # of the first units

    def launch(self, leave: Callable[[Any], Leaving], is_ready: Callable[[Any], bool] = lambda unit: True) -> None:
        """Those that are next and ready."""
        while self.is_next(is_ready):
            unit = self.units[len(self.flights)]
            program, requests = leave(unit)
            flight = InFlight(program, unit.name, requests - 1)
            flight.begin(self.requests)
            for earlier in self.flights:
                earlier.advance(self.requests)
            self.flights.append(flight)

    def is_next(self, is_ready: Callable[[Any], bool]) -> bool:
        """Whether there is a next one, and it is ready."""
        return len(self.flights) < len(self.units) and is_ready(self.units[len(self.flights)])

    def land(self) -> list[Any]:
        """Waits for all of them; what each returned."""
        see_through(self.flights, self.requests)
        return [flight.finish(self.requests) for flight in self.flights]
