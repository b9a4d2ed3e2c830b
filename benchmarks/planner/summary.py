"""What the grid says: how much slower the choice is than the best that was measured, and how far forecasts are off.

A cell is one JSON file of `job.py`. A plan's seconds are the median over its turns; one that was far behind has but the
three steps of the first round. The plan chosen by price ran twice by turns: the difference between the two is what the
machine does by itself, and the two together are that plan.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring.bars import Bar, table
from benchmarks.measuring.record import machines

__all__ = ["BARS", "Error", "Outcome", "bars", "load", "outcome", "report"]

CHOSEN, AGAIN, ALONE = "chosen", "chosen again", "alone"
FIGURES = ("payload_bytes", "memory_bytes", "seconds")
WORST = 5  # cells listed


@dataclass(frozen=True)
class Bars:
    """What the grid should show; shares."""

    usual_regret: float = 0.05
    usual_cells: float = 0.90
    largest_regret: float = 0.15
    payload_bytes: float = 0.02
    memory_bytes: float = 0.10
    seconds: float = 0.15


BARS = Bars()


@dataclass(frozen=True)
class Error:
    """(forecast - measured) / measured of one plan; not a number where that was not measured. sent_bytes: with the
    headers of packets, which no plan forecasts. payload_bytes: without."""

    plan: str
    sent_bytes: float
    payload_bytes: float
    memory_bytes: float
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """One cell.

    seconds: by plan, what was measured. priced, carried_out: names of plans, the cheapest by price and the one that was
    carried out after the best by forecast were timed in the job. noise: of the same plan twice.
    """

    cell: str
    machine: str | None
    workers: int
    seconds: dict[str, float]
    priced: str
    carried_out: str
    noise: float
    compute_error: float
    errors: tuple[Error, ...]

    @property
    def best(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    def regret(self, plan: str) -> float:
        return self.seconds[plan] / self.seconds[self.best] - 1

    def error(self, plan: str) -> Error:
        return next(error for error in self.errors if error.plan == plan)


def load(path: Path) -> Outcome:
    return outcome(path.stem, json.loads(path.read_text()))


def outcome(cell: str, found: dict[str, Any]) -> Outcome:
    """From what `job.py` kept."""
    first, turns = {block["mode"]: block for block in found["first"]}, found["turns"]
    twice = [statistics.median(turns[name]) for name in (CHOSEN, AGAIN)]
    pooled = {**turns, CHOSEN: [*turns[CHOSEN], *turns[AGAIN]]}
    names = [name for name in found["forecast"] if name != AGAIN]
    seconds = {
        name: statistics.median(pooled[name]) if name in pooled else first[name]["wall_seconds"] for name in names
    }
    errors = []
    for name in names:
        forecast = found["forecast"][name]
        counted = [first[name]["sent_bytes"], first[name].get("sent_payload_bytes") or [math.nan]]
        if found["conditions"].get("ranks_per_host", 1) > 1:  # counted is what leaves a host
            counted = [[math.nan], [math.nan]]
        sent_bytes, payload_bytes = map(statistics.fmean, counted)
        errors.append(
            Error(
                name,
                forecast["sent_bytes"] / sent_bytes - 1,
                forecast["sent_bytes"] / payload_bytes - 1,
                forecast["memory_bytes"] / found["held_bytes"][name] - 1,
                forecast["seconds"] / seconds[name] - 1,
            )
        )
    return Outcome(
        cell=cell,
        machine=found["conditions"].get("machine"),
        workers=found["conditions"]["workers"],
        seconds=seconds,
        priced=CHOSEN,
        carried_out=found["frozen"],
        noise=max(twice) / min(twice) - 1,
        compute_error=found["compute_seconds"] / statistics.median(turns[ALONE]) - 1,
        errors=tuple(errors),
    )


def report(found: Sequence[Outcome]) -> str:
    """Markdown: the machine, a row a cell, the bars, what lies beside them, the worst cells."""
    parts = [machines(one.machine for one in found), _cells(found), "\n".join(table(bars(found)))]
    return "\n\n".join([*parts, _beside(found), _by_workers(found), _worst(found)]) + "\n"


def bars(found: Sequence[Outcome]) -> list[Bar]:
    """Of the plans carried out, in per cent."""
    regrets = [one.regret(one.carried_out) for one in found]
    said = f"cells whose plan carried out is within {BARS.usual_regret:.0%} of the best, per cent"
    asked = [
        Bar(said, f"{BARS.usual_cells:.0%} or more", [100 * _usual(regrets)], lambda it: it >= 100 * BARS.usual_cells),
        _at_most("regret of the plan carried out, the largest, per cent", BARS.largest_regret, max(regrets)),
    ]
    errors = [one.error(one.carried_out) for one in found]
    for name in FIGURES:
        told = f"{name} of the plan carried out, forecast off by, median, per cent"
        asked.append(_at_most(told, getattr(BARS, name), _median_off(errors, name)))
    payloads = [abs(error.payload_bytes) for error in errors if not math.isnan(error.payload_bytes)]
    told = "payload_bytes of the plan carried out, forecast off by, the largest, per cent"
    asked.append(_at_most(told, BARS.payload_bytes, max(payloads, default=math.nan)))
    told = "bytes with headers, where the payload was not counted, forecast off by, median, per cent"
    uncounted = [error for error in errors if math.isnan(error.payload_bytes)]
    asked.append(_at_most(told, BARS.payload_bytes, _median_off(uncounted, "sent_bytes")))
    return asked


def _at_most(said: str, limit: float, share: float) -> Bar:
    return Bar(said, f"{limit:.0%} or less", [] if math.isnan(share) else [100 * share], lambda it: it <= 100 * limit)


def _usual(regrets: Sequence[float]) -> float:
    """The share of them that is small enough."""
    return sum(regret <= BARS.usual_regret for regret in regrets) / len(regrets)


def _median_off(errors: Iterable[Error], name: str) -> float:
    """Of those that were measured."""
    known = [abs(off) for error in errors if not math.isnan(off := getattr(error, name))]
    return statistics.median(known) if known else math.nan


def _cells(found: Sequence[Outcome]) -> str:
    header = (
        "cell", "plan carried out", "ms a step", "best measured", "regret", "regret by price alone", "same plan twice",
        "forecast off: payload", "bytes with headers", "memory", "seconds", "compute alone",
    )  # fmt: skip
    rows = [header, ("---",) * len(header)]
    for one in found:
        error = one.error(one.carried_out)
        rows.append(
            (
                one.cell, one.carried_out, f"{one.seconds[one.carried_out] * 1e3:.1f}", one.best,
                f"{one.regret(one.carried_out):.1%}", f"{one.regret(one.priced):.1%}", f"{one.noise:.1%}",
                _percent(error.payload_bytes, "+.1%"), _percent(error.sent_bytes, "+.1%"),
                f"{error.memory_bytes:+.0%}", f"{error.seconds:+.0%}",
                f"{one.compute_error:+.0%}",
            )
        )  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _beside(found: Sequence[Outcome]) -> str:
    regrets = [[one.regret(one.carried_out) for one in found], [one.regret(one.priced) for one in found]]
    usual, largest = (" | ".join(f"{fold(column):.1%}" for column in regrets) for fold in (_usual, max))
    lines = [
        "| regret | plan carried out | by price alone |", "| --- | --- | --- |",
        f"| cells in which it is at most {BARS.usual_regret:.0%} | {usual} |", f"| largest | {largest} |", "",
        "| forecast off by, median | plan carried out | every candidate |", "| --- | --- | --- |",
    ]  # fmt: skip
    for name in FIGURES:
        one = _median_off((cell.error(cell.carried_out) for cell in found), name)
        every = _median_off((error for cell in found for error in cell.errors), name)
        lines.append(f"| {name} | {_percent(one, '.1%')} | {_percent(every, '.1%')} |")
    noise = statistics.median(one.noise for one in found)
    return "\n".join([*lines, "", f"The same plan twice differs by {noise:.1%} (median over the cells)."])


def _percent(share: float, form: str) -> str:
    """What was not counted is a stroke."""
    return "-" if math.isnan(share) else format(share, form)


def _worst(found: Sequence[Outcome]) -> str:
    lines = ["The worst cells:", ""]
    for name in FIGURES:
        known = [one for one in found if not math.isnan(getattr(one.error(one.carried_out), name))]
        ordered = sorted(known, key=lambda one: abs(getattr(one.error(one.carried_out), name)), reverse=True)[:WORST]
        said = ", ".join(f"{one.cell} {getattr(one.error(one.carried_out), name):+.0%}" for one in ordered)
        lines.append(f"* {name}: {said or '-'}")
    ordered = sorted(found, key=lambda one: one.regret(one.carried_out), reverse=True)[:WORST]
    said = ", ".join(
        f"{one.cell} {one.regret(one.carried_out):.0%} ({one.carried_out}, best {one.best})" for one in ordered
    )
    return "\n".join([*lines, f"* regret: {said}"])


def _by_workers(found: Sequence[Outcome]) -> str:
    lines = ["| simulator against measured | cells | off by, median | within 15 % |", "| --- | --- | --- | --- |"]
    for workers in sorted({one.workers for one in found}):
        errors = [abs(one.error(one.carried_out).seconds) for one in found if one.workers == workers]
        within = sum(error <= BARS.seconds for error in errors)
        lines.append(f"| {workers} workers | {len(errors)} | {statistics.median(errors):.1%} | {within} |")
    return "\n".join(lines)
