"""The flush pipeline GPipe: all forwards, then all backwards; idle while it fills and while it empties.

Source: Huang et al., GPipe, 2019. Departure: backwards run in the order of the forwards (as in torch), not
reversed, so that gradients are summed in micro-batch order.
"""

from armillary.plans.units import bytes_text
from armillary.schedules.costs import Planned
from armillary.schedules.in_pipeline import pipeline_method, utilisation
from armillary.schedules.registry import SCHEDULES
from armillary.schedules.schedule import Action, Schedule

__all__ = ["gpipe"]


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """K stages on K workers, M micro-batches a step; bubble (K - 1) / (M + K - 1)."""
    half = micro_batches + stages - 1
    rows = tuple(
        tuple(Action(m + stage, 1, "F", stage, m) for m in range(micro_batches))
        + tuple(Action(half + m + stages - 1 - stage, 1, "B", stage, m) for m in range(micro_batches))
        for stage in range(stages)
    )
    return Schedule("gpipe", 2 * half, rows, ((0,) * stages,) * micro_batches)


def _notes(planned: Planned) -> list[str]:
    _, flush = utilisation(planned)
    most = planned.counts.peak(planned.stages)
    return [
        f"utilisation of {planned.options.stages} devices: {flush:.0%} with this cut, the bubble included",
        f"the fullest stage holds {bytes_text(most)} of activations at its peak",
    ]


SCHEDULES.register(
    "gpipe",
    pipeline_method(
        table=lambda options: gpipe(options.stages, options.micro_batches),
        notes=_notes,
    ),
)
