"""Cyclic data parallelism on a pipeline: a stage a process, one forward and one backward by turns, and no flush.

Source: Fournier & Oyallon, 2024 (pipeline mode); Narayanan et al., PipeDream-2BW, 2021.
"""

from armillary.plans.units import bytes_text
from armillary.schedules.costs import Planned
from armillary.schedules.cyclic import cyclic_pipeline
from armillary.schedules.in_pipeline import PIPELINE_OPTIONS, pipeline_method, utilisation
from armillary.schedules.registry import SCHEDULES


def _notes(planned: Planned) -> list[str]:
    balance, flush = utilisation(planned)
    count, most = planned.options.micro_batches, planned.counts.peak(planned.stages)
    return [
        f"utilisation of {planned.options.stages} devices: {balance:.0%} with this cut and no bubble; a flush pipeline "
        f"(1F1B) of {count} micro-batches, exact, would reach {flush:.0%}",
        f"the fullest stage holds {bytes_text(most)} of activations at its peak",
    ]


SCHEDULES.register(
    "pipeline",
    pipeline_method(
        table=lambda options: cyclic_pipeline(options.stages, options.micro_batches, options.slack),
        notes=_notes,
        knows=PIPELINE_OPTIONS | {"slack", "corrections"},
        examples=({"workers": 3}, {"workers": 3, "micro_batches": 2}, {"workers": 2, "micro_batches": 4, "slack": 1}),
    ),
)
