"""A program of requests under way: what was asked is waited for late, and what follows is asked when all ranks do.

Programs are interleaved (several groups of a plan, several look-ups), so each is advanced one request at a time, at
moments that are the same on every rank (design law 8).
"""

from dataclasses import dataclass
from typing import Any

from armillary.facts.collectives import Program
from armillary.runtime.transport import Transport, Wait

__all__ = ["Flight"]


@dataclass(eq=False)
class Flight:
    """A program under way. left: requests it has still to make after the one in flight."""

    program: Program[Any]
    label: str
    left: int
    wait: Wait | None = None
    result: Any = None

    def resume(self, transport: Transport, answer: Any) -> None:
        try:
            self.wait = transport.start(self.program.send(answer), self.label)
        except StopIteration as stop:
            self.wait, self.result = None, stop.value

    def advance(self, transport: Transport) -> None:
        """Waits for the answer and makes the next request."""
        if self.left > 0 and self.wait is not None:
            self.left -= 1
            self.resume(transport, self.wait())

    def land(self, transport: Transport) -> Any:
        while self.wait is not None:
            self.resume(transport, self.wait())
        return self.result
