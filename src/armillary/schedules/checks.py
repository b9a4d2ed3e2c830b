"""What makes a schedule impossible: each law as a function that names the guilty worker.

A table that passes can be carried out: every stage of every micro-batch runs once each way on one worker, in
order, no worker does two things at once in the steady state, and every version of the weights asked for
exists by then.

Source: design 2.3; the version law is the event condition behind cyclic data parallelism (Fournier & Oyallon,
2024).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from armillary.schedules.action import Action, Kind, Row, Staleness

__all__ = ["Flaw", "flaw"]

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
