"""The JSON that chrome://tracing and Perfetto open: processes with threads, and on these what took how long.

Source: the Trace Event Format; metadata events ("M"), and complete events ("X") with times in microseconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Event", "chrome_json", "complete", "process", "thread"]

Event = dict[str, Any]
MICRO = 1e6


def process(pid: int, name: str) -> list[Event]:
    """Its name, and its place among the processes."""
    place = {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    return [{"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}, place]


def thread(pid: int, tid: int, name: str) -> list[Event]:
    """Its name, and its place in the process."""
    place = {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    return [{"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}, place]


def complete(
    thread: tuple[int, int], name: str, kind: str, start_seconds: float, seconds: float, args: Mapping[str, Any]
) -> Event:
    """Something that began and ended on a thread, which is (pid, tid); `args` are shown where it is selected."""
    pid, tid = thread
    event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind}
    return {**event, "ts": start_seconds * MICRO, "dur": seconds * MICRO, "args": dict(args)}


def chrome_json(events: Sequence[Event]) -> dict[str, Any]:
    return {"traceEvents": list(events), "displayTimeUnit": "ms"}
