"""What `armillary compare` does: says how near a run came to its forecast; exit code 3 if not near enough."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from armillary.cli.launch import run_in_workers
from armillary.cli.names import UNEQUAL
from armillary.cli.terminal import as_json, console_here, put
from armillary.plans.group import Band
from armillary.plans.units import Page, Table
from armillary.session.compare import Compared, ComparedLine, compare_run

__all__ = ["compare_asked"]

UNITS = {"sent_bytes": ("sent kB", 1e3, 1), "memory_bytes": ("memory MiB", 1 << 20, 1), "seconds": ("ms", 1e-3, 2)}
WHAT_TO_DO = (
    "to do: time outside means that something else ran there, then or when the plan was made: train again, or widen "
    "the band (--seconds 0.3); bytes or memory outside, that batches were unlike the first ones: plan again\n"
)
NAMES = {"sent_bytes": "bytes", "memory_bytes": "memory", "seconds": "time"}


def compare_asked(run: Path, band: Band, is_json: bool) -> NoReturn:
    """Compares, and ends the process."""

    def prepare() -> Compared:
        return compare_run(run, band)

    def body(found: Compared) -> int:
        if is_json:
            print(as_json({**vars(found), "is_within": found.is_within}))
        else:
            put(console_here(), _page(found))
        return 0 if found.is_within else UNEQUAL

    run_in_workers(1, prepare, body)


def _page(found: Compared) -> Page:
    header = ["group", "exchange"]
    for title, _, _ in UNITS.values():
        header += [f"{title} plan", "run", "off"]
    header += ["quartiles", "verdict"]
    table = Table(header, [_cells(line) for line in found.lines], (0, 1, 11, 12))
    band = ", ".join(
        f"{NAMES[name]} {getattr(found.band, name):.0%} ({getattr(found.band.small, name):.1%})" for name in UNITS
    )
    legend = _reasons(found) + ("" if found.is_within else WHAT_TO_DO)
    legend += (
        f"bands, in brackets the share of the whole step below which a group's difference is let pass: {band}\n"
        "plan: what was forecast; run: what was measured\n"
        "off: of the larger of the two, as the bands are; x22 is 22 times the forecast\n"
        "group: bytes and memory are means over workers, time is in flight since the last rank had asked\n"
        "quartiles: the first and the third of all steps' ms; a group's time is judged by them, ms is the median\n"
        "step: the median, from batch to update (a script's: from end to end); memory is of all tensors in its fullest "
        "moment, which a script does not count\n"
        "process: what it grew by; libraries and the allocator need more than tensors, which nobody forecasts"
    )
    return f"The run beside its forecast: {_verdict(found)}.", table, legend


def _verdict(found: Compared) -> str:
    count, excused = (sum(len(figures) for figures in each) for each in _told(found))
    if count:
        some = "1 figure is outside its band; the last column names it"
        return some if count == 1 else f"{count} figures are outside their bands; the last column names them"
    if excused:
        return f"no figure is outside, and {excused} pass by an exception, named below the table"
    return "every figure is within its band"


def _told(found: Compared) -> tuple[list[Sequence[str]], list[Sequence[str]]]:
    """Of every line the figures that are outside, and those that pass by an exception."""
    return [line.outside for line in found.lines], [[*line.passes] for line in found.lines]


def _short(line: ComparedLine) -> str:
    """In the table, where there is no room for reasons."""
    if line.forecast is None:
        return "shown"
    outside = ", ".join(NAMES[name] for name in line.outside)
    return f"{outside} out" if outside else "passes" if line.passes else "within"


def _reasons(found: Compared) -> str:
    """A line for every row that passes by an exception."""
    rows = [(line.group, [f"{NAMES[name]} {why}" for name, why in line.passes.items()]) for line in found.lines]
    return "".join(f"{group} passes: {', '.join(whys)}\n" for group, whys in rows if whys)


def _cells(line: ComparedLine) -> list[str]:
    cells = [line.group, line.exchange]
    for name, (_, unit, digits) in UNITS.items():
        seen = getattr(line.measured, name)
        measured = _number(seen / unit, digits)
        if line.forecast is None:
            cells += ["-", measured if seen else "-", "-"]
            continue
        expected = getattr(line.forecast, name)
        if not expected and not seen:
            cells += ["-", "-", "-"]
            continue
        cells += [
            _number(expected / unit, digits),
            measured,
            _off(seen, expected) if expected else "-",
        ]
    return [*cells, _middle(line), _short(line)]


def _off(seen: float, expected: float) -> str:
    if seen > 10 * expected:
        return f"x{seen / expected:,.0f}"
    share = (seen - expected) / max(seen, expected)
    return f"{share:+.1%}" if abs(share) < 0.1 else f"{share:+.0%}"


def _number(value: float, digits: int) -> str:
    """With four figures at most, or as many as there are before the point."""
    size = abs(value)
    return f"{value:,.{min(digits, 0 if size >= 1000 else 1 if size >= 100 else 2)}f}"


def _middle(line: ComparedLine) -> str:
    if line.middle is None:
        return "-"
    _, unit, digits = UNITS["seconds"]
    return " to ".join(_number(seconds / unit, digits) for seconds in (line.middle.low, line.middle.high))
