"""Reads a schedule's picture back, so that a test may write the table that it means."""

import re
from collections.abc import Sequence

from armillary.schedules import Action, Kind, Row, Schedule
from armillary.schedules.schedule import Table

__all__ = ["parse", "read"]

_HEADER = re.compile(
    r"(\S+): (\d+) workers?, (\d+) stages?, (\d+) micro-batch(?:es)?, a step every (\d+) ticks?"
    r"(?:, uncoupled ([\d ]+))?$"
)
_LINE = re.compile(r"worker (\d+)(?:, (micro-batch|stage) (\d+))?: (.*?) +staleness ([\d |]+)$")
_CELL = re.compile(r"([FB])(\d+)(?:\.(\d+))?$")


def parse(text: str) -> Schedule:
    """The schedule of a picture: `parse(str(schedule)) == schedule`.

    Raises:
        ValueError: the text is no picture, or the table it shows cannot be carried out.
    """
    return Schedule(*read(text))


def read(text: str) -> Table:
    """The table of a picture.

    Raises:
        ValueError: a line cannot be read; the message quotes it.
    """
    head, *lines = [line.strip() for line in text.strip().splitlines()]
    found = _HEADER.match(head)
    if not found:
        raise ValueError(f"schedule: {head!r} is no header; want 'NAME: N workers, K stages, M micro-batches, ...'")
    name, workers, stages, micro_batches, period = found[1], *(int(found[place]) for place in range(2, 6))
    if len(lines) != workers:
        raise ValueError(f"schedule: the header says {workers} workers, but {len(lines)} lines follow")
    rows: list[Row] = []
    ages: dict[tuple[int, int], int] = {}
    for worker, line in enumerate(lines):
        parts = _LINE.match(line)
        if not parts or int(parts[1]) != worker:
            raise ValueError(f"schedule: {line!r} is no line of worker {worker}")
        row = _row(parts[4].split(), parts[2], int(parts[3] or 0))
        rows.append(row)
        numbers = [int(number) for number in parts[5].replace("|", " ").split()]
        places = sorted({(action.micro_batch, action.stage) for action in row})
        if len(places) != len(numbers):
            raise ValueError(f"schedule: worker {worker} has {len(places)} ages to give and gives {len(numbers)}")
        ages.update(zip(places, numbers))
    wanted = [(micro_batch, stage) for micro_batch in range(micro_batches) for stage in range(stages)]
    if sorted(ages) != wanted:
        raise ValueError(f"schedule: the picture has {len(ages)} cells of micro-batch and stage, want {len(wanted)}")
    return (
        name,
        period,
        tuple(rows),
        tuple(tuple(ages[m, j] for j in range(stages)) for m in range(micro_batches)),
        tuple(map(int, (found[6] or "").split())),
    )


def _row(cells: Sequence[str], shared: str | None, number: int) -> Row:
    actions: list[Action] = []
    for tick, cell in enumerate(cells):
        if cell == "-" and actions and actions[-1].end == tick:
            actions[-1] = actions[-1]._replace(ticks=actions[-1].ticks + 1)
        elif cell != ".":
            actions.append(_action(tick, cell, shared, number))
    return tuple(actions)


def _action(tick: int, cell: str, shared: str | None, number: int) -> Action:
    found = _CELL.match(cell)
    if not found or (found[3] is None) == (shared is None):
        raise ValueError(f"schedule: cell {cell!r} at tick {tick} cannot be read; want F1, B1, F1.0, '-' or '.'")
    kind: Kind = "F" if found[1] == "F" else "B"
    if shared == "micro-batch":
        return Action(tick, 1, kind, stage=int(found[2]), micro_batch=number)
    if shared == "stage":
        return Action(tick, 1, kind, stage=number, micro_batch=int(found[2]))
    return Action(tick, 1, kind, stage=int(found[2]), micro_batch=int(found[3]))
