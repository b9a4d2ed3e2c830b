"""Which device runs which stage of which micro-batch when data and model parallelism share devices: N(N+1)/2 of them.

N micro-batches on N stages (K = N) would take N devices each, N^2 in all, and keep 1/N of them busy. Staggered, stage j
is in use by N - j micro-batches at a time, so it gets N - j devices: micro-batch number m (counted through all steps: m
= step N + i) runs stage j, forward and backward, on device m mod (N - j) of that stage. There is no other choice: when
its forward is due, only the device of micro-batch m - (N - j) is free, since the very tick before. A device keeps one
micro-batch at a time and is busy 2 of its 2(N - j) ticks; all together 2/(N + 1) of theirs.

Ranks: the devices of stage 0 first, then those of stage 1, and so on; the last stage has one.

Note [Owner]. Gradients of a stage are summed in worker order from device to device. One of them, the owner, has the
master weights and the optimizer state; it gets the sum and hands on the new weights. The micro-batch that reads a
version first at slack 0 is N - j after the last one that it is made of, so it is on the same device: the hop without
slack is none, where that device is the owner. It always is where N - j divides N; elsewhere the device changes from
step to step, the owner does not, and two hops are exposed at slack 0.

Source: Fournier & Oyallon, 2024 (data and model parallelism with shared devices). Departures: the owner; `slack`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd

from armillary.plans.units import bytes_text
from armillary.schedules.clipping import Clip
from armillary.schedules.costs import Planned, peak_over_workers
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.lower_shared_stages import SharedStagesLowering
from armillary.schedules.method import Method, OptionRules, Options, Placing, ScheduleOptions
from armillary.schedules.rank_list import InstructionWriter
from armillary.schedules.registry import SCHEDULES
from armillary.schedules.routes import refuse_on_one_device
from armillary.schedules.schedule import Action, Cell, Row, Schedule, lines_of

__all__ = ["SharedPlacement", "devices_for", "workers_on"]

SHOWN_STEPS = 2


def devices_for(workers: int) -> int:
    """How many devices N workers share."""
    return workers * (workers + 1) // 2


def workers_on(devices: int) -> int:
    """N, of N(N+1)/2 devices.

    Raises:
        ValueError: no N has so many.
    """
    workers = next(n for n in range(devices + 1) if devices_for(n) >= devices)
    if workers < 1 or devices_for(workers) != devices:
        more = [devices_for(n) for n in range(max(1, workers - 1), max(1, workers - 1) + 2)]
        raise ValueError(
            f"schedule: sharing stages wants N(N+1)/2 processes for N workers (1, 3, 6, 10, ...), got {devices}; take "
            f"{' or '.join(map(str, more))}"
        )
    return workers


@dataclass(frozen=True)
class SharedPlacement:
    """
    Args:
        schedule: `cyclic(N, slack=...)`; its rows are micro-batches, which here have no device of their own.

    Raises:
        ValueError: another schedule, for which this is no mapping.
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        count = self.schedule.workers
        wanted = [
            (2 * i + (j if kind == "F" else 2 * count - 1 - j), 1, kind, j, i)
            for i in range(count)
            for j in range(count)
            for kind in ("F", "B")
        ]
        if self.schedule.period != 2 * count or sorted(chain(*self.schedule.ticks)) != sorted(wanted):
            raise ValueError(
                f"schedule: sharing stages wants a cyclic schedule of as many equal stages as micro-batches; got\n"
                f"{self.schedule}"
            )

    def __str__(self) -> str:
        """Device by tick, for two steps, because devices change from one to the next; the ages are theirs, too."""
        count = self.schedule.workers
        rows: list[Row] = []
        for rank in range(self.devices):
            numbered = [
                action._replace(micro_batch=step * count + action.micro_batch)
                for step in range(SHOWN_STEPS)
                for action in self.actions(rank, step)
            ]
            rows.append(tuple(sorted(numbered)))
        head = (
            f"shared: {self.devices} workers (devices), {count} stages, {count} micro-batches, a step every "
            f"{2 * count} ticks; {SHOWN_STEPS} steps, micro-batches counted on"
        )
        return "\n".join([head, *lines_of(rows, self.schedule.staleness * SHOWN_STEPS)])

    @property
    def devices(self) -> int:
        return devices_for(self.schedule.workers)

    @property
    def utilisation(self) -> float:
        """Share of the devices' ticks in which they compute, in the steady state."""
        return 2 / (self.schedule.workers + 1)

    def ranks(self, stage: int) -> range:
        """The devices of a stage."""
        count = self.schedule.workers - stage
        first = self.devices - devices_for(count)
        return range(first, first + count)

    def stage_of(self, rank: int) -> int:
        """The stage of a device."""
        return next(stage for stage in range(self.schedule.stages) if rank in self.ranks(stage))

    def rank_of(self, place: Cell) -> int:
        """The device that runs this stage for this micro-batch of this step, both ways."""
        step, micro_batch, stage = place
        ranks = self.ranks(stage)
        return ranks[(step * self.schedule.workers + micro_batch) % len(ranks)]

    def handed_in(self, rank: int) -> range:
        """All micro-batches of a step, on every device."""
        return range(self.schedule.micro_batches)

    def rotation(self, stage: int) -> int:
        """After how many steps the micro-batches of a step meet the same devices again."""
        count = len(self.ranks(stage))
        return count // gcd(count, self.schedule.workers)

    def around(self, clip: Clip | None, written: InstructionWriter, reduces: bool) -> SharedStagesLowering:
        """Everything crosses, and there is one replica."""
        return SharedStagesLowering(self, clip, written)

    def refuse_late_norm(self, clip: Clip | None) -> None:
        """Between ranks no tick is lost: an owner may know the norm as early as one device would."""
        refuse_on_one_device(self.schedule, clip)

    def actions(self, rank: int, step: int) -> list[Action]:
        """What a device does for one step, at the ticks at which it does it."""
        begin = step * self.schedule.period
        return [
            action._replace(start=action.start + begin)
            for action in sorted(chain(*self.schedule.ticks))
            if self.rank_of((step, action.micro_batch, action.stage)) == rank
        ]

    def owner(self, stage: int) -> int:
        """The device that has a stage's master weights and optimizer state: the one of step 0's last micro-batch."""
        return self.rank_of((0, self.schedule.workers - 1, stage))

    def older(self, stage: int) -> int:
        """One on every device, where an older version is read; a copy of new weights waits for its reader there, too.

        Where all weights are a step old, messages wait longer: up to a sixth more was alive (N = 3, slack 3).
        """
        return len(self.ranks(stage)) * any(ages[stage] for ages in self.schedule.staleness)

    def last(self, step: int, stage: int) -> int:
        """The device on which the sum of a step's gradients is finished."""
        return self.rank_of((step, self.schedule.workers - 1, stage))

    def complete(self, step: int, stage: int) -> int:
        """The tick of the last backward of a step: after it the owner may step with the step's gradient."""
        return self.start("B", (step, self.schedule.workers - 1, stage))

    def start(self, kind: str, place: Cell) -> int:
        """The tick of an action."""
        step, micro_batch, stage = place
        return self.schedule.action(kind, micro_batch, stage).start + step * self.schedule.period

    def readers(self, version: int, stage: int) -> dict[int, int]:
        """By device, in order of time: the tick at which it first reads a version of a stage if no drain comes."""
        count = self.schedule.workers
        first = version * count + sum(ages[stage] for ages in self.schedule.staleness)
        places = [(number // count, number % count, stage) for number in range(first, first + len(self.ranks(stage)))]
        return {self.rank_of(place): self.start("F", place) for place in places}

    def weight_path(self, version: int, stage: int) -> tuple[int, ...]:
        """The way of a version from hand to hand: its owner, then the others in the order in which they read it."""
        start = self.owner(stage)
        return start, *(rank for rank in self.readers(version, stage) if rank != start)


ALIKE = 1.05  # ratio of two times up to which they are called the same


def _table(options: ScheduleOptions) -> Schedule:
    return cyclic(options.micro_batches, options.stages, options.slack)


def _implied(given: Options, workers: int) -> Options:
    count = workers_on(workers)
    return {"stages": count, "micro_batches": count}


def _stagger(stages: Sequence[float]) -> float:
    """Time from one micro-batch to the next on shared devices, from those of a forward and backward of each stage.

    A device keeps a micro-batch until it comes back from all stages above, and stage j of K has K - j devices to take
    turns: the slowest such tail sets the pace.
    """
    return max(sum(stages[j:]) / (len(stages) - j) for j in range(len(stages)))


def _notes(planned: Planned) -> list[str]:
    """Beside the N^2 devices it is half of, and the pipeline, which wants N."""
    options, stages = planned.options, planned.stages
    count, sharing = options.stages, SharedPlacement(planned.schedule)
    if count == 1:
        return []
    flops = [float(stage.flops) for stage in stages]
    pace = _stagger(flops) or 1.0
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
        f"stages), {1 / count:.0%} of {count**2} without sharing; a pipeline reaches {piped:.0%} of {count}",
        f"activations per device: {bytes_text(most)} at most, one stage of one micro-batch; {bytes_text(fullest)} in "
        f"the pipeline's fullest. {verdict}",
    ]


SCHEDULES.register(
    "shared_stages",
    Method(
        table=_table,
        options=OptionRules(
            knows=frozenset({"slack", "micro_batches", "stages", "points", "recompute", "clip_norm", "clip_by"}),
            implied=_implied,
            follows=("micro_batches",),
        ),
        examples=({"workers": 3}, {"workers": 6, "slack": 1}),
        placement=Placing(of=SharedPlacement),
        notes=_notes,
    ),
)
