"""The tables and the bars, into figures.md: python -m benchmarks.peers.report [FOLDER OF RESULTS]   (measures nothing)

A step's time is from a barrier before a turn to a barrier after it, over its steps, so no rank is left out. Ratios are
taken between turns of one round, then their median. Ends with 1 if a contender computed something else than the truth.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring.bars import Bar
from benchmarks.measuring.bars import table as rows_of
from benchmarks.measuring.ratios import over_best, over_fastest_of_rounds, quartiles
from benchmarks.measuring.record import Block, Record
from benchmarks.peers.heats import entries
from benchmarks.peers.lines import PROGRAMS, changed_lines
from benchmarks.peers.truth import departure

HERE = Path(__file__).parent
TOLERANCE = 1e-4  # of a loss, relative
FREE = ("compute_only", "link")  # train for themselves, or not at all
OURS = ("ours", "ours_ahead")  # as planned, and the same with prefetch
SCHEDULED = {True: "all scheduled alike", False: "scheduled by the kernel", None: "how they were scheduled is not kept"}
HEADER = (
    "contender", "{unit}/s", "ms a step, all ranks: median (quartiles)", "ours is faster by: median (rounds, from-to)",
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
    pinned: bool | None = None  # by the lab, all alike
    whole_packets: bool = False

    @property
    def links(self) -> str:
        return f"{self.mbit:g} Mbit/s" if self.mbit else "unshaped links"


def load(path: Path) -> Found:
    found = json.loads(path.read_text())
    heats = tuple(Record(heat["conditions"], tuple(_block(b) for b in heat["blocks"])) for heat in found["heats"])
    truth, how = tuple(found["truth"]), (found.get("pinned"), found.get("whole packets", False))
    return Found(found["case"], found["Mbit/s"], found["unit"], found["samples"], truth, found["refused"], heats, *how)


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
    parts = [_heat(found, record) for record in found.heats if len(record.modes) > 1]
    reasons: dict[str, list[str]] = {}
    for name, reason in found.refused.items():
        reasons.setdefault(reason, []).append(name)
    said = [f"- {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    return "\n".join(parts) + ("\nWithout a number:\n\n" + "\n".join(said) + "\n" if said else "")


def _heat(found: Found, record: Record) -> str:
    conditions = ", ".join(f"{name} {said}" for name, said in record.conditions.items())
    packets = "; links pass whole packets" if found.whole_packets else ""
    lines = [f"{conditions}; {SCHEDULED[found.pinned]}{packets}.", ""]
    rows = [tuple(cell.format(unit=found.unit) for cell in HEADER), ("---",) * len(HEADER)]
    rows += [_row(found, record, mode) for mode in record.modes]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _row(found: Found, record: Record, mode: str) -> tuple[str, ...]:
    blocks = record.of(mode)
    wall = quartiles([block.wall_seconds for block in blocks])
    ratios = faster(record, OURS[0], mode) if mode != "link" and OURS[0] in record.modes else []
    means = [statistics.fmean(hosts) / 1e6 for hosts in zip(*(block.sent_bytes for block in blocks), strict=True)]
    rate = found.samples * int(record.conditions["workers"]) / wall.median
    trains = mode != "link"
    return (
        mode,
        f"{rate:,.0f}" if trains else "-",
        f"{wall.median * 1e3:.0f} ({wall.first * 1e3:.0f}-{wall.third * 1e3:.0f})",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-",
        f"{statistics.fmean(means):.2f} ({max(means):.2f})",
        f"{statistics.median(block.cpu_seconds for block in blocks) * 1e3:.0f}",
        f"{max(block.peak_bytes for block in blocks) / 2**20:.0f}",
        str(changed_lines(mode)) if mode in PROGRAMS else "-",
        f"{worst_departure(found, record, mode):.0e}" if trains else "-",
    )


def bars(everything: Sequence[Found]) -> list[Bar]:
    """Those of the large tables and of dense models."""
    found = {(one.case, one.mbit): one for one in everything}
    large = [bar for mbit in (100.0, 1000.0) for bar in _large_tables(mbit, found.get(("lm8", mbit)))]
    return large + [bar for mbit in (1000.0, 0.0) for bar in _dense(mbit, found.get(("dense", mbit)))]


def _at_least(says: str, limit: float, ratios: Sequence[float]) -> Bar:
    return Bar(says, f"{limit:g} or more", _middle(ratios), lambda it: it >= limit)


def _at_most(says: str, limit: float, ratios: Sequence[float]) -> Bar:
    return Bar(says, f"{limit:g} or less", _middle(ratios), lambda it: it <= limit)


def _middle(ratios: Sequence[float]) -> list[float]:
    return [statistics.median(ratios)] if ratios else []


def _met(found: Found | None, *names: str) -> Record | None:
    """The first heat in which all of them ran."""
    return next((heat for heat in found.heats if set(names) <= set(heat.modes)), None) if found else None


def _faster(found: Found | None, mode: str, than: str) -> list[float]:
    """As `faster`; nothing where they did not meet."""
    record = _met(found, mode, than)
    return faster(record, mode, than) if record else []


def _large_tables(mbit: float, found: Found | None) -> list[Bar]:
    asked = []
    for mode in OURS:
        where = f"lm8, {mbit:g} Mbit/s: {mode}"
        if mbit > 500:
            over = [1 / ratio for ratio in _faster(found, mode, "compute_only")]
            asked.append(_at_most(f"{where}, times compute_only", 1.35, over))
            rivals = {"torchrec_by_hand": 1.15}
        else:
            alone = _met(found, mode, "compute_only", "link")
            floor = f"{where}, times the larger of compute_only and its bytes over the link"
            asked.append(_at_most(floor, 1.25, floors(alone, mode) if alone else []))
            rivals = {"ddp_sparse": 3.4, "torchrec_by_hand": 1.35, "horovod_sparse": 5, "horovod_merged": 5}
        for rival, limit in rivals.items():
            asked.append(_at_least(f"{where}, times as fast as {rival}", limit, _faster(found, mode, rival)))
    scrambled = f"lm8, {mbit:g} Mbit/s: ours, times as fast as ours_scrambled"
    return [*asked, _at_least(scrambled, 0.97, _faster(found, "ours", "ours_scrambled"))]


def _dense(mbit: float, found: Found | None) -> list[Bar]:
    where = f"dense, {f'{mbit:g} Mbit/s' if mbit else 'unshaped links'}: ours, times as fast as DDP"
    record, said, over = _met(found, "ours", "ddp"), "", list[float]()
    if record:
        ratios = {rival: faster(record, "ours", rival) for rival in record.modes if rival.startswith("ddp")}
        best, over = over_best(ratios)
        said = f" ({best}; {statistics.median(over_fastest_of_rounds(ratios)):.2f} of the fastest of each round)"
    asked = [_at_least(f"{where} with its best buckets{said}", 0.97, over)]
    return [*asked, _at_least(f"{where} at its default", 1.2, _faster(found, "ours", "ddp"))] if mbit else asked


def _block(fields: Mapping[str, Any]) -> Block:
    return Block(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    text = page(folder)
    print(text)
    (folder.parent / "figures.md").write_text(text)
    wrong = [stray for found in _all(folder) for stray in strays(found)]
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


def _all(folder: Path) -> list[Found]:
    """In the order of the cases, the slowest links first."""
    order = [*entries()]
    return sorted(map(load, folder.glob("*.json")), key=lambda found: (order.index(found.case), found.mbit or math.inf))


def page(folder: Path) -> str:
    """Every case with its machine and table, then the bars."""
    everything = _all(folder)
    parts = [f"## {found.case}, {found.links}\n\n{table(found)}" for found in everything]
    return "\n".join([*parts, "## Bars", "", *rows_of(bars(everything))]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
