"""What a plan with a cyclic schedule must admit: where it is not exact, and which plan would do better on this machine.

A cyclic schedule buys something with a delay of at most one step. Where an exact plan, or an equally late one, needs
less memory or sends less, the user reads so above the picture, with the numbers.

Source: Fournier & Oyallon, 2024, whose single-device mode is compared with N concurrent
micro-batches only, and not with gradient accumulation.
"""

from collections.abc import Iterable, Sequence

from armillary.facts.profile_table import bytes_text
from armillary.planning.stage_load import StageLoad
from armillary.schedules.accumulation import accumulation
from armillary.schedules.cyclic_modes import RINGS, CyclicOptions
from armillary.schedules.cyclic_pipeline import cyclic_pipeline
from armillary.schedules.messages import NORM_BYTES, ring_messages
from armillary.schedules.schedule import Place, Schedule
from armillary.schedules.shared import Sharing
from armillary.schedules.simultaneous import simultaneous
from armillary.schedules.zero_messages import held_copies, zero_messages

__all__ = ["notes_on", "peak_on_one_device", "peak_over_workers", "running_note", "stagger"]

SHOWN = 3  # names of modules
ALIKE = 1.05  # ratio of two times up to which they are called the same
DOMINATED_WORKERS = range(3, 10)  # where the ring's extra bytes weigh more than the all-reduce's extra hops


def notes_on(
    options: CyclicOptions, schedule: Schedule, stages: Sequence[StageLoad], running: Sequence[str] = ()
) -> tuple[str, ...]:
    """One sentence each, for the reader of the plan.

    Args:
        running: paths of modules that keep running statistics.
    """
    modes = {
        "one_device": _one_device,
        "pipeline": _pipeline,
        "ring": _ring,
        "zero_ring": _zero_ring,
        "shared": _shared,
    }
    mode = modes[options.mode]
    notes = [_age(schedule), *_clip(options), *mode(options, schedule, stages)]
    if schedule.workers > 1 and options.mode != "one_device":
        notes.append(
            "memory of a stage is the mean over workers: its master weights and optimizer state are on one of them"
        )
    remedies = options.built_remedies() if schedule.stale_share else ()
    notes += [f"remedy: {remedy.says}" for remedy in remedies]
    if options.remedies and not schedule.stale_share:
        notes.append(f"no weight read is old, so {', '.join(options.remedies)} change nothing: drop them")
    if running:
        notes.append(running_note(options.mode, running))
    if options.recompute:
        notes.append("activations are those without recomputation; recomputed stages keep only their input")
    return tuple(notes)


def peak_on_one_device(schedule: Schedule, stages: Sequence[StageLoad]) -> int:
    """Bytes of activations held at most in the steady state when one device does it all, one action after the other."""
    return max(_bytes(schedule.held_after(tick), stages) for tick in _steady(schedule))


def peak_over_workers(schedule: Schedule, stages: Sequence[StageLoad], only: int | None = None) -> int:
    """The same with workers side by side: of all of them together, or of `only` one."""

    def mine(tick: int) -> set[Place]:
        held = schedule.held(tick)
        return {place for place in held if only is None or schedule.worker_of(place[1], place[2]) == only}

    return max(_bytes(mine(tick), stages) for tick in _steady(schedule))


def stagger(stages: Sequence[float]) -> float:
    """Time from one micro-batch to the next on shared devices, from those of a forward and backward of each stage.

    A device keeps a micro-batch until it comes back from all stages above, and stage j of K has K - j devices to take
    turns: the slowest such tail sets the pace.
    """
    return max(sum(stages[j:]) / (len(stages) - j) for j in range(len(stages)))


def _steady(schedule: Schedule) -> range:
    return range(2 * schedule.period, 4 * schedule.period)


def _bytes(held: Iterable[Place], stages: Sequence[StageLoad]) -> int:
    return sum(stages[stage].activation_bytes for _, _, stage in held)


def _age(schedule: Schedule) -> str:
    if not schedule.stale_share:
        return "every weight read is the newest: this plan equals one process in micro-batch order"
    return (
        f"NOT exact: {schedule.stale_share:.0%} of the pairs of micro-batch and stage read weights one step old, "
        f"forward and backward alike"
    )


def _clip(options: CyclicOptions) -> list[str]:
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


def running_note(mode: str, running: Sequence[str]) -> str:
    """What batch statistics mean; `running`: paths of modules that keep running ones."""
    names = ", ".join(running[:SHOWN]) + (f" and {len(running) - SHOWN} more" if len(running) > SHOWN else "")
    if mode in (*RINGS, "delayed_all_reduce"):
        return (
            f"batch statistics ({names}) are those of each worker's own micro-batch, and each worker keeps running "
            f"ones of its own: held-out data are judged with each worker's, a checkpoint keeps worker 0's"
        )
    return (
        f"batch statistics ({names}) are those of each micro-batch on its own; running ones are kept once, in "
        f"micro-batch order"
    )


def _one_device(options: CyclicOptions, schedule: Schedule, stages: Sequence[StageLoad]) -> list[str]:
    count, cut = options.micro_batches, options.stages
    cyclic = peak_on_one_device(schedule, stages)
    one_by_one = peak_on_one_device(accumulation(count, cut), stages)
    at_once = peak_on_one_device(simultaneous(count, cut), stages)
    figures = (
        f"activations at the peak: {bytes_text(cyclic)} with this schedule, {bytes_text(at_once)} with {count} "
        f"micro-batches at once, {bytes_text(one_by_one)} with gradient accumulation"
    )
    if count == 1:
        return [figures]
    less = f"needs {1 - one_by_one / cyclic:.0%} less" if cyclic > one_by_one else "needs no more"
    return [
        f"{figures}. Gradient accumulation {less} on one device and is exact: it is the better plan, unless several "
        f"micro-batches must be in flight"
    ]


