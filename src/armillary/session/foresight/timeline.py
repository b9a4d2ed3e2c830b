"""A simulated step as a Chrome trace: the JSON that chrome://tracing and Perfetto open.

Source: the Trace Event Format; complete events ("X") with times in microseconds, lanes as threads.
"""

from typing import Any

from armillary.planning.clock import Lane, Span
from armillary.planning.simulation import Simulation

__all__ = ["LANES", "chrome_trace"]

LANES: dict[Lane, str] = {
    "processor": "processor",
    "inside": "link inside the node",
    "between": "link between nodes",
    "exposed": "exposed: the processor waits",
}
MICRO = 1e6


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """One process, the rank whose links are busiest, with a thread a lane; lanes that stay empty are left out."""
    used = [lane for lane in LANES if any(span.lane == lane for span in simulation.spans)]
    rank = f"busiest of {simulation.workers} workers (simulated)"
    events: list[dict[str, Any]] = [_named("process_name", 0, rank)]
    for thread, lane in enumerate(used):
        events.append(_named("thread_name", thread, LANES[lane]))
        events.append({"ph": "M", "pid": 0, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}})
    events += [_event(span, used.index(span.lane)) for span in simulation.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": what, "args": {"name": name}}


def _event(span: Span, thread: int) -> dict[str, Any]:
    event = {"ph": "X", "pid": 0, "tid": thread, "name": f"{span.action} {span.what}", "cat": span.lane}
    times = {"ts": span.start_seconds * MICRO, "dur": span.seconds * MICRO}
    return {**event, **times, "args": {"sent_bytes": span.sent_bytes}}
