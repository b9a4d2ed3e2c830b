"""The flush pipeline 1F1B: backwards start early, so stage j keeps min(M, K - j) micro-batches instead of M.

Source: PipeDream-Flush (Narayanan et al., 2021); the same bubble as GPipe.
"""

from armillary.schedules.action import Action
from armillary.schedules.registry import register
from armillary.schedules.schedule import Schedule

__all__ = ["one_f_one_b"]


@register({"stages": 3, "micro_batches": 4})
def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """K stages on K workers, M micro-batches a step; bubble (K - 1) / (M + K - 1)."""
    rows = tuple(
        tuple(
            sorted(
                [Action(_forward(m, stage, stages), 1, "F", stage, m) for m in range(micro_batches)]
                + [Action(2 * m + 2 * stages - 1 - stage, 1, "B", stage, m) for m in range(micro_batches)]
            )
        )
        for stage in range(stages)
    )
    return Schedule("one_f_one_b", 2 * (micro_batches + stages - 1), rows, ((0,) * stages,) * micro_batches)


def _forward(micro_batch: int, stage: int, stages: int) -> int:
    """At once while the pipeline fills, then every second tick."""
    return stage + micro_batch if micro_batch < stages - stage else stage + 2 * micro_batch