def _ring(options: CyclicOptions, schedule: Schedule, stages: Sequence[StageLoad]) -> list[str]:
    workers, weights = options.micro_batches, sum(stage.weight_bytes for stage in stages)
    if workers == 1:
        return []
    sent = [0] * workers
    for message in ring_messages(schedule, options.clip):
        sent[message.sender] += stages[message.stage].weight_bytes if message.content != "norm" else NORM_BYTES
    reduced = 2 * weights * (workers - 1) / workers
    mean = sum(sent) / workers
    figures = (
        f"weights and gradients sent per worker and step: {bytes_text(mean)} round the ring, {bytes_text(max(sent))} "
        f"by the busiest worker; {bytes_text(reduced)} by a delayed all-reduce (2w(N-1)/N, w = {bytes_text(weights)}), "
        f"which is one step late everywhere ({schedule.stale_share:.0%} here)"
    )
    if workers in DOMINATED_WORKERS and max(sent) > reduced:
        figures += (
            f". With {workers} workers the delayed all-reduce is the better plan where bandwidth is what costs; the "
            f"ring's gains are its even traffic, its missing collective and its fresher weights"
        )
    return [figures, *_shared_memory(schedule, stages)]


def _zero_ring(options: CyclicOptions, schedule: Schedule, stages: Sequence[StageLoad]) -> list[str]:
    workers, weights = options.micro_batches, sum(stage.weight_bytes for stage in stages)
    if workers == 1:
        return []
    held = [
        sum(stages[stage].weight_bytes * count for stage, count in copies.items())
        for worker in range(workers)
        for copies in held_copies(schedule, worker, options.clip)
    ]
    sent = [0] * workers
    for message in zero_messages(schedule, options.clip):
        sent[message.sender] += stages[message.stage].weight_bytes if message.content != "norm" else NORM_BYTES
    most = f"the fullest worker holds {bytes_text(max(held))} of weights at its peak, of {bytes_text(weights)} in all"
    if max(held) >= weights:
        most += "; that is no less than mode ring's: take it, or more workers or stages"
    return [
        f"{most}; memory of a stage counts what is under way, gradients too, in the mean over actions. Evaluation and "
        f"checkpoints hold the whole model",
        f"weights and gradients sent per worker and step: {bytes_text(sum(sent) / workers)} round the ring, "
        f"{bytes_text(max(sent))} by the busiest worker; {bytes_text(3 * weights * (workers - 1) / workers)} by fully "
        f"sharded data parallelism (3w(N-1)/N), which is exact and waits for collectives",
        *_shared_memory(schedule, stages),
    ]


def _shared_memory(schedule: Schedule, stages: Sequence[StageLoad]) -> list[str]:
    alone, together = sum(stage.activation_bytes for stage in stages), peak_over_workers(schedule, stages)
    return [
        f"one worker's activations peak at {bytes_text(alone)} as in plain data parallelism; only their sum over the "
        f"{schedule.workers} workers is lower, {bytes_text(together)} against {bytes_text(alone * schedule.workers)}"
    ]


def _pipeline(options: CyclicOptions, schedule: Schedule, stages: Sequence[StageLoad]) -> list[str]:
    count, cut = options.micro_batches, options.stages
    flops = [stage.flops for stage in stages]
    balance = sum(flops) / (cut * max(flops)) if max(flops) else 1.0
    flush = count / (count + cut - 1)
    most = max(peak_over_workers(schedule, stages, worker) for worker in range(cut))
    return [
        f"utilisation of {cut} devices: {balance:.0%} with this cut and no bubble; a flush pipeline (1F1B) of {count} "
        f"micro-batches, exact, would reach {balance * flush:.0%}",
        f"the fullest stage holds {bytes_text(most)} of activations at its peak",
    ]


def _shared(options: CyclicOptions, schedule: Schedule, stages: Sequence[StageLoad]) -> list[str]:
    """Beside the N^2 devices it is half of, and the pipeline, which wants N."""
    count, sharing = options.stages, Sharing(schedule)
    if count == 1:
        return []
    flops = [float(stage.flops) for stage in stages]
    pace = stagger(flops) or 1.0
    busy = sum(flops) / pace / sharing.devices if sum(flops) else sharing.utilisation
    piped = sum(flops) / (count * max(flops)) if max(flops) else 1.0
    slower = max(flops) / pace if max(flops) else 1.0
    verdict = f"As fast on {count} devices, the pipeline is better unless those do not fit"
    if slower > ALIKE:
        verdict = f"With this cut the pipeline's {count} devices take {slower:.2f} times as long"
    most = max(stage.activation_bytes for stage in stages)
    schedule_piped = cyclic_pipeline(count, count, options.slack)
    fullest = max(peak_over_workers(schedule_piped, stages, worker) for worker in range(count))
    return [
        f"{sharing.devices} devices for {count} workers: stage j has {count} - j of them, micro-batch number m "
        f"(counted through all steps) runs on m mod ({count} - j) of them; without sharing they would be {count**2}",
        f"utilisation: {busy:.0%} of {sharing.devices} devices with this cut ({sharing.utilisation:.0%} with equal "
        f"stages), {1 / count:.0%} of {count**2} without sharing; mode pipeline reaches {piped:.0%} of {count}",
        f"activations per device: {bytes_text(most)} at most, one stage of one micro-batch; {bytes_text(fullest)} in "
        f"the pipeline's fullest. {verdict}",
    ]
