"""What a race says: a row a side, and whether all sides learnt alike and reached the target."""

import math
import statistics

from benchmarks.measuring.bars import Bar
from benchmarks.parallax.race import Curve, Race, apart, points, reached

__all__ = ["ROUNDING", "bars", "table"]

REST = "all_reduce"  # how most parameters travel; a table names the others
ROUNDING = 1e-4  # of a loss, relative, over the whole run: sums in another order, many steps on
EPSILONS = {"float32": 2.0**-23, "float64": 2.0**-52}
FIRST_TURNS = 3  # shown apart, since training multiplies what rounding left
HEADER = (
    "side", "steps to it", "s of training to it", "times as fast", "ms a step: median of turns",
    "MB a worker sends a step", "there", "losses off by: first turns, all",
)  # fmt: skip


def bars(race: Race) -> list[Bar]:
    """Every side reaches the target, and learns as the first one does, but for rounding."""
    said = f"{race.conditions['task']}, {race.conditions['precision']}"
    rival, *others = race.curves
    least = _digits(ROUNDING * EPSILONS[race.conditions["precision"]] / EPSILONS["float32"])
    there = [
        Bar(f"{said}: {name} reaches the target (1: it does)", "1", [bool(reached(curve, race.goal))], bool)
        for name, curve in race.curves.items()
    ]
    alike = [
        Bar(
            f"{said}: digits that losses of {name} share with those of {rival}, worst step", f"{least:.1f} or more",
            [_digits(apart(race.curves[name], _first(race)))], lambda it: it >= least,
        )
        for name in others
    ]  # fmt: skip
    return there + alike


def _digits(share: float) -> float:
    return -math.log10(share) if share else math.inf


def _first(race: Race) -> Curve:
    return next(iter(race.curves.values()))


def table(race: Race) -> str:
    """A row a side; speed is against the first side, at the same number of steps if both need as many."""
    goal = race.goal
    lines = [f"{_told(race)}\n", f"| {' | '.join(HEADER)} |", "| --- " * len(HEADER) + "|"]
    at = reached(_first(race), goal)
    for name, curve in race.curves.items():
        mine, last = reached(curve, goal), points(curve)[-1]
        there = (f"{mine.step}", f"{mine.seconds:.1f}") if mine else ("not reached", f"{last.seconds:.1f} so far")
        faster = f"{at.seconds / mine.seconds:.2f}" if at and mine else "-"
        step_ms = 1e3 * statistics.median(turn.seconds / turn.steps for turn in curve)
        sent_mb = sum(turn.sent_bytes for turn in curve) / last.step / 1e6
        value = ", ".join(f"{name} {(mine or last).metrics[name]:.4g}" for name in (goal.metric, *race.beside))
        early, whole = (apart(curve[:turns], _first(race)[:turns]) for turns in (FIRST_TURNS, None))
        cells = (*there, faster, f"{step_ms:.0f}", f"{sent_mb:.2f}", value, f"{early:.1e}, {whole:.1e}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _told(race: Race) -> str:
    """What a reader must know before the rows."""
    told, goal = race.conditions, race.goal
    sizes = ", ".join(f"{name} {size}" for name, size in told["workload"].items())
    ways = [f"{name} by {exchange}" for name, exchange in told["plan"].items() if exchange != REST]
    return (
        f"{told['task']} ({sizes}), {told['precision']}, {told['optimizer']}, to {goal.metric} {goal.target:g}; "
        f"{told['workers']} workers, {told['Mbit/s']:g} Mbit/s, {told['machine']}, load before "
        f"{told['load before']:.1f}. DDP's buckets: {told['bucket MiB']:g} MiB. "
        f"Planned: {', '.join([*ways, f'the rest by {REST}'])}."
    )
