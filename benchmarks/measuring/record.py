"""What a measurement found, as plain data that goes to JSON and back."""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Block:
    """A few steps of one mode, run without another mode in between. Bytes are per step."""

    mode: str
    round: int
    step_seconds: tuple[float, ...]  # of rank 0, one a timed step
    wall_seconds: float  # per step, from a barrier before to a barrier after: no rank is left out
    cpu_seconds: float  # per step and rank, mean over ranks, all threads
    sent_bytes: tuple[float, ...]  # by each host, as the kernel counted
    received_bytes: tuple[float, ...]  # by each host
    peak_bytes: int  # of PSS that is this mode's, worst rank; without what start-up needed for a moment
    loss: float  # of rank 0, last step: shows that training happened, no claim about accuracy
    sent_payload_bytes: tuple[float, ...] = ()  # by each host, without headers; of older records nobody counted it

    def __post_init__(self) -> None:
        if not self.step_seconds or min(*self.step_seconds, self.wall_seconds, self.cpu_seconds) < 0:
            raise ValueError(f"record: a block needs steps and seconds >= 0, got {self}")
        if len(self.sent_bytes) != len(self.received_bytes) or not self.sent_bytes:
            raise ValueError(f"record: want bytes sent and received of the same hosts, got {self}")


@dataclass(frozen=True)
class Record:
    """One measurement: what was run where, and every block in the order it ran."""

    conditions: Mapping[str, str | int | float]  # sizes, hosts, Mbit/s, ranks per host, machine
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        ran = {(block.mode, block.round) for block in self.blocks}
        rounds = {block.round for block in self.blocks}
        missing = sorted({(mode, r) for mode in self.modes for r in rounds} - ran)
        if missing or len(ran) != len(self.blocks) or not ran:
            raise ValueError(f"record: every mode runs once in every round; missing {missing}, got {len(self.blocks)}")

    @property
    def modes(self) -> tuple[str, ...]:
        """In the order of the first round."""
        return tuple(dict.fromkeys(block.mode for block in self.blocks))

    def of(self, mode: str) -> tuple[Block, ...]:
        """The blocks of a mode, by round."""
        return tuple(sorted((b for b in self.blocks if b.mode == mode), key=lambda b: b.round))


def save(record: Record, path: Path) -> None:
    path.write_text(json.dumps(asdict(record), indent=1) + "\n")


def load(path: Path) -> Record:
    found = json.loads(path.read_text())
    return Record(found["conditions"], tuple(_block(fields) for fields in found["blocks"]))


def machine() -> str:
    """What a reader must know of the machine, in a line."""
    release = ".".join(platform.release().split(".")[:2])
    return (
        f"{os.cpu_count()} cores {platform.machine()}, {platform.system()} {release},"
        f" Python {platform.python_version()}, torch {torch.__version__}"
    )


def machines(told: Iterable[str | None]) -> str:
    """The machine lines of a page's records, each once; for the head of the page."""
    return "; ".join(dict.fromkeys(filter(None, told))) or "machine not kept in these records"


def _block(fields: dict[str, Any]) -> Block:
    """JSON has lists where a block has tuples."""
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Block(**fields | lists)
