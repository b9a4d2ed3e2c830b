"""A clock for one step of one rank: a processor that does one thing after another, and beside it links that carry one
request after another.

Requests stay in the order in which they were made, latency included, as on NCCL's communication stream. With the order
fixed, every time is a maximum of sums, so nothing that takes longer can make the step shorter.

What a played step is: lanes of one rank, requests from launch to landing, seconds of the step.

Backward in pieces: which part of it comes when, and whose gradient is there after it.

The profile knows how long each stage's backward takes and in which order gradients arrived; within a stage each is
taken to need a part of the time in proportion to the elements read.

A simulated step as a Chrome trace: its lanes as threads.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from armillary.plans.profile import ParameterFact, Profile, StageFact
from armillary.plans.trace import Record, Trace, chrome_json, complete, process, thread

__all__ = [
    "LANES",
    "OUTSIDE",
    "BusySpan",
    "Clock",
    "Lane",
    "Piece",
    "Request",
    "Simulation",
    "Transfer",
    "backward_pieces",
    "chrome_trace",
]

Lane = str  # "processor", "inside", "between", "exposed", or one that a schedule brings


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
    free_seconds: dict[Lane, float] = field(default_factory=lambda: defaultdict(float))
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

    def occupy(self, lane: Lane, span: BusySpan) -> float:
        """A lane carries one thing after another, this one from its start at the earliest; when it has."""
        start = max(span.start_seconds, self.free_seconds[lane])
        self.spans.append(span._replace(start_seconds=start))
        self.free_seconds[lane] = start + span.seconds
        return self.free_seconds[lane]

    def wait(self, group: str, until_seconds: float) -> None:
        """The processor stands still until then; that is what is exposed of an exchange."""
        if until_seconds > self.now_seconds:
            self.spans.append(BusySpan("exposed", group, "wait", self.now_seconds, until_seconds - self.now_seconds))
            self.now_seconds = until_seconds


@dataclass(frozen=True)
class Simulation:
    """One step of the busiest rank. spans: in no particular order. flights: in the order of their launches."""

    workers: int
    spans: tuple[BusySpan, ...]
    flights: tuple[Transfer, ...]
    step_seconds: float

    @property
    def processor_seconds(self) -> float:
        """Everything the processor does: forward, backward, packing, index work, the optimizer's pass."""
        return sum(span.seconds for span in self.spans if span.lane == "processor")

    @property
    def exposed_seconds(self) -> dict[str, float]:
        """How long the processor stood still for each group."""
        found: dict[str, float] = {}
        for span in self.spans:
            if span.lane == "exposed":
                found[span.what] = found.get(span.what, 0.0) + span.seconds
        return found

    @property
    def sent_bytes(self) -> dict[str, float]:
        """By group, mean over workers; headers of look-ups by themselves."""
        found: dict[str, float] = {}
        for flight in self.flights:
            found[flight.group] = found.get(flight.group, 0.0) + flight.sent_bytes
        return found

    @property
    def in_flight_seconds(self) -> dict[str, float]:
        """By group, from launch to landing, as a measured trace has them; what overlaps is counted each."""
        found: dict[str, float] = {}
        for flight in self.flights:
            found[flight.group] = found.get(flight.group, 0.0) + flight.seconds
        return found

    @property
    def trace(self) -> Trace:
        """The same as a measurement would be: one record per flight, of step 0 on one rank."""
        records = [Record(0, f.group, f.action, f.launch_seconds, f.seconds, f.sent_bytes) for f in self.flights]
        return Trace((tuple(records),))


OUTSIDE = ""


class Piece(NamedTuple):
    """A part of backward, and the parameter whose gradient is there after it."""

    stage: str
    seconds: float
    parameter: str | None


def backward_pieces(profile: Profile) -> list[Piece]:
    """Backward, stage by stage, in the order in which their first gradients arrived."""
    of_stage: dict[str, list[ParameterFact]] = {stage.name: [] for stage in profile.stages}
    for fact in profile.arrivals:
        of_stage[fact.stage].append(fact)
    pieces = []
    for stage in _backward_order(profile, of_stage):
        facts = of_stage[stage.name]
        works = [fact.alpha * fact.elements for fact in facts]
        total = sum(works)
        if total <= 0:
            pieces += [Piece(stage.name, 0.0, fact.name) for fact in facts]
            pieces.append(Piece(stage.name, stage.backward_seconds, None))
            continue
        for fact, work in zip(facts, works, strict=True):
            pieces.append(Piece(stage.name, stage.backward_seconds * work / total, fact.name))
    return pieces


def _backward_order(profile: Profile, of_stage: dict[str, list[ParameterFact]]) -> list[StageFact]:
    """Against the model's order where gradients say nothing; what has no gradient goes with the stage after it."""
    keyed: list[tuple[int, int, StageFact]] = []
    last = -1
    outside = [stage for stage in profile.stages if stage.name == OUTSIDE]
    inner = [stage for stage in profile.stages if stage.name != OUTSIDE]
    for stage in [*outside, *reversed(inner)]:
        arrivals = [fact.arrival for fact in of_stage[stage.name] if fact.arrival is not None]
        last = min(arrivals) if arrivals else last
        keyed.append((last, len(keyed), stage))
    return [stage for _, _, stage in sorted(keyed, key=lambda entry: entry[:2])]


LANES: dict[Lane, str] = {
    "processor": "processor",
    "inside": "link inside the node",
    "between": "link between nodes",
    "exposed": "not hidden: the processor waits",
}


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """One process, the rank whose links are busiest, with a thread a lane; lanes that stay empty are left out."""
    found = {span.lane for span in simulation.spans}
    used = [*(lane for lane in LANES if lane in found), *sorted(found - {*LANES})]
    events = process(0, f"busiest of {simulation.workers} workers (simulated)")
    for tid, lane in enumerate(used):
        events += thread(0, tid, LANES.get(lane, lane))
    for span in simulation.spans:
        place, name = (0, used.index(span.lane)), f"{span.action} {span.what}"
        args = {"sent_bytes": span.sent_bytes}
        events.append(complete(place, name, span.lane, span.start_seconds, span.seconds, args))
    return chrome_json(events)
