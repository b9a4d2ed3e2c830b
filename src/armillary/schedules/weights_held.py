"""How many copies of a stage's weights a worker holds under schedules whose stages stay with one process."""

from armillary.schedules.method import ScheduleOptions

__all__ = ["is_stale", "kept_copies", "mean_over_workers"]


def is_stale(options: ScheduleOptions, stage: int) -> bool:
    """Whether some micro-batch reads old weights of the stage, so that an older version is kept."""
    return any(ages[stage] for ages in options.schedule().staleness)


def kept_copies(options: ScheduleOptions, stage: int, workers: int, slots: float) -> float:
    """Weight, gradient, optimizer state; where read an older version, and what corrections remember."""
    stale = is_stale(options, stage)
    return 2 + stale + slots + sum(correction.copies for correction in options.built_corrections()) * stale


def mean_over_workers(options: ScheduleOptions, stage: int, workers: int, slots: float) -> float:
    """The same where one worker of all holds the stage."""
    return kept_copies(options, stage, workers, slots) / workers
