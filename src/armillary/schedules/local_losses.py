"""A pipeline whose stages learn from losses of their own: no bubble, no old weights, and no gradient on the wire.

Stage j makes forward and backward of a micro-batch back to back, one tick after stage j - 1. A head makes its loss; the
last stage has the model's own. So this is not end-to-end training.

Source: Laskin et al., Parallel Training of Deep Networks with Local Updates, 2020 (chunked).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn

from armillary.local_losses import AskedOfSplit, HeadedPart, LocalLosses, split
from armillary.plans.advice import Advice, Situation, advises, not_for, planned_in_stages
from armillary.plans.units import bytes_text
from armillary.schedules.costs import Planned
from armillary.schedules.in_pipeline import PIPELINE_OPTIONS, pipeline_method, utilisation
from armillary.schedules.method import Objectives, ScheduleOptions
from armillary.schedules.registry import SCHEDULES
from armillary.schedules.schedule import Action, Schedule

__all__ = ["local_losses"]


def local_losses(stages: int, micro_batches: int) -> Schedule:
    """K stages on K workers, M micro-batches a step, period 2 M."""
    rows = tuple(
        tuple(
            action
            for m in range(micro_batches)
            for action in (Action(2 * m + j, 1, "F", j, m), Action(2 * m + j + 1, 1, "B", j, m))
        )
        for j in range(stages)
    )
    ages = ((0,) * stages,) * micro_batches
    return Schedule("local_losses", 2 * micro_batches, rows, ages, tuple(range(stages - 1)))


def _check(options: ScheduleOptions) -> None:
    if options.stages < 2:
        raise ValueError(
            "schedule: local_losses with one stage is backpropagation; take stages=2 or more, or schedule accumulation"
        )
    if options.clip_norm is not None and options.clip_by != "stage":
        raise ValueError(
            f"schedule: local_losses clips stage by stage, since no stage waits for another; got clip_by="
            f"{options.clip_by}. Pass clip_by=stage"
        )


def _own_loss(stage: nn.Module, output: Any, batch: Any, loss: Callable[[Any, Any], Any]) -> Any:
    """What the head of the stage's part makes of its output."""
    (part,) = _parts(stage)
    return part.own_loss(output, batch, loss)


def _parts(stage: nn.Module) -> list[HeadedPart]:
    return [module for module in stage.modules() if isinstance(module, HeadedPart)]


def _refuse_stages(options: ScheduleOptions, stages: Sequence[nn.Module]) -> None:
    heads = [[part.head is not None for part in _parts(stage)] for stage in stages]
    if heads != [[True]] * (len(stages) - 1) + [[False]]:
        raise ValueError(
            f"schedule: local_losses wants each stage to be one part with a head, and the last one without; train "
            f"armillary.local_losses.split(model, loss, example, at=[...]), with {len(stages) - 1} cuts for "
            f"stages={len(stages)}"
        )
    _refuse_other_split(options, _parts(stages[0])[0].asked)


def _refuse_other_split(options: ScheduleOptions, asked: AskedOfSplit) -> None:
    """
    Raises:
        ValueError: the model was split otherwise than the schedule says, or so that a stage waits for the next.
    """
    for name in ("head", "objective"):
        wanted, found = getattr(options, name), getattr(asked, name)
        if wanted and wanted != found:
            raise ValueError(
                f"schedule: local_losses has {name}={wanted}, but the model was split with {name}={found or None}; "
                f"drop it here, and give split(..., {name}={wanted!r})"
            )
    if asked.reach > 1:
        raise ValueError(
            f"schedule: local_losses has no stage that waits for the next, but the model was split with "
            f"reach={asked.reach}; take reach=1, or train split(...).loss in a loop of your own"
        )


def _prepare(
    options: ScheduleOptions, model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any
) -> nn.Module:
    """The model in parts with heads, cut at `points`, or where stages are balanced."""
    if isinstance(model, LocalLosses):
        return model
    head, objective = cast(Any, options.head or None), cast(Any, options.objective or "task")
    local = split(model, loss, batch, at=options.points or options.stages, head=head, objective=objective)
    names = [name for name, _ in local.named_children()][1:]
    if options.points and names != [*options.points]:
        raise ValueError(f"schedule: local_losses names parts without dots; take points={names}")
    return local


def _notes(planned: Planned) -> list[str]:
    balance, flush = utilisation(planned)
    return [
        f"utilisation of {planned.options.stages} devices: {balance:.0%} with this cut and no bubble; a flush pipeline "
        f"(1F1B) of {planned.options.micro_batches} micro-batches, exact, would reach {flush:.0%}",
        "heads run beside their stages in training; their seconds and activations are not in this forecast",
        f"the fullest stage holds {bytes_text(planned.counts.peak(planned.stages))} of activations at its peak",
    ]


ENTRY = pipeline_method(
    table=lambda options: local_losses(options.stages, options.micro_batches),
    notes=_notes,
    knows=PIPELINE_OPTIONS | {"head", "objective"},
    examples=({"workers": 2, "micro_batches": 4}, {"workers": 2}, {"workers": 4, "micro_batches": 3}),
)
SCHEDULES.register(
    "local_losses",
    replace(
        ENTRY,
        options=replace(ENTRY.options, check=_check),
        objectives=Objectives(
            of=lambda options: dict.fromkeys(range(options.stages - 1), _own_loss),
            prepare=_prepare,
            refuse_stages=_refuse_stages,
        ),
    ),
)


@advises("local losses", "stages learn from losses of their own", "methods/local_losses.md")
def _advice(situation: Situation) -> Advice:
    found = planned_in_stages(situation, "local_losses")
    if found.applies and found.source is not None:
        try:
            split(situation.model, situation.loss, situation.batches[0], at=len(found.source.stages))
        except (ValueError, RuntimeError) as error:
            return not_for(str(error))
    return found
