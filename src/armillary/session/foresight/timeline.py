"""A simulated step as a Chrome trace: its lanes as threads."""

from typing import Any

from armillary.facts.chrome import chrome_json, complete, process, thread
from armillary.planning.clock import Lane
from armillary.planning.simulation import Simulation

__all__ = ["LANES", "chrome_trace"]

LANES: dict[Lane, str] = {
    "processor": "processor",
    "inside": "link inside the node",
    "between": "link between nodes",
    "exposed": "not hidden: the processor waits",
}


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """One process, the rank whose links are busiest, with a thread a lane; lanes that stay empty are left out."""
    used = [lane for lane in LANES if any(span.lane == lane for span in simulation.spans)]
    events = process(0, f"busiest of {simulation.workers} workers (simulated)")
    for tid, lane in enumerate(used):
        events += thread(0, tid, LANES[lane])
    for span in simulation.spans:
        place, name = (0, used.index(span.lane)), f"{span.action} {span.what}"
        args = {"sent_bytes": span.sent_bytes}
        events.append(complete(place, name, span.lane, span.start_seconds, span.seconds, args))
    return chrome_json(events)
