"""The tables of the README and the bars: python -m benchmarks.peers.report [FOLDER OF RESULTS]

A step's time is from a barrier before a turn to a barrier after it, over its steps, so no rank is left out. Ratios are
taken between turns of one round, then their median. Ends with 1 if a contender computed something else than the truth.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring.ratios import over_best, over_fastest_of_rounds, quartiles
from benchmarks.measuring.record import Block, Record
from benchmarks.peers.lines import PROGRAMS, changed_lines
from benchmarks.peers.truth import departure

HERE = Path(__file__).parent
TOLERANCE = 1e-4  # of a loss, relative
FREE = ("compute_only", "link")  # train for themselves, or not at all
HEADER = (
    "contender", "{unit}/s", "ms a step, all ranks: median (quartiles)", "ours is faster by: median (rounds)",
    "MB a worker sends: mean (worst)", "CPU, ms a rank", "peak MiB a worker", "lines", "loss off by",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """One case at one speed of links."""

    case: str
    mbit: float
    unit: str
    samples: float
    truth: tuple[float, ...]
    refused: Mapping[str, str]
    heats: tuple[Record, ...]

    def heat_of(self, *names: str) -> Record:
        """The first heat in which all of them ran.

        Raises:
            ValueError: they did not meet.
        """
        for record in self.heats:
            if set(names) <= set(record.modes):
                return record
        raise ValueError(f"report: {', '.join(names)} did not meet in {self.case} at {self.mbit:g} Mbit/s")


def load(path: Path) -> Found:
    found = json.loads(path.read_text())
    heats = tuple(Record(heat["conditions"], tuple(_block(b) for b in heat["blocks"])) for heat in found["heats"])
    return Found(
        found["case"], found["Mbit/s"], found["unit"], found["samples"], tuple(found["truth"]), found["refused"], heats
    )


def faster(record: Record, mode: str, than: str) -> list[float]:
    """Times as fast, round by round; above 1 `mode` is the faster one."""
    pairs = zip(record.of(mode), record.of(than), strict=True)
    return [other.wall_seconds / one.wall_seconds for one, other in pairs]


def worst_departure(found: Found, record: Record, mode: str) -> float:
    """Of the losses at the end of its turns, relative to one process."""
    steps = int(record.conditions["warm steps"]) + int(record.conditions["timed steps"])
    return max(departure(block.loss, found.truth[steps - 1]) for block in record.of(mode))


def strays(found: Found) -> list[str]:
    """Contenders whose losses are not the truth's, each with its departure."""
    return [
        f"{found.case} at {found.mbit:g} Mbit/s: {mode} is off by {off:.1e}"
        for record in found.heats
        for mode in record.modes
        if mode not in FREE and not (off := worst_departure(found, record, mode)) <= TOLERANCE
    ]


def link_speed(record: Record) -> float:
    """Bytes a second that the worst host's link reached in an all-reduce."""
    return statistics.median(max(block.sent_bytes) / block.wall_seconds for block in record.of("link"))


def floors(record: Record, mode: str = "ours") -> list[float]:
    """Round by round: seconds of `mode` over the larger of compute only and its bytes at the speed links reach."""
    speed = link_speed(record)
    return [
        one.wall_seconds / max(alone.wall_seconds, max(*one.sent_bytes, *one.received_bytes) / speed)
        for one, alone in zip(record.of(mode), record.of("compute_only"), strict=True)
    ]


