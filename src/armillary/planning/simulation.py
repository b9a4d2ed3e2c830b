"""What a played step is: lanes of one rank, requests from launch to landing, seconds of the step."""

from dataclasses import dataclass

from armillary.facts.trace import Record, Trace
from armillary.planning.clock import BusySpan, Transfer

__all__ = ["Simulation"]


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
