"""A clock for one step of one rank: a processor that does one thing after another, and beside it links that carry one
request after another.

Requests stay in the order in which they were made, latency included, as on NCCL's communication stream. With the order
fixed, every time is a maximum of sums, so nothing that takes longer can make the step shorter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["BusySpan", "Clock", "Lane", "Request", "Transfer"]

Lane = Literal["processor", "inside", "between", "exposed"]


class Request(NamedTuple):
    """Requests of one kind, one after another, as the busiest rank finds them.

    sent_bytes: mean over workers. inside_seconds, between_seconds: how long each link is busy with it, at once.
    carried_seconds: of these what its bytes take, which somebody copies and sums; the rest is latency, which is waited.
    beside_seconds: what it takes of the processor whatever it carries, if that computes meanwhile.
    """

    sent_bytes: float
    inside_seconds: float
    between_seconds: float
    carried_seconds: float = 0.0
    beside_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.inside_seconds, self.between_seconds)

    def with_bytes(self, times: float) -> "Request":
        """The same with so many times the bytes; its latency stays."""
        more = (times - 1) * self.carried_seconds
        inside, between = (one and max(0.0, one + more) for one in (self.inside_seconds, self.between_seconds))
        return Request(self.sent_bytes * times, inside, between, self.carried_seconds * times, self.beside_seconds)


class BusySpan(NamedTuple):
    """One thing on one lane. what: a stage or a group. sent_bytes: on one of the two lanes of a request only."""

    lane: Lane
    what: str
    action: str
    start_seconds: float
    seconds: float
    sent_bytes: float = 0.0

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds


class Transfer(NamedTuple):
    """Requests from their launch until the processor has taken what they brought."""

    group: str
    action: str
    launch_seconds: float
    land_seconds: float
    sent_bytes: float

    @property
    def seconds(self) -> float:
        return self.land_seconds - self.launch_seconds


@dataclass
class Clock:
    """now_seconds: of the processor. free_seconds: when each link has carried all that it was given."""

    now_seconds: float = 0.0
    free_seconds: dict[Lane, float] = field(default_factory=lambda: {"inside": 0.0, "between": 0.0})
    spans: list[BusySpan] = field(default_factory=list)

    @property
    def worked_seconds(self) -> float:
        """Of the processor."""
        return sum(span.seconds for span in self.spans if span.lane == "processor")

    def work(self, what: str, action: str, seconds: float) -> None:
        """Occupies the processor; what follows without a gap under the same name is one span."""
        if seconds <= 0:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and last[:3] == ("processor", what, action) and last.end_seconds == self.now_seconds:
            self.spans[-1] = last._replace(seconds=self.now_seconds + seconds - last.start_seconds)
        else:
            self.spans.append(BusySpan("processor", what, action, self.now_seconds, seconds))
        self.now_seconds += seconds

    def send(self, group: str, action: str, requests: Sequence[Request]) -> float:
        """Launches requests that follow one another; when the last of them is over."""
        done = self.now_seconds
        for request in requests:
            used: dict[Lane, float] = {"inside": request.inside_seconds, "between": request.between_seconds}
            used = {lane: seconds for lane, seconds in used.items() if seconds > 0}
            start = max([done, *(self.free_seconds[lane] for lane in used)])
            sent_bytes = request.sent_bytes
            for lane, seconds in used.items():
                self.spans.append(BusySpan(lane, group, action, start, seconds, sent_bytes))
                self.free_seconds[lane] = start + seconds
                sent_bytes = 0.0
            done = start + request.seconds
        return done

    def wait(self, group: str, until_seconds: float) -> None:
        """The processor stands still until then; that is what is exposed of an exchange."""
        if until_seconds > self.now_seconds:
            self.spans.append(BusySpan("exposed", group, "wait", self.now_seconds, until_seconds - self.now_seconds))
            self.now_seconds = until_seconds
