"""What happened, or would happen, on each rank in order: one record per action, with its seconds and bytes.

A forecast and a measurement are both traces, so they can be subtracted (design law 3). The file is a Chrome trace,
which chrome://tracing and Perfetto open: a process a rank, a thread a group, one more where actions of it overlap.

Source: the Trace Event Format; metadata events ("M"), and complete events ("X") with times in microseconds.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Event", "Record", "Trace", "chrome_json", "complete", "process", "thread"]

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


@dataclass(frozen=True)
class Record:
    """One action of one rank in one step: a request of a group's exchange, or a named piece of compute. at: of a
    message, which of its kind; alike on both sides."""

    step: int
    group: str
    action: str
    start_seconds: float
    seconds: float
    sent_bytes: float
    at: str = ""

    def __post_init__(self) -> None:
        if self.seconds < 0 or self.sent_bytes < 0:
            raise ValueError(f"trace: seconds and sent_bytes must not be negative, got {self}")


@dataclass(frozen=True)
class Trace:
    """The records of every rank, in the order of their ranks. Their clocks agree as far as the machines' do."""

    ranks: tuple[tuple[Record, ...], ...]

    @property
    def groups(self) -> frozenset[str]:
        return frozenset(record.group for records in self.ranks for record in records)

    def joint_seconds(self) -> dict[tuple[str, int], float]:
        """By group and step: how long its actions took from when the last rank had joined, added up.

        Ranks make the same requests in the same order; who asks early waits for who asks late, and that wait is no part
        of the exchange. So each action counts as long as on the rank where it was shortest.
        """
        by_rank = [_by_group_and_step(records) for records in self.ranks]
        found: dict[tuple[str, int], float] = {}
        for key in dict.fromkeys(key for mine in by_rank for key in mine):
            every = [mine[key] for mine in by_rank if key in mine]
            is_matched = len({len(seconds) for seconds in every}) == 1
            found[key] = sum(map(min, zip(*every, strict=True))) if is_matched else min(map(sum, every))
        return found

    def to_json(self) -> str:
        return json.dumps(chrome_json(list(_events(self.ranks))))

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """
        Raises:
            ValueError: it is no Chrome trace of ours.
        """
        given = json.loads(text)
        if not isinstance(given, dict) or "traceEvents" not in given:
            raise ValueError("it has no traceEvents (older versions wrote another format); train again")
        found: dict[int, list[Record]] = {event["pid"]: [] for event in given["traceEvents"]}
        for event in given["traceEvents"]:
            if event["ph"] == "X":
                times = {"start_seconds": event["ts"] / MICRO, "seconds": event["dur"] / MICRO}
                found[event["pid"]].append(Record(**times, **event["args"]))
        return cls(tuple(tuple(found[rank]) for rank in sorted(found)))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        return cls.from_json(Path(path).read_text())


def _by_group_and_step(records: Sequence[Record]) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = {}
    for record in records:
        found.setdefault((record.group, record.step), []).append(record.seconds)
    return found


def _events(ranks: Sequence[Sequence[Record]]) -> Iterator[Event]:
    for rank, records in enumerate(ranks):
        yield from process(rank, f"rank {rank}")
        free: dict[tuple[str, int], float] = {}  # by group and lane of it: when it ends what it shows
        for record in records:
            lane = 0
            while free.get((record.group, lane), 0.0) > record.start_seconds:
                lane += 1
            key = record.group, lane
            if key not in free:
                yield from thread(rank, len(free), record.group)
            free[key] = record.start_seconds + record.seconds
            shown = asdict(record)
            times = shown.pop("start_seconds"), shown.pop("seconds")
            tid = list(free).index(key)
            yield complete((rank, tid), f"{record.group} {record.action}", f"step {record.step}", *times, shown)
