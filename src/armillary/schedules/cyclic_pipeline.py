"""The cyclic pipeline: one forward, one backward, no flush, no bubble, weights one step old at most.

Stage j runs the forward of the g-th micro-batch at tick 2g + j and its backward at tick 2g + 2K - 1 - j, so
it keeps K - j of them. Micro-batch m of a step finds the newest weights iff m + j >= K - 1 + slack. slack 0
is as early as they exist; slack >= M is the rule of PipeDream-2BW, all one step old.

Source: Fournier & Oyallon, 2024 (pipeline mode); Narayanan et al., PipeDream-2BW, 2021. Departures: M may
differ from K; `slack` is ours.
"""

from armillary.schedules.schedule import Action, Schedule

__all__ = ["cyclic_pipeline"]


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
