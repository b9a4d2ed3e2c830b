"""The cyclic tables: workers one uniform delay apart, on their own or along a pipeline. Memory and traffic are even.

Data parallelism: worker i starts i T / N after worker 0 (T: one forward and backward of the whole model) and never
pauses between steps. A stage reads the newest weights where they exist in time, else those one step older: with C_j the
share of the forward and backward cost that lies before stage j, stage j of worker i is fresh iff C_j >= (N - 1 - i +
slack) / N. slack 0 is the paper's second rule, slack >= N its first (all one step old); 1 gives the network one hop of
time.

Pipeline: one forward, one backward, no flush, no bubble, weights one step old at most. Stage j runs the forward of the
g-th micro-batch at tick 2g + j and its backward at tick 2g + 2K - 1 - j, so it keeps K - j of them. Micro-batch m of a
step finds the newest weights iff m + j >= K - 1 + slack. slack 0 is as early as they exist; slack >= M is the rule of
PipeDream-2BW, all one step old.

Source: Fournier & Oyallon, 2024; Narayanan et al., PipeDream-2BW, 2021. Departures: stages may be unequal, K may differ
from N and M from K (the authors' code has the rule right for K = N only); `slack` is ours.

What rings have in common: a micro-batch a process, all stages on each, an owner for each stage's optimizer state.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

from armillary.plans.mesh import DATA
from armillary.plans.units import bytes_text
from armillary.schedules.costs import Planned, peak_over_workers
from armillary.schedules.method import Method, OptionRules, Options, Placing, Residencies, ScheduleOptions, StageLoad
from armillary.schedules.schedule import Action, Kind, Row, Schedule

__all__ = ["RING_OPTIONS", "cyclic", "cyclic_pipeline", "ring_method", "shared_memory"]


def cyclic(
    workers: int, stages: int | None = None, slack: int = 0, costs: Sequence[Sequence[float]] | None = None
) -> Schedule:
    """N = `workers` staggered micro-batches through K = `stages` stages (as many as workers if not said).

    Args:
        costs: per stage (forward, backward), in any unit; only ratios matter. Equal if not said.

    Raises:
        ValueError: a count below 1, a negative slack, or costs that do not fit the stages.
    """
    stages = stages or (len(costs) if costs is not None else workers)
    pairs = (
        [(Fraction(f), Fraction(b)) for f, b in costs] if costs is not None else [(Fraction(1), Fraction(1))] * stages
    )
    if workers < 1 or slack < 0 or len(pairs) != stages or min(map(min, pairs)) <= 0:
        raise ValueError(
            f"cyclic: want workers >= 1, slack >= 0 and one positive (forward, backward) cost per stage; "
            f"got {workers=}, {slack=}, {stages=}, {costs=}"
        )
    whole = sum((f + b for f, b in pairs), Fraction(0))
    spans = [_spans(whole * worker / workers, pairs) for worker in range(workers)]
    events = sorted({start % whole for row in spans for start, *_ in row})
    number = {event: tick for tick, event in enumerate(events)}

    def tick(time: Fraction) -> int:
        return int(time // whole) * len(events) + number[time % whole]

    rows: list[Row] = [
        tuple(Action(tick(start), tick(end) - tick(start), kind, stage, worker) for start, end, kind, stage in row)
        for worker, row in enumerate(spans)
    ]
    before = [sum((f + b for f, b in pairs[:stage]), Fraction(0)) / whole for stage in range(stages)]
    staleness = tuple(
        tuple(int(share * workers < workers - 1 - worker + slack) for share in before) for worker in range(workers)
    )
    return Schedule("cyclic", len(events), tuple(rows), staleness)


def _spans(start: Fraction, costs: Sequence[tuple[Fraction, Fraction]]) -> list[tuple[Fraction, Fraction, Kind, int]]:
    """(start, end, kind, stage) of one worker's step, without pause; every end is the start of the next."""
    spans: list[tuple[Fraction, Fraction, Kind, int]] = []
    order: list[tuple[Kind, int]] = [("F", stage) for stage in range(len(costs))]
    order += [("B", stage) for stage in reversed(range(len(costs)))]
    for kind, stage in order:
        end = start + costs[stage][kind == "B"]
        spans.append((start, end, kind, stage))
        start = end
    return spans


RING_OPTIONS = frozenset({"slack", "micro_batches", "stages", "points", "costs", "clip_norm", "clip_by"})


def ring_method(
    notes: Callable[[Planned], list[str]],
    examples: tuple[Options, ...] = ({"workers": 3}, {"workers": 2, "stages": 4, "slack": 1}),
    lends: bool = False,
) -> Method:
    """A ring's registry entry; lends: see `Residencies`."""
    return Method(
        table=_table,
        options=OptionRules(RING_OPTIONS, implied=_one_each, follows=("micro_batches",)),
        examples=examples,
        placement=Placing(DATA),
        residency=Residencies(lends_weights=lends),
        notes=notes,
    )


def _one_each(given: Options, workers: int) -> Options:
    return {"micro_batches": workers}


def _table(options: ScheduleOptions) -> Schedule:
    return cyclic(options.micro_batches, options.stages, options.slack, options.costs or None)


def shared_memory(schedule: Schedule, stages: Sequence[StageLoad]) -> list[str]:
    alone, together = sum(stage.activation_bytes for stage in stages), peak_over_workers(schedule, stages)
    return [
        f"one worker's activations peak at {bytes_text(alone)} as in plain data parallelism; only their sum over the "
        f"{schedule.workers} workers is lower, {bytes_text(together)} against {bytes_text(alone * schedule.workers)}"
    ]


def cyclic_pipeline(stages: int, micro_batches: int, slack: int = 0) -> Schedule:
    """K stages on K workers, M micro-batches a step.

    Raises:
        ValueError: M < K - 1, which would need weights two steps old or a bubble.
    """
    if stages < 1 or micro_batches < max(1, stages - 1) or slack < 0:
        raise ValueError(
            f"cyclic_pipeline: {stages} stages want at least {max(1, stages - 1)} micro-batches "
            f"and slack >= 0, got {micro_batches=}, {slack=}; fewer would need weights two steps old: "
            f"take more micro-batches, or a pipeline that is exact"
        )
    rows = tuple(
        tuple(
            sorted(
                [Action(2 * m + stage, 1, "F", stage, m) for m in range(micro_batches)]
                + [Action(2 * m + 2 * stages - 1 - stage, 1, "B", stage, m) for m in range(micro_batches)]
            )
        )
        for stage in range(stages)
    )
    staleness = tuple(
        tuple(int(m + stage < stages - 1 + slack) for stage in range(stages)) for m in range(micro_batches)
    )
    return Schedule("cyclic_pipeline", 2 * micro_batches, rows, staleness)