def table(found: Found) -> str:
    parts = [_heat(found, record) for record in found.heats]
    reasons: dict[str, list[str]] = {}
    for name, reason in found.refused.items():
        reasons.setdefault(reason, []).append(name)
    said = [f"- {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    return "\n".join(parts) + ("\nWithout a number:\n\n" + "\n".join(said) + "\n" if said else "")


def _heat(found: Found, record: Record) -> str:
    conditions = ", ".join(f"{name} {said}" for name, said in record.conditions.items())
    rows = [tuple(cell.format(unit=found.unit) for cell in HEADER), ("---",) * len(HEADER)]
    rows += [_row(found, record, mode) for mode in record.modes]
    return "\n".join([f"{conditions}.", "", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _row(found: Found, record: Record, mode: str) -> tuple[str, ...]:
    blocks = record.of(mode)
    wall = quartiles([block.wall_seconds for block in blocks])
    ratios = faster(record, "ours", mode)
    means = [statistics.fmean(hosts) / 1e6 for hosts in zip(*(block.sent_bytes for block in blocks), strict=True)]
    rate = found.samples * int(record.conditions["workers"]) / wall.median
    trains = mode != "link"
    return (
        mode,
        f"{rate:,.0f}" if trains else "-",
        f"{wall.median * 1e3:.0f} ({wall.first * 1e3:.0f}-{wall.third * 1e3:.0f})",
        f"{statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})" if trains else "-",
        f"{statistics.fmean(means):.2f} ({max(means):.2f})",
        f"{statistics.median(block.cpu_seconds for block in blocks) * 1e3:.0f}",
        f"{max(block.peak_bytes for block in blocks) / 2**20:.0f}",
        str(changed_lines(mode)) if mode in PROGRAMS else "-",
        f"{worst_departure(found, record, mode):.0e}" if trains else "-",
    )


@dataclass(frozen=True)
class Bar:
    """What was wanted, and what was found; `holds` says whether that is enough."""

    wanted: str
    found: float
    holds: bool


def at_least(wanted: str, limit: float, ratios: Sequence[float]) -> Bar:
    middle = statistics.median(ratios)
    return Bar(f"{wanted}: at least {limit:g}", middle, middle >= limit)


def at_most(wanted: str, limit: float, ratios: Sequence[float]) -> Bar:
    middle = statistics.median(ratios)
    return Bar(f"{wanted}: at most {limit:g}", middle, middle <= limit)


def bars(found: Found) -> list[Bar]:
    """Those of the case; none for a case without any."""
    if found.case == "lm8":
        return _large_tables(found)
    return _dense(found) if found.case == "dense" else []


def _large_tables(found: Found) -> list[Bar]:
    """Of both plans of ours that ran: as planned, and the same with prefetch."""
    record = found.heat_of("ours", "compute_only")
    asked = [bar for mode in record.modes if mode in ("ours", "ours_ahead") for bar in _large_tables_by(found, mode)]
    for name in ("horovod_sparse", "horovod_merged"):
        for heat in (heat for heat in found.heats if found.mbit < 500 and name in heat.modes):
            for mode in (mode for mode in heat.modes if mode in ("ours", "ours_ahead")):
                where = f"{mode}, {found.mbit:g} Mbit/s: times as fast as {name}"
                asked.append(at_least(where, 5, faster(heat, mode, name)))
    if any("ours_scrambled" in heat.modes for heat in found.heats):
        ratios = faster(found.heat_of("ours", "ours_scrambled"), "ours", "ours_scrambled")
        asked.append(at_least(f"{found.mbit:g} Mbit/s: times as fast as with scrambled ids", 0.97, ratios))
    return asked


def _large_tables_by(found: Found, mode: str) -> list[Bar]:
    met = {name: found.heat_of("ours", name) for name in ("ddp_sparse", "torchrec_by_hand", "compute_only")}
    where = f"{mode}, {found.mbit:g} Mbit/s"
    rows = {name: faster(record, mode, name) for name, record in met.items()}
    if found.mbit > 500:
        over = [1 / ratio for ratio in rows["compute_only"]]
        return [
            at_least(f"{where}: times as fast as torchrec_by_hand", 1.15, rows["torchrec_by_hand"]),
            at_most(f"{where}: times compute_only", 1.35, over),
        ]
    return [
        at_least(f"{where}: times as fast as ddp_sparse", 3.4, rows["ddp_sparse"]),
        at_least(f"{where}: times as fast as torchrec_by_hand", 1.35, rows["torchrec_by_hand"]),
        at_most(f"{where}: times the larger of compute only and bytes / link", 1.25, floors(met["compute_only"], mode)),
    ]


def _dense(found: Found) -> list[Bar]:
    record = found.heat_of("ours", "ddp")
    rivals = [mode for mode in record.modes if mode.startswith("ddp")]
    where = f"{found.mbit:g} Mbit/s" if found.mbit else "unshaped"
    ratios = {rival: faster(record, "ours", rival) for rival in rivals}
    best, over = over_best(ratios)
    strict = statistics.median(over_fastest_of_rounds(ratios))
    said = f"{where}: times as fast as DDP with its best buckets ({best}; {strict:.2f} of the fastest of each round)"
    asked = [at_least(said, 0.97, over)]
    if not found.mbit:
        return asked
    return [*asked, at_least(f"{where}: times as fast as DDP at its default", 1.2, ratios["ddp"])]


def _block(fields: Mapping[str, Any]) -> Block:
    return Block(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    everything = [load(path) for path in sorted(folder.glob("*.json"))]
    for found in everything:
        links = f"{found.mbit:g} Mbit/s" if found.mbit else "unshaped links"
        print(f"### {found.case}, {links}\n\n{table(found)}")
    print("| bar | found | |\n| --- | --- | --- |")
    for bar in (bar for found in everything for bar in bars(found)):
        print(f"| {bar.wanted} | {bar.found:.2f} | {'holds' if bar.holds else 'missed'} |")
    wrong = [stray for found in everything for stray in strays(found)]
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
