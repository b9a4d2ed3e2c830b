"""The flush pipeline GPipe: all forwards, then all backwards; idle while it fills and while it empties.

Source: Huang et al., GPipe, 2019. Departure: backwards run in the order of the forwards (as in torch), not
reversed, so that gradients are summed in micro-batch order.
"""

from armillary.schedules.action import Action
from armillary.schedules.registry import register
from armillary.schedules.schedule import Schedule

__all__ = ["gpipe"]


@register({"stages": 3, "micro_batches": 4})
def gpipe(stages: int, micro_batches: int) -> Schedule:
    """K stages on K workers, M micro-batches a step; bubble (K - 1) / (M + K - 1)."""
    half = micro_batches + stages - 1
    rows = tuple(
        tuple(Action(m + stage, 1, "F", stage, m) for m in range(micro_batches))
        + tuple(Action(half + m + stages - 1 - stage, 1, "B", stage, m) for m in range(micro_batches))
        for stage in range(stages)
    )
    return Schedule("gpipe", 2 * half, rows, ((0,) * stages,) * micro_batches)
