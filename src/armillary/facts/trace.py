"""What happened, or would happen: one record per action, with its seconds and bytes.

A forecast and a measurement are both traces, so they can be subtracted (design law 3).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Record", "Trace"]


@dataclass(frozen=True)
class Record:
    """One action of one rank in one step: a request of a group's exchange, or a named piece of compute."""

    step: int
    group: str
    action: str
    start_seconds: float
    seconds: float
    sent_bytes: float

    def __post_init__(self) -> None:
        if self.seconds < 0 or self.sent_bytes < 0:
            raise ValueError(f"trace: seconds and sent_bytes must not be negative, got {self}")


@dataclass(frozen=True)
class Trace:
    """The records of one rank, in order."""

    rank: int
    records: tuple[Record, ...]

    def sent_bytes_per_step(self) -> dict[str, float]:
        """Mean bytes sent per step, by group."""
        steps = len({record.step for record in self.records}) or 1
        totals: dict[str, float] = {}
        for record in self.records:
            totals[record.group] = totals.get(record.group, 0.0) + record.sent_bytes
        return {group: total / steps for group, total in totals.items()}

    def seconds_per_step(self) -> dict[str, float]:
        """Mean seconds in flight per step, by group; actions that overlap are counted each."""
        steps = len({record.step for record in self.records}) or 1
        totals: dict[str, float] = {}
        for record in self.records:
            totals[record.group] = totals.get(record.group, 0.0) + record.seconds
        return {group: total / steps for group, total in totals.items()}

    def to_json(self) -> str:
        return json.dumps({"rank": self.rank, "records": [asdict(record) for record in self.records]})

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        fields = json.loads(text)
        return cls(fields["rank"], tuple(Record(**record) for record in fields["records"]))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        return cls.from_json(Path(path).read_text())
