"""The flush pipeline 1F1B: backwards start early, so stage j keeps min(M, K - j) micro-batches instead of M.

Source: PipeDream-Flush (Narayanan et al., 2021); the same bubble as GPipe.
"""

from armillary.plans.advice import Advice, Situation, advises, planned_in_stages
from armillary.plans.units import bytes_text
from armillary.schedules.costs import Planned
from armillary.schedules.in_pipeline import pipeline_method, utilisation
from armillary.schedules.registry import SCHEDULES
from armillary.schedules.schedule import Action, Schedule

__all__ = ["one_f_one_b"]


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


def _notes(planned: Planned) -> list[str]:
    _, flush = utilisation(planned)
    most = planned.counts.peak(planned.stages)
    return [
        f"utilisation of {planned.options.stages} devices: {flush:.0%} with this cut, the bubble included; stage j "
        f"keeps {planned.options.stages} - j micro-batches; forwards that all come first would keep "
        f"{planned.options.micro_batches}",
        f"the fullest stage holds {bytes_text(most)} of activations at its peak",
    ]


SCHEDULES.register(
    "one_f_one_b",
    pipeline_method(
        table=lambda options: one_f_one_b(options.stages, options.micro_batches),
        notes=_notes,
    ),
    aliases={"1f1b": {}},
)


@advises("1F1B pipeline", "a stage of the model on each rank", "methods/pipelines.md")
def _advice(situation: Situation) -> Advice:
    return planned_in_stages(situation, "one_f_one_b")
