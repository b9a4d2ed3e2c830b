"""What the records say, in the form of the paper's tables: samples per second, and whether the plan loses.

A plan may be one of the two it is held against: it is not held against itself, then, since what would be found is noise
alone. It runs twice by turns, and the bar allows for what it differs by from itself.
"""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.measuring.bars import Bar
from benchmarks.measuring.record import Record

__all__ = ["LENGTHS", "RIVALS", "ablation", "bars", "noise", "rate", "scaling", "sweep"]

LENGTHS = (120, 60, 30, 15, 8, 4, 1)  # of the sweep
RIVALS = ("all_reduce", "owned")


def rate(record: Record, mode: str) -> float:
    """Samples per second of all workers: the median over rounds of a step from barrier to barrier."""
    seconds = statistics.median(block.wall_seconds for block in record.of(mode))
    return float(record.conditions["samples"]) * int(record.conditions["workers"]) / seconds


def paired(record: Record, mode: str, rival: str) -> float:
    """Speed of `mode` over that of `rival`, round by round; the median."""
    return statistics.median(
        other.wall_seconds / one.wall_seconds for one, other in zip(record.of(mode), record.of(rival), strict=True)
    )


def sweep(records: Mapping[str, Record]) -> str:
    """A row a length: alpha, the rates, and the plan against the better of the two."""
    rows = [
        (
            "length", "alpha", "all_reduce, words/s", "owned, words/s", "planned, words/s", "planned / better",
            "same plan twice", "the plan",
        ),
        ("---",) * 8,
    ]  # fmt: skip
    for name, record in records.items():
        rates = [rate(record, mode) for mode in ("all_reduce", "owned", "planned")]
        cells = [f"{one:,.0f}" for one in rates]
        ratios = f"{_against_better(record):.3f}", f"{1 + noise(record):.3f}"
        length, alpha = name.split("_")[1], str(record.conditions["alpha"])
        double = f" (this is {one})" if (one := record.conditions.get("planned is")) else ""
        rows.append((length, alpha, *cells, *ratios, f"{record.conditions['planned']}{double}"))
    return _markdown(rows)


def _against_better(record: Record, rivals: Sequence[str] = RIVALS) -> float:
    return min(paired(record, "planned", rival) for rival in rivals)


def noise(record: Record) -> float:
    """What the same plan differs by from itself, as a share."""
    ratio = paired(record, "planned", "planned_again")
    return max(ratio, 1 / ratio) - 1


def bars(records: Mapping[str, Record]) -> list[Bar]:
    """At no point of the sweep is the plan slower than the better of all_reduce and owned by more than noise."""
    found = {length: records.get(f"sweep_{length}") for length in LENGTHS}
    return [
        Bar(
            f"length {length}: times as fast as the better of {' and '.join(RIVALS)}, noise allowed for", "1 or more",
            [_against_better(one, _others(one)) * (1 + noise(one))] if one else [], lambda it: it >= 1,
        )
        for length, one in found.items()
    ]  # fmt: skip


def _others(record: Record) -> list[str]:
    """The rivals that are other plans than the one chosen."""
    return [rival for rival in RIVALS if rival != record.conditions.get("planned is")]


def ablation(records: Mapping[str, Record]) -> str:
    rows: list[tuple[str, ...]] = []
    for record in records.values():
        header = ("samples per second", *record.modes)
        rows += [header, ("---",) * len(header)] if not rows else []
        named = f"{record.conditions['workload']}, {record.conditions['unit']}/s"
        rows.append((named, *(f"{rate(record, mode):,.0f}" for mode in record.modes)))
    return _markdown(rows)


def scaling(records: Mapping[str, Record]) -> str:
    rows: list[tuple[str, ...]] = [("workload", "workers", "all_reduce", "hybrid", "planned"), ("---",) * 5]
    for record in records.values():
        cells = [f"{rate(record, mode):,.0f}" if mode in record.modes else "-" for mode in rows[0][2:]]
        unit = f"{record.conditions['workload']}, {record.conditions['unit']}/s"
        rows.append((unit, str(record.conditions["workers"]), *cells))
    return _markdown(rows)


def _markdown(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
