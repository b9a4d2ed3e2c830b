"""A schedule as text: one line per worker, one cell per tick, then the age of the weights.

    cyclic: 3 workers, 3 stages, 3 micro-batches, a step every 6 ticks
    worker 0, micro-batch 0: F0 F1 F2 B2 B1 B0 .  .  .  .   staleness 1 1 0
    worker 1, micro-batch 1: .  .  F0 F1 F2 B2 B1 B0 .  .   staleness 1 0 0
    worker 2, micro-batch 2: .  .  .  .  F0 F1 F2 B2 B1 B0  staleness 0 0 0

The line's label says what all its cells share, the cells what differs: the stage after a micro-batch label,
the micro-batch after a stage label, else "F1.0" (stage 1, micro-batch 0). "-" is an action that is still
running, "." idle. The ages run over the stages, after a stage label over the micro-batches, else over both
with bars between micro-batches. A header that ends in "uncoupled 0" names stages that get no gradient from the
next one.
"""

from collections.abc import Sequence

from armillary.schedules.action import Row, Staleness

__all__ = ["Table", "draw", "lines_of"]

Table = tuple[str, int, tuple[Row, ...], Staleness, tuple[int, ...]]  # name, period, rows, staleness, uncoupled


def draw(table: Table, guilty: int | None = None) -> str:
    """The picture; the line of the `guilty` worker is marked."""
    name, period, rows, staleness, uncoupled = table
    head = (
        f"{name}: {_count(len(rows), 'worker')}, {_count(len(staleness[0]), 'stage')}, "
        f"{_count(len(staleness), 'micro-batch', 'es')}, a step every {_count(period, 'tick')}"
    )
    head += f", uncoupled {' '.join(map(str, uncoupled))}" if uncoupled else ""
    return "\n".join([head, *lines_of(rows, staleness, guilty)])


def lines_of(rows: Sequence[Row], staleness: Staleness, guilty: int | None = None) -> list[str]:
    """The picture below its header."""
    width = max((action.end for row in rows for action in row), default=0)
    labels = [_label(worker, row) for worker, row in enumerate(rows)]
    cells = [_cells(row, width) for row in rows]
    room = max((len(cell) for line in cells for cell in line), default=1)
    lines = []
    for worker, (label, line) in enumerate(zip(labels, cells)):
        drawn = " ".join(cell.ljust(room) for cell in line)
        mark = "  <- here" if worker == guilty else ""
        lines.append(f"{label.ljust(max(map(len, labels)))} {drawn}  staleness {_ages(rows[worker], staleness)}{mark}")
    return lines


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _shared(row: Row) -> tuple[str | None, int]:
    """What all actions of a line share: the micro-batch, else the stage, else nothing."""
    micro_batches, stages = {action.micro_batch for action in row}, {action.stage for action in row}
    if len(micro_batches) == 1:
        return "micro-batch", micro_batches.pop()
    if len(stages) == 1:
        return "stage", stages.pop()
    return None, 0


def _label(worker: int, row: Row) -> str:
    shared, number = _shared(row)
    return f"worker {worker}:" if shared is None else f"worker {worker}, {shared} {number}:"


def _cells(row: Row, width: int) -> list[str]:
    cells, shared = ["."] * width, _shared(row)[0]
    for action in row:
        own = {"micro-batch": f"{action.stage}", "stage": f"{action.micro_batch}"}
        cells[action.start] = action.kind + own.get(shared or "", f"{action.stage}.{action.micro_batch}")
        cells[action.start + 1 : action.end] = ["-"] * (action.ticks - 1)
    return cells


def _ages(row: Row, staleness: Staleness) -> str:
    shared = _shared(row)[0]
    places = sorted({(action.micro_batch, action.stage) for action in row})
    groups: dict[int, list[str]] = {}
    for micro_batch, stage in places:
        exists = micro_batch < len(staleness) and stage < len(staleness[0])
        age = str(staleness[micro_batch][stage]) if exists else "?"  # an impossible table is drawn, too
        groups.setdefault(0 if shared else micro_batch, []).append(age)
    return " | ".join(" ".join(group) for group in groups.values())
