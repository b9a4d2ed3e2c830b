"""What a schedule is: a table of what runs when on which worker, with weights of which age; it checks itself.

Runtime, reference and simulator read the same table, so an order exists once. N workers, K stages and M
micro-batches per step are three numbers: data-parallel schedules have M = N (one micro-batch a worker),
pipelines N = K.

Source: cyclic data parallelism (Fournier & Oyallon, 2024); a table that refuses to be wrong is diffrax's
tableau.

One cell block of a schedule: the forward or backward of one stage on one micro-batch, at a tick.

Ticks are the events of a schedule in the order of time: where all stages cost the same they are equal slots,
elsewhere a tick lasts until the next event and an action may fill several.

Source: the word `_Action` of torch.distributed.pipelining, which prints and parses back.

What makes a schedule impossible: each law as a function that names the guilty worker.

A table that passes can be carried out: every stage of every micro-batch runs once each way on one worker, in
order, no worker does two things at once in the steady state, and every version of the weights asked for
exists by then.

Source: design 2.3; the version law is the event condition behind cyclic data parallelism (Fournier & Oyallon,
2024).

A schedule as text: one line per worker, one cell per tick, then the age of the weights.

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

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Literal, NamedTuple

__all__ = [
    "Action",
    "Cell",
    "Flaw",
    "Kind",
    "Row",
    "Schedule",
    "Staleness",
    "Table",
    "draw",
    "flaw",
    "lines_of",
    "one_pass",
]

Kind = Literal["F", "B"]


class Action(NamedTuple):
    """`start` and `ticks` are those of step 0; step t does the same t periods later."""

    start: int
    ticks: int
    kind: Kind
    stage: int
    micro_batch: int

    @property
    def end(self) -> int:
        """The first tick at which the result is there."""
        return self.start + self.ticks


Row = tuple[Action, ...]  # what one worker does for one step, in order of time
Staleness = tuple[tuple[int, ...], ...]  # [micro_batch][stage], in steps


def one_pass(micro_batch: int, stages: int, start: int) -> Row:
    """All forwards, then all backwards of one micro-batch, a tick each."""
    forwards = [Action(start + stage, 1, "F", stage, micro_batch) for stage in range(stages)]
    backwards = [Action(start + 2 * stages - 1 - stage, 1, "B", stage, micro_batch) for stage in range(stages)]
    return tuple(sorted(forwards + backwards))


Flaw = tuple[int, str]  # the guilty worker, and what is wrong
Places = dict[tuple[Kind, int, int], tuple[int, Action]]  # (kind, micro_batch, stage) -> (worker, action)


def flaw(rows: Sequence[Row], staleness: Staleness, period: int, uncoupled: Sequence[int] = ()) -> Flaw | None:
    """The first law the table breaks, or None.

    Args:
        uncoupled: stages that need no gradient of the next one.
    """
    if strange := [stage for stage in uncoupled if not 0 <= stage < len(staleness[0]) - 1]:
        return 0, f"stages {strange} are uncoupled, but have no stage after them"
    for law in (_cells, _complete, partial(_in_order, uncoupled=uncoupled), _one_thing_at_a_time, _versions_exist):
        for found in law(rows, staleness, period):
            return found
    return None


def _cells(rows: Sequence[Row], staleness: Staleness, period: int) -> Iterator[Flaw]:
    stages, micro_batches = len(staleness[0]), len(staleness)
    for worker, row in enumerate(rows):
        for action in row:
            if action.start < 0 or action.ticks < 1 or action.kind not in ("F", "B"):
                yield worker, f"{action} is no action; want start >= 0, ticks >= 1, kind F or B"
            if not (0 <= action.stage < stages and 0 <= action.micro_batch < micro_batches):
                yield worker, f"{action} names no stage below {stages} and micro-batch below {micro_batches}"
        if list(row) != sorted(row):
            yield worker, "actions are not in the order of their ticks"


def _complete(rows: Sequence[Row], staleness: Staleness, period: int) -> Iterator[Flaw]:
    seen: set[tuple[Kind, int, int]] = set()
    for worker, row in enumerate(rows):
        for action in row:
            key = action.kind, action.micro_batch, action.stage
            if key in seen:
                yield (
                    worker,
                    f"{action.kind} of micro-batch {key[1]}, stage {key[2]} happens twice; want once",
                )
            seen.add(key)
    for micro_batch in range(len(staleness)):
        for stage in range(len(staleness[0])):
            for kind in ("F", "B"):
                if (kind, micro_batch, stage) not in seen:
                    yield 0, f"{kind} of micro-batch {micro_batch}, stage {stage} never happens; want once"


def _in_order(rows: Sequence[Row], staleness: Staleness, period: int, uncoupled: Sequence[int]) -> Iterator[Flaw]:
    places, last = _places(rows), len(staleness[0]) - 1
    learns = {last, *uncoupled}  # from losses of their own
    for micro_batch in range(len(staleness)):
        forwards = [places["F", micro_batch, stage] for stage in range(last + 1)]
        way = list(pairwise(forwards))
        for stage in reversed(range(last + 1)):
            is_alone = stage in learns
            before_it = places["F", micro_batch, stage] if is_alone else places["B", micro_batch, stage + 1]
            way.append((before_it, places["B", micro_batch, stage]))
        for (_, before), (worker, after) in way:
            if after.start < before.end:
                yield (
                    worker,
                    (
                        f"micro-batch {micro_batch}: {after.kind}{after.stage} starts at tick {after.start}, "
                        f"but {before.kind}{before.stage} ends at tick {before.end}"
                    ),
                )
        for stage in range(last + 1):
            forward, backward = places["F", micro_batch, stage][0], places["B", micro_batch, stage][0]
            if forward != backward:
                yield (
                    backward,
                    f"micro-batch {micro_batch}, stage {stage}: its activations are on worker {forward}",
                )


def _one_thing_at_a_time(rows: Sequence[Row], staleness: Staleness, period: int) -> Iterator[Flaw]:
    for worker, row in enumerate(rows):
        busy: set[int] = set()
        for action in row:
            for tick in range(action.start, action.end):
                if tick % period in busy:
                    yield worker, f"at tick {tick} two actions meet (a step begins every {period} ticks)"
                busy.add(tick % period)


def _versions_exist(rows: Sequence[Row], staleness: Staleness, period: int) -> Iterator[Flaw]:
    """Version t of a stage exists when the last backward of step t - 1 of that stage has ended."""
    places = _places(rows)
    for stage in range(len(staleness[0])):
        complete = max(places["B", micro_batch, stage][1].end for micro_batch in range(len(staleness)))
        for micro_batch, ages in enumerate(staleness):
            worker, forward = places["F", micro_batch, stage]
            if ages[stage] < 0:
                yield worker, f"micro-batch {micro_batch}, stage {stage}: staleness {ages[stage]} is negative"
            missing = complete - (ages[stage] + 1) * period - forward.start
            if missing > 0:
                yield (
                    worker,
                    (
                        f"micro-batch {micro_batch}, stage {stage}: weights {ages[stage]} steps old appear {missing} "
                        f"ticks after the forward; want {ages[stage] - (-missing // period)} or more"
                    ),
                )


def _places(rows: Sequence[Row]) -> Places:
    return {
        (action.kind, action.micro_batch, action.stage): (worker, action)
        for worker, row in enumerate(rows)
        for action in row
    }


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
    cells = [_drawn_cells(row, width) for row in rows]
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


def _drawn_cells(row: Row, width: int) -> list[str]:
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


Cell = tuple[int, int, int]  # (step, micro_batch, stage)


@dataclass(frozen=True)
class Schedule:
    """One step of every worker; step t is the same t periods later, and steps overlap.

    Args:
        ticks: per worker its actions of step 0, in order of time.
        staleness: [micro_batch][stage], how many steps old the weights are that it reads, forward and
            backward.
        period: ticks from one step to the next.
        uncoupled: stages that get no gradient from the next one: they learn from a loss of their own.

    Raises:
        ValueError: the table cannot be carried out; the message shows it with the guilty line marked.
    """

    name: str
    period: int
    ticks: tuple[Row, ...]
    staleness: Staleness
    uncoupled: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ticks or not self.staleness or not self.staleness[0] or self.period < 1:
            raise ValueError(f"schedule: {self.name} wants a worker, a stage, a micro-batch and a period of 1 or more")
        if len({len(ages) for ages in self.staleness}) > 1:
            raise ValueError(f"schedule: {self.name} has micro-batches with different numbers of stages")
        found = flaw(self.ticks, self.staleness, self.period, self.uncoupled)
        if found is not None:
            drawn = draw(self._drawn, guilty=found[0])
            raise ValueError(f"schedule: worker {found[0]}: {found[1]}\n{drawn}")

    def __str__(self) -> str:
        return draw(self._drawn)

    @property
    def _drawn(self) -> Table:
        return self.name, self.period, self.ticks, self.staleness, self.uncoupled

    @property
    def workers(self) -> int:
        return len(self.ticks)

    @property
    def stages(self) -> int:
        return len(self.staleness[0])

    @property
    def micro_batches(self) -> int:
        return len(self.staleness)

    @property
    def stale_share(self) -> float:
        """Share of the (micro-batch, stage) pairs that read weights older than the newest."""
        return sum(age > 0 for ages in self.staleness for age in ages) / (self.micro_batches * self.stages)

    @property
    def overlaps(self) -> bool:
        """Whether steps overlap: a step may be over only in a later call than the one that hands it in."""
        return bool(self.stale_share or self.uncoupled)

    def version(self, place: Cell, drains: Collection[int] = ()) -> int:
        """Which weights a place reads: those that `version` optimizer steps have made.

        A drain before step d lets everything of the steps before it finish, so that step d starts as step 0
        does: nothing older than version d is read from there on.
        """
        step, micro_batch, stage = place
        floor = max((drain for drain in drains if drain <= step), default=0)
        return max(step - self.staleness[micro_batch][stage], floor)

    def worker_of(self, micro_batch: int, stage: int) -> int:
        """The worker that runs this stage for this micro-batch, both ways."""
        if (micro_batch, stage) not in self._workers:
            raise KeyError(f"schedule: {self.name} has no micro-batch {micro_batch}, stage {stage}")
        return self._workers[micro_batch, stage]

    def action(self, kind: str, micro_batch: int, stage: int) -> Action:
        """The action of step 0 that is the `kind` ("F" or "B") of this stage for this micro-batch."""
        return self._actions[kind, micro_batch, stage]

    @cached_property
    def _workers(self) -> dict[tuple[int, int], int]:
        return {(a.micro_batch, a.stage): worker for worker, row in enumerate(self.ticks) for a in row}

    @cached_property
    def _actions(self) -> dict[tuple[str, int, int], Action]:
        return {(a.kind, a.micro_batch, a.stage): a for row in self.ticks for a in row}

    def held(self, tick: int) -> set[Cell]:
        """Activations held during a tick, workers side by side: from forward to backward, both included."""
        return self._between(tick, backward_counts=True)

    def held_after(self, tick: int) -> set[Cell]:
        """Activations held after a tick when one device does it all: each action whole, backwards first."""
        return self._between(tick, backward_counts=False)

    def _between(self, tick: int, backward_counts: bool) -> set[Cell]:
        found: set[Cell] = set()
        for row in self.ticks:
            backwards = {(a.micro_batch, a.stage): a for a in row if a.kind == "B"}
            for forward in (a for a in row if a.kind == "F"):
                backward = backwards[forward.micro_batch, forward.stage]
                end = backward.end if backward_counts else backward.start
                first = max(0, (tick - end) // self.period + 1)
                last = (tick - forward.start) // self.period
                found |= {(step, forward.micro_batch, forward.stage) for step in range(first, last + 1)}
        return found
