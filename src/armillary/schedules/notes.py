"""What a plan must admit of its schedule: where it is not exact, and which plan would do better on this machine.

A staggered schedule buys something with a delay of at most one step. Where an exact plan, or an equally late one, needs
less memory or sends less, the user reads so, with the numbers. What is true of one schedule only stands in its file.

Source: Fournier & Oyallon, 2024, whose single-device mode is compared with N concurrent
micro-batches only, and not with gradient accumulation.
"""

from armillary.schedules.costs import Planned
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.schedule import Schedule

__all__ = ["notes_on", "running_note"]

SHOWN = 3  # names of modules


def notes_on(planned: Planned) -> tuple[str, ...]:
    """One sentence each, for the reader of the plan."""
    options, schedule, method = planned.options, planned.schedule, planned.options.method
    replicas = options.replicas(planned.workers)
    if not method.is_cut:
        return (*method.notes(planned), *([running_note(planned)] if planned.running else ()))
    notes = [_age(schedule), *_uncoupled(schedule), *_clip(options), *method.notes(planned)]
    if planned.workers > 1 and not method.replicates_table:
        notes.append(
            "memory of a stage is the mean over workers: its master weights and optimizer state are on one of them"
        )
    corrections = options.built_corrections() if schedule.stale_share else ()
    notes += [f"correction: {correction.says}" for correction in corrections]
    if options.corrections and not schedule.stale_share:
        notes.append(f"no weight read is old, so {', '.join(options.corrections)} change nothing: drop them")
    if planned.running:
        notes.append(running_note(planned))
    if options.recompute:
        notes.append("activations are those without recomputation; recomputed stages keep only their input")
    if replicas > 1:
        who = "processes" if replicas == planned.workers else f"replicas of {planned.workers // replicas} processes"
        notes.append(
            f"{replicas} {who}, each with {options.micro_batches} micro-batches of its own a step: a stage's gradients "
            f"are averaged over them as they come, behind what the process does until its weights are wanted"
        )
    return tuple(notes)


def running_note(planned: Planned) -> str:
    """What batch statistics mean, of modules that keep running ones."""
    options, running = planned.options, planned.running
    names = ", ".join(running[:SHOWN]) + (f" and {len(running) - SHOWN} more" if len(running) > SHOWN else "")
    if options.method.keeps_own_statistics:
        return (
            f"batch statistics ({names}) are those of each worker's own micro-batch, and each worker keeps running "
            f"ones of its own: held-out data are judged with each worker's, a checkpoint keeps worker 0's"
        )
    if options.replicas(planned.workers) > 1:
        return (
            f"batch statistics ({names}) are those of each micro-batch on its own; each replica keeps running ones of "
            f"its own, in micro-batch order, and a checkpoint keeps the first's"
        )
    return (
        f"batch statistics ({names}) are those of each micro-batch on its own; running ones are kept once, in "
        f"micro-batch order"
    )


def _age(schedule: Schedule) -> str:
    if not schedule.stale_share:
        same = "" if schedule.uncoupled else ": this plan equals one process in micro-batch order"
        return f"every weight read is the newest{same}"
    return (
        f"NOT exact: {schedule.stale_share:.0%} of the pairs of micro-batch and stage read weights one step old, "
        f"forward and backward alike"
    )


def _uncoupled(schedule: Schedule) -> list[str]:
    if not schedule.uncoupled:
        return []
    stages = ", ".join(map(str, schedule.uncoupled))
    return [f"NOT exact: no gradient comes back to stages {stages} from the next; each learns from a loss of its own"]


def _clip(options: ScheduleOptions) -> list[str]:
    if options.clip is None:
        return []
    said, at_most = "gradients are clipped", f"at most {options.clip.max_norm:g}"
    if options.clip.by == "global":
        return [
            f"{said} to a norm of {at_most} over all stages, as clip_grad_norm_ does: a "
            f"stage's finished gradient waits for that norm, beside the sum of the next step's"
        ]
    if options.clip.by == "stage":
        return [f"NOT exact: {said} stage by stage, each to a norm of its own of {at_most}"]
    return [
        f"NOT exact: {said} by the norm over all stages of the step before, as if that were theirs, to {at_most}; the "
        f"first step, and the first after a drain (a checkpoint), stage by stage, each by its own norm"
    ]
