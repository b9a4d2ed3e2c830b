"""How many bytes of activations a schedule's table keeps at its peak, and the pace at which shared devices work.

Counted in the steady state, where steps overlap as the table says.
"""

from collections.abc import Iterable, Sequence

from armillary.schedules.schedule import Cell, Schedule
from armillary.schedules.stage_load import StageLoad

__all__ = ["peak_on_one_device", "peak_over_workers", "stagger"]


def peak_on_one_device(schedule: Schedule, stages: Sequence[StageLoad]) -> int:
    """Bytes of activations held at most in the steady state when one device does it all, one action after the other."""
    return max(_bytes(schedule.held_after(tick), stages) for tick in _steady(schedule))


def peak_over_workers(schedule: Schedule, stages: Sequence[StageLoad], only: int | None = None) -> int:
    """The same with workers side by side: of all of them together, or of `only` one. With what their stages remember of
    samples, which stays with a worker."""

    def mine(tick: int) -> set[Cell]:
        held = schedule.held(tick)
        return {place for place in held if only is None or schedule.worker_of(place[1], place[2]) == only}

    kept = [j for j in range(len(stages)) if only is None or schedule.worker_of(0, j) == only]
    remembered = sum(stages[j].cache_bytes for j in kept)
    return remembered + max(_bytes(mine(tick), stages) for tick in _steady(schedule))


def stagger(stages: Sequence[float]) -> float:
    """Time from one micro-batch to the next on shared devices, from those of a forward and backward of each stage.

    A device keeps a micro-batch until it comes back from all stages above, and stage j of K has K - j devices to take
    turns: the slowest such tail sets the pace.
    """
    return max(sum(stages[j:]) / (len(stages) - j) for j in range(len(stages)))


def _steady(schedule: Schedule) -> range:
    return range(2 * schedule.period, 4 * schedule.period)


def _bytes(held: Iterable[Cell], stages: Sequence[StageLoad]) -> int:
    return sum(stages[stage].activation_bytes for _, _, stage in held)
